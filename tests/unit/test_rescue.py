"""What is saved of a job that failed: one step, that all hold, and none earlier than a worker has received."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrdma import control
from jaxrdma.control import (
    Admitting,
    Alive,
    Failed,
    FlowAgreed,
    FlowReady,
    Held,
    HeldPart,
    JobFailed,
    Left,
    MirrorAt,
    Refused,
    Rescue,
    RescueCommit,
    RescueCommitted,
    RescueSave,
    RescueSaved,
    Rescuing,
    Roster,
    SaveAt,
    SaveMissed,
    SaveRule,
    ShardFile,
)
from jaxrdma.coordinator import LINGER_SECONDS, ROOT_CAUSE_SECONDS
from jaxrdma.plan import place_mirrors
from jaxrdma.rescue import RESCUE_SECONDS, Model, Rescuer
from tests.unit.test_coordinator import ALL, EVENTS, Job, Watched, proposal


def shard(server: int) -> ShardFile:
    return ShardFile(f"server-{server:03d}-of-009.shard", 10, 5, 1)


def held(*parts: tuple[int, list[int]], flow: int = 0) -> Held:
    return Held([HeldPart(flow, server, steps) for server, steps in parts])


def ring(servers: int) -> list[int]:
    return [(server + 1) % servers for server in range(servers)]


def rescuer(servers: int, lost: set[int], saved: int = 0, holders: set[int] | None = None):
    model = Model(frozenset(range(servers) if holders is None else holders), saved)
    made = Rescuer({0: model}, ring(servers), lost)
    return made, made.begin()


# --- the decision ---


def test_the_newest_step_that_all_hold_is_saved_and_the_lost_part_by_its_mirror():
    made, asked = rescuer(3, {1})
    assert asked == [(0, Rescue()), (2, Rescue())]
    assert made.waits_for() == [0, 2]
    assert made.handle(0, held((0, [6, 7]), (2, [7, 8]))) == []
    # Server 2 is one step ahead, its copy of server 1's part is not.
    orders = made.handle(2, held((2, [7, 8]), (1, [6, 7])))
    assert orders == [(0, RescueSave(0, 7, [0])), (2, RescueSave(0, 7, [1, 2]))]
    assert made.waits_for() == [0, 2]
    assert made.handle(2, RescueSaved(0, 7, [shard(2), shard(1)])) == []
    assert made.waits_for() == [0]
    commit = RescueCommit(0, 7, [shard(0), shard(1), shard(2)])
    assert made.handle(0, RescueSaved(0, 7, [shard(0)])) == [(0, commit)]
    assert made.waits_for() == [0]
    assert not made.over
    assert made.handle(0, RescueCommitted(0, 7)) == []
    assert made.over
    assert made.text == "the servers that are left have saved step 7 of model 0"
    assert made.waits_for() == []


def test_with_all_servers_there_each_saves_its_own():
    made, _ = rescuer(2, set())
    made.handle(0, held((0, [3, 4]), (1, [3, 4])))
    orders = made.handle(1, held((1, [4, 5]), (0, [4, 5])))
    assert orders == [(0, RescueSave(0, 4, [0])), (1, RescueSave(0, 4, [1]))]


def test_a_server_that_holds_nothing_is_not_missed_and_keeps_a_copy_all_the_same():
    made, _ = rescuer(3, {0}, holders={0, 2})
    made.handle(2, held((2, [4, 5])))
    assert made.handle(1, held((1, []), (0, [4, 5]))) == [
        (1, RescueSave(0, 5, [0])),
        (2, RescueSave(0, 5, [2])),
    ]
    made, _ = rescuer(3, {1}, holders={0, 2})
    made.handle(0, held((0, [4])))
    assert made.handle(2, held((2, [3, 4]), (1, []))) == [
        (0, RescueSave(0, 4, [0])),
        (2, RescueSave(0, 4, [2])),
    ]


def test_several_models_are_saved_each_at_its_step():
    model = Model(frozenset({0, 1}), 0)
    made = Rescuer({0: model, 2: model}, ring(2), {1})
    assert made.begin() == [(0, Rescue())]
    parts = [HeldPart(f, s, steps) for f, steps in ((0, [9]), (2, [3, 4])) for s in (0, 1)]
    assert made.handle(0, Held(parts)) == [
        (0, RescueSave(0, 9, [0, 1])),
        (0, RescueSave(2, 4, [0, 1])),
    ]
    for flow, step in ((0, 9), (2, 4)):
        files = [shard(0), shard(1)]
        assert made.handle(0, RescueSaved(flow, step, files)) == [
            (0, RescueCommit(flow, step, files))
        ]
        assert not made.over
        made.handle(0, RescueCommitted(flow, step))
    assert made.over
    assert "have saved step 9 of model 0 and step 4 of model 2" in made.text


@pytest.mark.parametrize(
    ("saved", "steps"), [(0, []), (0, [0]), (7, [6, 7]), (7, [7]), (7, [])], ids=str
)
def test_what_is_in_a_checkpoint_or_was_never_begun_is_not_saved_again(saved, steps):
    made, _ = rescuer(2, {1}, saved)
    assert made.handle(0, held((0, steps), (1, steps))) == []
    assert made.over
    assert made.text == "there is no step that is not in a checkpoint"


def test_a_server_and_its_mirror_are_too_many():
    made, asked = rescuer(3, {0, 1})
    assert asked == []
    assert made.over
    assert "server 0 is lost, and so is server 1, which kept a copy of its part" in made.text
    made, asked = rescuer(4, {0, 2})  # no neighbours
    assert asked == [(1, Rescue()), (3, Rescue())]


@pytest.mark.parametrize("when", ["asked", "saving", "committing"])
def test_another_loss_meanwhile_ends_it(when):
    made, _ = rescuer(3, {1})
    if when != "asked":
        made.handle(0, held((0, [7]), (2, [7])))
        made.handle(2, held((2, [7]), (1, [7])))
    if when == "committing":
        made.handle(0, RescueSaved(0, 7, [shard(0)]))
        made.handle(2, RescueSaved(0, 7, [shard(1), shard(2)]))
    made.lose(2, "server 2 died")
    assert made.over
    assert made.text == "what came after the last checkpoint is lost: meanwhile server 2 died"
    assert made.handle(0, RescueCommitted(0, 7)) == []


def test_a_full_disk_is_said():
    for problem in ("server 2 could not write", "no manifest"):
        made, _ = rescuer(3, {1})
        made.handle(0, held((0, [7]), (2, [7])))
        made.handle(2, held((2, [7]), (1, [7])))
        first = problem.startswith("server 2")
        made.handle(2, RescueSaved(0, 7, [], problem if first else ""))
        assert made.over == first
        made.handle(0, RescueSaved(0, 7, [shard(0)]))
        made.handle(0, RescueCommitted(0, 7, problem))
        assert made.over
        assert made.text.endswith(problem)


def test_no_common_step_is_said():
    made, _ = rescuer(2, {1})
    made.handle(0, held((0, [3, 4]), (1, [5, 6])))
    assert made.over
    assert "the servers hold no step of model 0 in common" in made.text


def test_what_nobody_asked_for_changes_nothing():
    made, _ = rescuer(2, {1})
    assert made.handle(1, held((1, [9]))) == []  # the lost one wakes
    assert made.handle(0, RescueSaved(0, 9, [shard(0)])) == []
    assert made.handle(0, RescueCommitted(0, 9)) == []
    assert made.handle(0, RescueSaved(5, 9, [])) == []
    assert made.handle(0, held((0, [8, 9]), (1, [9])))
    assert made.handle(0, held((0, [1]), (1, [1]))) == []  # said twice
    assert made.handle(0, RescueSaved(0, 9, [shard(0), shard(1)]))
    assert made.handle(0, RescueSaved(0, 9, [shard(0), shard(1)])) == []
    assert not made.over


class Training:
    """Servers and mirrors that make steps as real ones do, one small event at a time; any may be stopped anywhere.

    A server makes step n + 1 once it has published n and all workers have sent their gradients, which they do once they
    have received n of all servers; it publishes n + 1 once its mirror has made that too.
    """

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self.made = [0] * servers
        self.copied = [0] * servers  # by whose part it is
        self.published = [0] * servers
        self.received = 0  # by some worker, of all servers

    def moves(self) -> list[tuple[str, int]]:
        moves = [("receive", 0)] if min(self.published) > self.received else []
        for s in range(self.servers):
            if self.made[s] == self.published[s] == self.received:
                moves.append(("make", s))
            # The mirror may be quicker than the server itself: it is sent the mean first.
            if self.copied[s] == self.published[s] == self.received:
                moves.append(("copy", s))
            if min(self.made[s], self.copied[s]) > self.published[s]:
                moves.append(("publish", s))
        return moves

    def move(self, what: str, server: int) -> None:
        if what == "receive":
            self.received += 1
        else:
            where = {"make": self.made, "copy": self.copied, "publish": self.published}[what]
            where[server] += 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_wherever_a_server_is_lost_no_step_is_that_a_worker_has_received(data):
    servers = data.draw(st.integers(2, 5))
    hosts = [f"h{data.draw(st.integers(0, 2))}" for _ in range(servers)]
    mirrors = place_mirrors(hosts)
    training = Training(servers)
    for _ in range(data.draw(st.integers(0, 60))):
        training.move(*data.draw(st.sampled_from(training.moves())))
    lost = data.draw(st.sampled_from([*range(servers), None]))  # or a worker
    made = Rescuer(
        {0: Model(frozenset(range(servers)), 0)}, mirrors, set() if lost is None else {lost}
    )
    orders: list = []
    for server, message in made.begin():
        assert isinstance(message, Rescue)
        kept = mirrors.index(server)

        def steps(newest: int) -> list[int]:
            return [newest] if newest == 0 else [newest - 1, newest]

        answer = held((server, steps(training.made[server])), (kept, steps(training.copied[kept])))
        orders = made.handle(server, answer)
    if made.over:
        assert made.text == "there is no step that is not in a checkpoint"
        assert training.received == 0
        return
    assert {order.step for _, order in orders} <= {training.received, training.received + 1}
    parts = sorted(part for _, order in orders for part in order.parts)
    assert parts == list(range(servers)), "each part once"
    for server, order in orders:
        for part in order.parts:
            assert part == server or (part == lost and mirrors[part] == server)


# --- the coordinator ---


SETTINGS = {
    "num_workers": 2,
    "num_servers": 2,
    "partition_bytes": 64,
    "ordered": False,
    "replicate": 1,
}


def replicated(launcher: bool = False) -> Job:
    """A job of which model 0 has started."""
    job = Job()
    for name in ("s0", "w1", "w0", "s1"):
        incarnation = 70 + int(name[1:]) if name[0] == "s" else 7
        job.join(name, settings=SETTINGS, incarnation=incarnation)
    if launcher:
        job.join("l0", settings=SETTINGS)
    job.say("s0", Admitting("127.0.0.1:1", "127.0.0.1:10"))
    job.say("s1", Admitting("127.0.0.1:2", "127.0.0.1:20"))
    job.say("w0", proposal(programs=[b"zero", b"one"]))
    job.say("w1", proposal())
    for name in ("s0", "s1"):
        job.say(name, FlowReady(0, True, SaveRule(0, 0.0)))
    return job


def save(job: Job, name: str, *parts: int) -> None:
    """What a server does from a `Rescue` on."""
    job.say(name, held(*((part, [6, 7]) for part in parts)))
    order = job.last(name, RescueSave)
    assert order == RescueSave(0, 7, list(parts))
    job.say(name, RescueSaved(0, 7, [shard(part) for part in parts]))
    job.say(name, RescueCommitted(0, job.last(name, RescueCommit).step))


def test_each_server_is_told_whose_copy_it_keeps_and_who_keeps_its_own():
    job = replicated()
    keeps = [job.last(name, Roster).keeps for name in ("s0", "s1")]
    assert [(k.server, k.incarnation) for k in keeps] == [(1, 71), (0, 70)]
    at = [job.last(name, MirrorAt) for name in ("s0", "s1")]
    assert at == [
        MirrorAt(1, "127.0.0.1:20", keeps[1].token),
        MirrorAt(0, "127.0.0.1:10", keeps[0].token),
    ]
    assert keeps[0].token != keeps[1].token
    assert job.last("w0", Roster).keeps is None
    # And with the update for either part.
    programs = [(m.program, m.mirrored) for m in (job.last(n, FlowAgreed) for n in ("s0", "s1"))]
    assert programs == [(b"zero", b"one"), (b"one", b"zero")]
    assert job.last("w0", FlowAgreed).mirrored is None


def test_without_replicate_nobody_hears_of_copies():
    job = Job()
    for name in ("s0", "w1", "w0", "s1"):
        job.join(name)
    for name in ("s0", "s1"):
        job.say(name, Admitting("127.0.0.1:1"))
        assert job.last(name, Roster).keeps is None
        assert MirrorAt not in job.kinds(name)
    job.lose("s0")
    assert job.last("s1", JobFailed) == job.failure


def test_who_would_keep_no_copies_in_a_job_of_copies_is_refused_with_both_settings():
    job = Job()
    job.join("s0", settings=SETTINGS)
    job.join("s1", settings={**SETTINGS, "replicate": 0})
    text = job.last("s1", Refused).text
    assert "has replicate=0, server 0 (host-a, pid 100) has replicate=1" in text
    assert "JAXRDMA_REPLICATE" in text


def test_a_lost_server_is_saved_by_its_mirror_before_servers_and_launchers_hear_of_it():
    job = replicated(launcher=True)
    job.lose("s1")
    for worker in ("w0", "w1"):
        assert job.last(worker, JobFailed).kind == "died"
    assert job.kinds("s0")[-1] is Rescue
    assert job.last("l0", Rescuing) == Rescuing(RESCUE_SECONDS)
    assert JobFailed not in job.kinds("l0")
    assert not job.membership.is_over(job.now)
    assert job.membership.waits_for() == ["server 0"]
    assert "waiting for server 0 to save what is left" in job.membership.progress_text(job.now)
    for name in ("w0", "w1"):
        job.lose(name)  # by what they were told
    save(job, "s0", 0, 1)
    assert "died" in job.failure.text
    assert "have saved step 7 of model 0" in job.failure.text
    assert (job.failure.role, job.failure.index) == ("server", 1)
    for name in ("s0", "l0"):
        assert job.last(name, JobFailed) == job.failure
    assert not job.membership.rescuing
    job.wait(LINGER_SECONDS + 0.25)
    assert job.membership.is_over(job.now)


def test_a_lost_worker_costs_no_step_either():
    job = replicated()
    job.lose("w1")
    assert job.last("w0", JobFailed).kind == "died"
    for name, part in (("s0", 0), ("s1", 1)):
        job.say(name, held((part, [6, 7]), (1 - part, [7, 8])))
    for name, part in (("s0", 0), ("s1", 1)):
        assert job.last(name, RescueSave) == RescueSave(0, 7, [part])
        job.say(name, RescueSaved(0, 7, [shard(part)]))
    job.say("s0", RescueCommitted(0, 7))
    assert "have saved step 7 of model 0" in job.failure.text


def test_a_server_that_reports_its_mirror_lost_is_none_that_is_lost():
    job = replicated()
    job.say("s0", Failed("connection", "server 0 has lost its mirror, server 1: reset"))
    job.wait(ROOT_CAUSE_SECONDS / 2, "w0 w1 s0 s1")
    assert job.membership.failure is None
    job.lose("s1")
    assert (job.failure.kind, job.failure.index) == ("died", 1)
    save(job, "s0", 0, 1)
    assert "have saved" in job.failure.text
    # And if it does not die: the link alone is broken, all can save.
    job = replicated()
    job.say("s0", Failed("connection", "server 0 has lost its mirror, server 1: reset"))
    job.wait(ROOT_CAUSE_SECONDS + 0.25, "w0 w1 s0 s1")
    assert job.failure.kind == "connection"
    assert Rescue in job.kinds("s0")
    assert Rescue in job.kinds("s1")


def test_a_silent_server_is_lost_though_it_may_wake():
    job = replicated()
    job.wait(17, "w0 w1 s0")
    assert job.failure.kind == "silent"
    assert Rescue in job.kinds("s0")
    assert Rescue not in job.kinds("s1")
    job.say("s1", held((1, [9])))
    save(job, "s0", 0, 1)
    assert job.last("s1", JobFailed) == job.failure


@pytest.mark.parametrize("end", ["dies", "fails", "is silent", "is slow"])
def test_a_second_loss_meanwhile_ends_in_the_last_checkpoint(end):
    job = replicated()
    job.lose("s1")
    if end == "dies":
        job.lose("s0")
    elif end == "fails":
        job.say("s0", Failed("raised", "no memory"))
    elif end == "is silent":
        job.wait(17)
    else:
        job.wait(RESCUE_SECONDS + 1, "s0")
    assert not job.membership.rescuing
    assert "what came after the last checkpoint is lost: " in job.failure.text
    assert (job.failure.role, job.failure.index) == ("server", 1)
    job.wait(LINGER_SECONDS + 0.25)
    assert job.membership.is_over(job.now)


def test_servers_that_save_hear_that_the_coordinator_lives():
    job = replicated()
    job.lose("s1")
    job.got["s0"].clear()
    job.wait(1, "s0")
    assert all(isinstance(message, Alive) for message in job.got["s0"])
    assert job.got["s0"]


def test_a_person_is_not_kept_waiting():
    job = replicated()
    job.take(job.membership.interrupt("SIGINT", job.now))
    assert not job.membership.rescuing
    assert job.last("s0", JobFailed).kind == "interrupted"
    job = replicated(launcher=True)
    job.lose("s1")
    job.say("l0", Failed("interrupted", "ended by SIGINT"))
    assert not job.membership.rescuing
    assert job.last("s0", JobFailed).kind == "interrupted"
    job = replicated()
    job.lose("s1")
    job.take(job.membership.interrupt("SIGTERM", job.now))
    assert not job.membership.rescuing
    assert "the coordinator was stopped" in job.failure.text


def test_what_another_attempt_does_not_help_against_is_not_saved():
    job = replicated()
    job.say("w0", Failed("config", "ValueError: the same again"))
    assert not job.membership.rescuing
    assert job.last("s0", JobFailed) == job.failure


def test_a_job_that_has_no_model_yet_saves_nothing():
    job = Job()
    for name in ("s0", "w1", "w0", "s1"):
        job.join(name, settings=SETTINGS)
    for name in ("s0", "s1"):
        job.say(name, Admitting("127.0.0.1:1", "127.0.0.1:2"))
    job.lose("s1")
    assert job.last("s0", JobFailed) == job.failure


def test_a_server_that_keeps_no_copy_where_all_do_is_an_error():
    job = Job()
    for name in ("s0", "w1", "w0", "s1"):
        job.join(name, settings=SETTINGS)
    job.say("s0", Admitting("127.0.0.1:1"))
    assert "server 0 (host-a, pid 100) keeps no copy" in job.failure.text


def test_who_saves_of_a_job_that_lives_breaks_the_protocol():
    for message in (Held([]), RescueSaved(0, 1, []), RescueCommitted(0, 1)):
        job = replicated()
        job.say("s0", message)
        assert job.failure.kind == "protocol"


def test_a_server_lost_while_the_last_step_is_saved_costs_nothing():
    job = replicated()
    for name in ("w0", "w1"):
        job.say(name, Left(8), control.Bye())
    assert job.last("s0", SaveAt).step == control.LAST
    job.say("s0", SaveMissed(0, 8, 8, "the disk is full", last=True))
    job.lose("s1")
    job.say("s0", held((0, [7, 8]), (1, [7, 8])))
    assert job.last("s0", RescueSave) == RescueSave(0, 8, [0, 1])


class Copied(Watched):
    """A job with copies that notices messages to those who are gone; its servers save what they are told to."""

    def check(self) -> None:
        failure = self.membership.failure
        assert self.first is None or failure is not None
        if self.first is not None and failure is not None and failure.kind != "interrupted":
            assert (failure.kind, failure.index) == (self.first.kind, self.first.index)
            assert failure.text.startswith(self.first.text)
        self.first = self.first or failure
        over = self.membership.is_over(self.now)
        assert over or self.membership.waits_for(), "it waits for nobody"

    def wait(self, seconds: float, alive: str = "") -> None:
        super().wait(seconds, alive)
        for name in self.alive().split():
            for message in self.got[name]:
                match message:
                    case Rescue():
                        parts = [HeldPart(0, int(name[1:]), [4, 5]), HeldPart(0, 1, [5, 6])]
                        self.run(("say", name, Held(parts)))
                    case RescueSave():
                        self.run(("say", name, RescueSaved(message.flow, message.step, [])))
                    case RescueCommit():
                        self.run(("say", name, RescueCommitted(message.flow, message.step)))
                    case _:
                        pass


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=25), st.booleans())
def test_no_history_of_a_job_with_copies_hangs(events, begun):
    job = Copied()
    job.admitting = {"s0", "s1"}
    for name in (*ALL.split(), "l0"):
        job.join(name, settings=SETTINGS)
    for name in ("s0", "s1"):
        job.say(name, Admitting("127.0.0.1:1", "127.0.0.1:2"))
    if begun:
        for name in ("w0", "w1"):
            job.say(name, proposal())
        for name in ("s0", "s1"):
            job.say(name, FlowReady(0))
    for event in events:
        job.run(event)
    job.finish()
    assert not job.membership.rescuing
