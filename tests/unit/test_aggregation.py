"""Each rule of aggregation as a scenario, and all of them at once in simulation (`simulation.py`)."""

import re

import pytest

from jaxrdma.aggregation import (
    JOINING,
    Aggregate,
    Aggregation,
    Answer,
    Contribution,
    Counts,
    Drop,
    Epoch,
    Fail,
)
from jaxrdma.policy import Async, BoundedStaleness, SyncReplicas
from tests.unit.simulation import draw_world


class Job:
    """An aggregation with one server and replicas of incarnation 1, that remembers what each would push next."""

    def __init__(self, policy, replicas, servers=1, places=None):
        self.sequences = {}
        self.holds = {}
        self.servers = servers
        self.aggregation = Aggregation(
            policy.complete(places or replicas),
            servers=servers,
            replicas=dict.fromkeys(range(replicas), 1),
        )
        self.started = self.note(self.aggregation.start())

    def note(self, decisions):
        for decision in decisions:
            if isinstance(decision, Answer):
                self.holds[decision.replica] = decision.step
                self.sequences[decision.replica] = decision.sequence + 1
        return decisions

    def push(self, replica, incarnation=1, sequence=None, step=None):
        """A gradient lands whole. What the other servers have to say is no news."""
        sequence = self.sequences[replica] if sequence is None else sequence
        step = self.holds[replica] if step is None else step
        out = []
        for server in range(self.servers):
            out += self.aggregation.landed(server, replica, incarnation, sequence, step)
        return self.note(out)

    def join(self, replica, incarnation=1):
        return self.note(self.aggregation.joins(replica, incarnation))

    def leave(self, replica, incarnation=1):
        return self.note(self.aggregation.leaves(replica, incarnation))

    def lose(self, replica, incarnation=1):
        return self.note(self.aggregation.lost(replica, incarnation, "it fell silent"))


def mean(step, *contributions):
    """The mean of (replica, sequence) pairs of first incarnations."""
    return Aggregate(step, tuple(Contribution(r, 1, s) for r, s in contributions))


def kinds(decisions):
    return [type(decision).__name__ for decision in decisions]


# --- the three policies ---


def test_all_begin_with_the_first_version():
    job = Job(SyncReplicas(), 2)
    assert job.started == [
        Epoch(1, 0, (), ((0, 1), (1, 1)), 2, 2),
        Answer(0, 1, JOINING, 0),
        Answer(1, 1, JOINING, 0),
    ]


def test_sync_takes_one_gradient_of_each_in_replica_order():
    job = Job(SyncReplicas(), 3)
    assert job.push(2) == job.push(0) == []
    assert job.push(1) == [
        mean(0, (0, 0), (1, 0), (2, 0)),
        Answer(2, 1, 0, 1),
        Answer(0, 1, 0, 1),
        Answer(1, 1, 0, 1),
    ]


def test_a_gradient_counts_when_its_last_share_has_landed():
    job = Job(SyncReplicas(), 2, servers=2)
    assert job.push(0) == []
    landed = job.aggregation.landed
    assert landed(1, 1, 1, 0, 0) == landed(1, 1, 1, 0, 0) == []  # twice from one server
    assert [who.text for who in job.aggregation.waits_for()] == [
        "gradient number 0 of replica 1 (incarnation 1) has not landed whole on server 0"
    ]
    assert kinds(landed(0, 1, 1, 0, 0)) == ["Aggregate", "Answer", "Answer"]
    assert landed(0, 1, 1, 0, 0) == landed(0, 0, 1, 0, 0) == []  # long after


def test_the_first_n_form_the_mean_and_the_late_one_goes_on_with_the_newest():
    job = Job(SyncReplicas(2), 3)
    job.push(2)
    assert job.push(0) == [mean(0, (0, 0), (2, 0)), Answer(2, 1, 0, 1), Answer(0, 1, 0, 1)]
    job.push(0)
    assert job.push(2)[0] == mean(1, (0, 1), (2, 1))
    assert job.push(1) == [Drop(Contribution(1, 1, 0), "stale"), Answer(1, 1, 0, 2)]
    assert job.aggregation.counts(1) == Counts(0, {"stale": 1})
    assert job.aggregation.counts(2) == Counts(2)


def test_several_contributions_are_shared_fairly():
    job = Job(SyncReplicas(5), 3)  # nobody gives more than 2
    assert job.push(0) == [Answer(0, 1, 0, 0)]
    assert job.push(0) == []
    assert job.push(1) == [Answer(1, 1, 0, 0)]
    assert job.push(2) == []  # the others have begun all five
    assert job.push(1) == [
        mean(0, (0, 0), (0, 1), (1, 0), (1, 1), (2, 0)),
        Answer(0, 1, 1, 1),
        Answer(1, 1, 1, 1),
        Answer(2, 1, 0, 1),
    ]


def test_a_share_that_is_lost_is_given_by_others():
    job = Job(SyncReplicas(4, on_loss="shrink"), 2)
    job.push(0)
    job.push(0)
    job.push(1)
    assert job.lose(1) == [
        Drop(Contribution(1, 1, 0), "lost"),
        Epoch(2, 0, ((1, 1),), (), 1, 4),
        Answer(0, 1, 1, 0),
    ]
    assert job.push(0) == [Answer(0, 1, 2, 0)]
    assert job.push(0)[0] == mean(0, (0, 0), (0, 1), (0, 2), (0, 3))


def test_async_applies_each_gradient_in_the_order_of_landing():
    job = Job(Async(), 2)
    assert job.push(1) == [mean(0, (1, 0)), Answer(1, 1, 0, 1)]
    assert job.push(1) == [mean(1, (1, 1)), Answer(1, 1, 1, 2)]
    assert job.push(0) == [mean(2, (0, 0)), Answer(0, 1, 0, 3)]


def test_async_with_one_worker_is_local_sgd():
    job = Job(Async(), 1)
    for step in range(5):
        assert job.holds[0] == step
        assert job.push(0) == [mean(step, (0, step)), Answer(0, 1, step, step + 1)]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_nobody_is_more_than_k_steps_ahead_of_the_slowest(k):
    job = Job(BoundedStaleness(k), 2)
    for sequence in range(k):
        assert job.push(0) == [Answer(0, 1, sequence, 0)]
    assert job.push(0) == []  # it would be k + 1 ahead
    assert job.push(1)[0] == mean(0, (0, 0), (1, 0))
    assert job.holds == {0: 1, 1: 1}
    for step in range(1, k + 1):
        assert mean(step, (0, step), (1, step)) in job.push(1)


def test_bounded_staleness_of_zero_is_sync():
    jobs = [Job(BoundedStaleness(0, on_loss="shrink"), 4), Job(SyncReplicas(on_loss="shrink"), 4)]
    script = [("push", r) for r in (0, 1, 2, 3, 3, 2, 1, 0, 0, 2)]
    script += [("lose", 1), ("push", 3), ("join", 5), ("push", 0), ("push", 3), ("push", 2)]
    script += [("push", 5), ("leave", 0), ("push", 2), ("push", 3), ("push", 5), ("leave", 5)]
    script += [("push", 3), ("push", 2)]
    for method, replica in script:
        bounded, sync = (getattr(job, method)(replica) for job in jobs)
        assert bounded == sync
    assert jobs[0].aggregation.step == 6


# --- who comes and goes ---


def test_a_newcomer_is_in_after_the_step_under_way():
    job = Job(SyncReplicas(), 2)
    job.push(0)
    assert job.join(2) == []
    assert job.push(1) == [
        mean(0, (0, 0), (1, 0)),
        Epoch(2, 1, (), ((2, 1),), 3, 3),
        Answer(2, 1, JOINING, 1),
        Answer(0, 1, 0, 1),
        Answer(1, 1, 0, 1),
    ]
    assert job.join(2) == []  # the same once more


def test_places_that_nobody_has_taken_are_missed_by_nobody():
    job = Job(SyncReplicas(3), 2, places=4)
    job.push(0)
    assert job.push(1)[0] == mean(0, (0, 0), (1, 0))  # all, as they are fewer than 3
    job.join(2)
    job.join(3)
    assert [who.replica for who in job.aggregation.waits_for()] == [0, 1, 2, 3]
    job.push(3)
    job.push(2)
    assert job.push(0)[0] == mean(1, (0, 1), (2, 0), (3, 0))  # the first 3 of 4
    # It began with 2, so 2 will do; and not fewer.
    assert kinds(job.lose(3)) == kinds(job.lose(2)) == ["Epoch"]
    (fail,) = job.lose(1)
    assert "1 remain, and sync_replicas(3 of 4, on_loss=shrink) needs at least 2" in fail.text
    job = Job(SyncReplicas(6), 1, places=4)  # alone, it gives all 6; three give 2 each
    for _ in range(5):
        assert kinds(job.push(0)) == ["Answer"]
    assert job.push(0)[0] == mean(0, *((0, sequence) for sequence in range(6)))
    job.join(1)
    job.join(2)
    for replica in (0, 1, 2):
        assert kinds(job.push(replica)) == ["Answer"]
    assert kinds(job.push(0)) == kinds(job.push(1)) == []
    assert job.push(2)[0] == mean(1, (0, 6), (0, 7), (1, 0), (1, 1), (2, 0), (2, 1))


def test_a_newcomer_to_bounded_staleness_does_not_wait_for_those_ahead():
    job = Job(BoundedStaleness(2), 2)
    job.push(0)
    job.push(0)
    job.join(2)
    decisions = job.push(1)
    assert kinds(decisions) == ["Aggregate", "Epoch", "Answer", "Answer"]
    job.push(1)
    assert job.push(2)[0] == mean(1, (0, 1), (1, 1), (2, 0))


POLICIES = [
    SyncReplicas(),
    SyncReplicas(2),
    SyncReplicas(5),
    Async(),
    BoundedStaleness(0),
    BoundedStaleness(2),
]


@pytest.mark.parametrize("on_loss", ["fail", "shrink", "wait"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
def test_data_that_runs_out_on_one_worker_hangs_no_other(policy, on_loss):
    """61 batches on the first of three workers, 60 on the others; each leaves when its last exchange is answered."""
    policy = type(policy)(**{**vars(policy), "on_loss": on_loss})
    job = Job(policy, 3)
    batches = {0: 61, 1: 60, 2: 60}
    sizes = set()
    at_work = True
    while at_work:
        at_work = False
        for replica in list(batches):
            if replica in job.holds:  # answered
                at_work = True
                if not batches[replica]:
                    del batches[replica], job.holds[replica]
                    decisions = job.leave(replica)
                else:
                    batches[replica] -= 1
                    step = job.holds.pop(replica)
                    decisions = job.push(replica, step=step)
                assert not any(isinstance(d, Fail) for d in decisions)
                sizes |= {len(d.contributions) for d in decisions if isinstance(d, Aggregate)}
    assert batches == {}
    counts = [job.aggregation.counts(replica) for replica in range(3)]
    decided = [c.accepted + sum(c.dropped.values()) for c in counts]
    assert decided == [61, 60, 60]
    if policy == SyncReplicas(on_loss=on_loss) or isinstance(policy, BoundedStaleness):
        assert [c.accepted for c in counts] == [61, 60, 60]
        assert job.aggregation.step == 61
        assert sizes >= {1, 3}
    if policy.describe().startswith("sync_replicas(5"):
        assert sizes == {5}


def test_what_was_given_in_advance_counts_after_its_replica_left():
    job = Job(BoundedStaleness(2), 2)
    job.push(0)
    job.push(0)
    assert job.leave(0) == []
    assert job.push(1)[0] == mean(0, (0, 0), (1, 0))
    assert job.push(1) == [
        mean(1, (0, 1), (1, 1)),
        Epoch(2, 2, ((0, 1),), (), 1, 1),
        Answer(1, 1, 1, 2),
    ]


def test_a_loss_in_pure_sync_ends_the_job_and_says_who():
    job = Job(SyncReplicas(), 3)
    job.push(0)
    (fail,) = job.lose(2)
    assert re.match(
        r"replica 2 \(incarnation 1\) was lost at step 0: it fell silent\. By sync_replicas\(3 of 3, on_loss=fail\) "
        r".*on_loss='shrink' or 'wait'",
        fail.text,
    )
    assert job.push(1) == job.leave(0) == job.join(7) == []
    assert job.aggregation.failed
    assert job.aggregation.waits_for() == []


def test_shrinking_drops_what_the_lost_one_gave_and_goes_on():
    job = Job(SyncReplicas(on_loss="shrink"), 3)
    job.push(2)
    job.push(0)
    assert job.lose(2) == [Drop(Contribution(2, 1, 0), "lost"), Epoch(2, 0, ((2, 1),), (), 2, 2)]
    assert job.push(1) == [mean(0, (0, 0), (1, 0)), Answer(0, 1, 0, 1), Answer(1, 1, 0, 1)]
    job.push(0)
    assert kinds(job.lose(1)) == ["Epoch", "Aggregate", "Answer"]  # it was all that was missing


def test_with_backups_n_stays_until_fewer_remain():
    job = Job(SyncReplicas(2), 3)
    assert job.lose(0) == [Epoch(2, 0, ((0, 1),), (), 2, 2)]
    (fail,) = job.lose(1)
    assert re.search(r"1 remain.*2 of 3.*needs at least 2", fail.text)


def test_those_that_left_in_good_order_lower_what_backups_need():
    job = Job(SyncReplicas(2), 3)
    job.leave(0)
    assert job.leave(1)[0].quorum == 1
    assert kinds(job.push(2)) == ["Aggregate", "Answer"]


def test_waiting_goes_on_with_the_next_incarnation():
    job = Job(SyncReplicas(on_loss="wait"), 2)
    job.push(1)
    job.push(0, sequence=0, step=0)
    job.push(0)
    assert job.lose(1) == []
    assert job.aggregation.stands_still
    (who,) = job.aggregation.waits_for()
    assert (who.replica, who.step) == (1, 1)
    assert re.search("replica 1 .incarnation 1. was lost; its next incarnation", who.text)
    assert job.push(1, sequence=1, step=1) == [Drop(Contribution(1, 1, 1), "lost")]
    assert job.join(1, 2) == [Epoch(2, 1, ((1, 1),), ((1, 2),), 2, 2), Answer(1, 2, JOINING, 1)]
    assert job.push(1, 2)[0].contributions == (Contribution(0, 1, 1), Contribution(1, 2, 0))


def test_backups_do_without_the_one_that_is_waited_for():
    job = Job(SyncReplicas(2, on_loss="wait"), 3)
    job.lose(0)
    job.push(1)
    assert kinds(job.push(2)) == ["Aggregate", "Answer", "Answer"]


def test_late_messages_of_an_old_incarnation_are_dropped_and_counted_once():
    job = Job(SyncReplicas(on_loss="shrink"), 2, servers=2)
    job.aggregation.landed(0, 1, 1, 0, 0)  # half of it
    assert job.lose(1)[0] == Drop(Contribution(1, 1, 0), "lost")
    assert kinds(job.join(1, 2)) == ["Epoch", "Answer"]
    assert job.aggregation.landed(1, 1, 1, 0, 0) == []  # the other half
    assert job.push(1, 1, sequence=1, step=0) == [Drop(Contribution(1, 1, 1), "lost")]
    assert job.join(1, 1) == job.lose(1, 1) == job.leave(1, 1) == []
    assert job.aggregation.counts(1) == Counts(0, {"lost": 2})


def test_a_new_incarnation_replaces_one_that_was_not_known_to_be_lost():
    job = Job(SyncReplicas(on_loss="shrink"), 2)
    assert job.join(1, 2) == [
        Epoch(2, 0, ((1, 1),), ((1, 2),), 2, 2),
        Answer(1, 2, JOINING, 0),
    ]
    fails = Job(SyncReplicas(), 2).join(1, 2)
    assert re.search("taken by a new incarnation, 2", fails[0].text)


def test_who_is_lost_before_it_joined_never_joins():
    job = Job(SyncReplicas(), 1)
    assert job.lose(1, 5) == job.join(1, 5) == []
    assert job.push(1, 5, sequence=0, step=0) == [Drop(Contribution(1, 5, 0), "lost")]


def test_a_gradient_of_a_version_that_is_not_there_is_dropped():
    """After a restore of an older checkpoint: the worker goes on from what is there now."""
    job = Job(SyncReplicas(4), 2)
    assert job.push(0, step=7) == [Drop(Contribution(0, 1, 0), "ahead"), Answer(0, 1, 0, 0)]
    for replica in (0, 1, 0):
        job.push(replica)
    assert isinstance(job.push(1)[0], Aggregate)  # its share was not used up


def test_a_breach_of_the_protocol_ends_the_job_with_its_name():
    (fail,) = Job(SyncReplicas(), 2).push(0, sequence=3)
    assert re.search("server 0 .*number 3 of replica 0, expected number 0", fail.text)
    job = Job(SyncReplicas(), 2)
    job.push(0)
    (fail,) = job.push(0, sequence=1, step=0)
    assert re.search("expected none until number 0 is answered", fail.text)
    job = Job(SyncReplicas(), 2, servers=2)
    job.aggregation.landed(0, 0, 1, 0, 0)
    (fail,) = job.aggregation.landed(1, 0, 1, 0, 3)
    assert re.search("server 1 .*version 3, another server on version 0", fail.text)


# --- everything at once ---


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("replicas", "seeds"), [(1, 100), (2, 200), (3, 200), (5, 300), (50, 20), (1000, 1)]
)
def test_the_invariants_hold_whatever_happens(replicas, seeds):
    for seed in range(seeds):
        world = draw_world(seed, replicas)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {world.policy}: {error}") from error
