"""Membership: the first cause wins, nobody waits for nothing, and strangers stay out."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrdma import control, coordinator
from jaxrdma.control import (
    Admitting,
    Alive,
    Bye,
    Ended,
    Failed,
    FlowAgreed,
    FlowProposal,
    FlowReady,
    FlowRejected,
    FlowStart,
    Heartbeat,
    Hello,
    JobFailed,
    LeafSpec,
    Left,
    MemberLeft,
    Offer,
    Refused,
    Restore,
    Restored,
    Roster,
    SaveAt,
    SaveCommit,
    SaveCommitted,
    SaveEnded,
    SaveRule,
    ShardFile,
    ShardSaved,
    Shutdown,
    Waiting,
    Welcome,
)
from jaxrdma.coordinator import LINGER_SECONDS, ROOT_CAUSE_SECONDS, SHUTDOWN_SECONDS, Membership
from jaxrdma.errors import TransportError
from jaxrdma.policy import SyncReplicas, to_wire
from jaxrdma.savepoints import LAST_SAVE_SECONDS

LEAF = LeafSpec("params['w']", (2, 3), "float32")


def hello(role: str, index: int, **changes) -> Hello:
    values = {
        "role": role,
        "index": index,
        "incarnation": 7,
        "version": control.VERSION,
        "job": "job",
        "secret": "s",
        "host": "host-a",
        "pid": 100 + index,
        "offer": Offer("tcp", verbs=False, why="asks for tcp"),
        "settings": {"num_workers": 2, "num_servers": 2, "partition_bytes": 64, "ordered": False},
    }
    return Hello(**{**values, **changes})


def proposal(flow: int = 0, **changes) -> FlowProposal:
    values = {
        "flow": flow,
        "leaves": [LEAF],
        "digest": "d",
        "mode": "update",
        "policy": to_wire(SyncReplicas(2, 2).complete(2)),
        "update_fingerprint": "u",
    }
    return FlowProposal(**{**values, **changes})


class Job:
    """A membership, and what every member was sent. Members are called w0, w1, s0, s1, launchers l0, l1."""

    def __init__(self, workers: int = 2, servers: int = 2, **options) -> None:
        self.now = 1000.0
        self.workers, self.servers = workers, servers
        self.membership = Membership(
            workers, servers, job="job", secret="s", now=self.now, **options
        )
        self.ids: dict[str, int] = {}
        self.got: dict[str, list] = {}

    def take(self, out) -> None:
        names = {id: name for name, id in self.ids.items()}
        for id, message in out:
            self.got[names[id]].append(message)

    def join(self, name: str, as_name: str | None = None, **changes) -> None:
        self.ids[as_name or name] = len(self.ids)
        self.got[as_name or name] = []
        role = {"w": "worker", "s": "server", "l": "launcher"}[name[0]]
        changes.setdefault(
            "settings",
            {
                "num_workers": self.workers,
                "num_servers": self.servers,
                "partition_bytes": 64,
                "ordered": False,
            },
        )
        self.say(as_name or name, hello(**{"role": role, "index": int(name[1:]), **changes}))

    def say(self, name: str, *messages) -> None:
        for message in messages:
            self.take(self.membership.handle(self.ids[name], message, self.now))

    def lose(self, name: str, why: str = "") -> None:
        self.take(self.membership.lost(self.ids[name], why, self.now))

    def wait(self, seconds: float, alive: str = "") -> None:
        """Time passes; the members named in `alive` send heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            for name in alive.split():
                self.say(name, Heartbeat(-1, ""))
            self.take(self.membership.tick(self.now))

    def kinds(self, name: str) -> list[type]:
        return [type(m) for m in self.got[name] if not isinstance(m, Alive | Waiting)]

    def last(self, name: str, kind: type):
        return [m for m in self.got[name] if isinstance(m, kind)][-1]

    @property
    def failure(self) -> JobFailed:
        assert self.membership.failure is not None
        return self.membership.failure


@pytest.fixture
def job() -> Job:
    """Everybody has joined, and has been sent the roster."""
    job = Job()
    for name in ("s0", "w1", "w0", "s1"):
        job.join(name)
    job.say("s0", Admitting("127.0.0.1:1"))
    job.say("s1", Admitting("127.0.0.1:1"))
    return job


ALL = "w0 w1 s0 s1"


# --- start ---


def test_the_roster_comes_when_all_are_here_and_each_sees_only_its_own_tokens(job):
    token = {}
    for s in (0, 1):
        entries = job.last(f"s{s}", Roster).servers
        assert [set(e.tokens) for e in entries] == [{0, 1} if s == i else set() for i in (0, 1)]
        token.update({(w, s): entries[s].tokens[w] for w in (0, 1)})
    assert len(set(token.values())) == 4
    assert all(len(t) == 16 for t in token.values())
    for w in (0, 1):
        entries = job.last(f"w{w}", Roster).servers
        assert [e.tokens for e in entries] == [{w: token[w, 0]}, {w: token[w, 1]}]
        assert job.kinds(f"w{w}") == [Welcome, Roster]
    assert [(e.index, e.pid) for e in job.last("w0", Roster).workers] == [(0, 100), (1, 101)]


def test_workers_are_not_sent_to_a_server_that_does_not_expect_them_yet():
    job = Job(1, 2)
    for name in ("w0", "s0", "s1"):
        job.join(name)
    job.say("s0", Admitting("127.0.0.1:1"))
    assert job.kinds("w0") == [Welcome]
    job.wait(4, "w0 s0 s1")
    assert "waiting for server 1 to let the workers in" in job.last("w0", Waiting).text
    job.say("s1", Admitting("127.0.0.1:1"))
    assert job.kinds("w0") == [Welcome, Roster]


def test_a_worker_is_told_where_the_servers_let_it_in_and_a_server_must_say_it(job):
    assert [e.address for e in job.last("w0", Roster).servers] == ["127.0.0.1:1"] * 2
    job = Job(1, 1)
    for name in ("w0", "s0"):
        job.join(name)
    job.say("s0", Admitting(""))
    assert "server 0 (host-a, pid 100) gave no address for data" in job.failure.text


AUTO, NONE = Offer("auto", True, ""), Offer("auto", False, "has no RDMA device")
VERBS, TCP = Offer("verbs", True, ""), Offer("tcp", False, "asks for tcp")


@pytest.mark.parametrize(
    ("offers", "transport", "why"),
    [
        ({}, "verbs", "every process can use it"),
        ({"w1": NONE}, "tcp", "worker 1 has no RDMA device"),
        ({"s1": NONE, "w0": TCP}, "tcp", "worker 0 asks for it"),
        ({"w0": VERBS}, "verbs", "worker 0 asks for it"),
        (dict.fromkeys(("w0", "w1", "s0", "s1"), VERBS), "verbs", "asked for"),
        (dict.fromkeys(("w0", "w1", "s0", "s1"), TCP), "tcp", "asked for"),
    ],
)
def test_all_processes_are_told_the_one_transport_that_all_can_use(offers, transport, why):
    job = Job()
    for name in ("s0", "w1", "w0", "s1"):
        job.join(name, offer=offers.get(name, AUTO))
    job.say("s0", Admitting("127.0.0.1:1"))
    job.say("s1", Admitting("127.0.0.1:1"))
    told = {(job.last(name, Roster).transport, job.last(name, Roster).why) for name in job.got}
    assert told == {(transport, why)}


def test_verbs_asked_for_where_somebody_cannot_fails_the_job_naming_both():
    job = Job(1, 1)
    job.join("s0", offer=NONE)
    job.join("w0", offer=VERBS)
    assert job.failure.kind == "transport"
    assert "worker 0 asks for transport verbs, but server 0 has no RDMA device" in job.failure.text
    for name in ("s0", "w0"):
        assert job.last(name, JobFailed) == job.failure
    assert isinstance(control.job_error(job.failure), TransportError)


def test_two_that_ask_for_different_transports_are_both_named():
    job = Job()
    job.join("s0", offer=VERBS)
    job.join("w0", offer=AUTO)
    job.join("w1", offer=TCP)
    text = job.last("w1", Refused).text
    assert (
        "worker 1 (host-a, pid 101) asks for transport tcp, server 0 (host-a, pid 100) for verbs"
        in text
    )
    assert "JAXRDMA_TRANSPORT" in text


def test_waiting_names_who_is_missing_and_since_when():
    job = Job()
    for name in ("s0", "s1", "w0"):
        job.join(name)
    job.wait(12, "s0 s1 w0")
    texts = [m.text for m in job.got["w0"] if isinstance(m, Waiting)]
    assert texts[-1] == "have 1 of 2 workers and 2 of 2 servers, waiting for worker 1, 12 s"
    assert len(texts) == 4


def test_a_start_that_takes_too_long_fails_naming_the_missing():
    job = Job(connect_timeout=20)
    job.wait(15)  # nobody is here yet: the clock starts with the first
    job.join("w1")
    job.wait(19, "w1")
    assert job.membership.failure is None
    job.wait(2, "w1")
    assert job.failure.kind == "timeout"
    assert "have 1 of 2 workers and 0 of 2 servers" in job.failure.text
    assert "waiting for worker 0, server 0 and server 1" in job.failure.text
    assert job.last("w1", JobFailed) == job.failure


def test_nobody_coming_at_all_fails_too():
    job = Job(connect_timeout=20)
    job.wait(21)
    assert job.failure.kind == "timeout"
    assert job.membership.is_over(job.now)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"secret": "t"}, "secret", "a wrong one came"),
        ({"secret": ""}, "secret", "none came"),
        ({"secret": "sé"}, "secret", "a wrong one came"),
        ({"job": "other"}, "job", "job 'other'.*job 'job'"),
        ({"version": "9"}, "version", "runs jaxrdma 9"),
        ({"index": 2}, "index", "index must be 0 to 1"),
        ({"role": "cook"}, "role", "worker or server"),
        (
            {"settings": {"num_workers": 3, "num_servers": 2}},
            "settings",
            "expects 3 workers, the coordinator 2",
        ),
        (
            {"settings": {"num_workers": 2, "num_servers": 2, "partition_bytes": 128}},
            "settings",
            "ordered|partition_bytes=128, worker 0 .* has partition_bytes=64",
        ),
    ],
)
def test_who_does_not_belong_is_refused_with_a_reason(changes, kind, text):
    job = Job()
    job.join("w0")
    job.join("w1", **changes)
    (refused,) = job.got["w1"]
    assert isinstance(refused, Refused)
    assert refused.kind == kind
    import re

    assert re.search(text, refused.text), refused.text
    job.lose("w1")
    assert job.membership.failure is None


def test_two_claimants_of_one_index_are_both_named():
    job = Job()
    job.join("w0")
    job.join("w0", as_name="x", host="host-b", pid=55)
    text = job.last("x", Refused).text
    assert "worker 0" in text
    assert "host-a, pid 100" in text
    assert "host-b, pid 55" in text
    job.lose("x")
    job.wait(4, "w0")
    assert "host-b, pid 55" in job.last("w0", Waiting).text


def test_the_secret_is_in_no_message():
    job = Job()
    job.join("w0", secret="guess")
    assert "guess" not in str(job.got)


def test_a_stream_must_begin_with_hello():
    job = Job()
    job.ids["x"], job.got["x"] = 0, []
    job.say("x", Bye())
    assert job.last("x", Refused).kind == "protocol"


# --- models ---


def test_equal_proposals_are_agreed_then_started(job):
    job.say("w1", proposal())
    job.say("w0", proposal(programs=[b"p0", b"p1"]))
    assert job.last("s0", FlowAgreed).program == b"p0"
    assert job.last("s1", FlowAgreed).program == b"p1"
    assert job.last("w1", FlowAgreed).program is None
    job.say("s1", FlowReady(0))
    assert FlowStart not in job.kinds("w0")
    job.say("s0", FlowReady(0))
    assert all(job.last(name, FlowStart).flow == 0 for name in ALL.split())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"leaves": [LeafSpec(LEAF.path, (2, 4), "float32")]}, "shape"),
        ({"leaves": [LeafSpec(LEAF.path, (2, 3), "bfloat16")]}, "dtype"),
        ({"leaves": [LEAF, LeafSpec("b", (1,), "float32")]}, "missing"),
        ({"mode": "average"}, "mode"),
        ({"policy": to_wire(SyncReplicas(1, 2).complete(2))}, "policy"),
        ({"update_fingerprint": "v"}, "update"),
        ({"digest": "e"}, "plan"),
    ],
)
def test_models_that_differ_are_rejected_everywhere_with_both_versions(job, change, text):
    job.say("w0", proposal())
    job.say("w1", proposal(**change))
    for name in ALL.split():
        rejected = job.last(name, FlowRejected)
        assert text in rejected.text
        assert "worker 0" in rejected.text
        assert "worker 1" in rejected.text
    assert job.failure.kind == "mismatch"


def test_two_models_do_not_mix(job):
    job.say("w0", proposal(0), proposal(1, digest="x"))
    job.say("w1", proposal(1, digest="x"))
    assert [m.flow for m in job.got["w0"] if isinstance(m, FlowAgreed)] == [1]


def test_a_model_that_waits_says_for_whom(job):
    job.say("w1", Heartbeat(3, "loading data"))
    job.say("w0", proposal())
    job.wait(4, "w0 s0 s1 w1")
    text = job.last("s0", Waiting).text
    assert "model 0: 1 of 2 workers have called init, waiting for worker 1" in text
    job.say("w1", proposal())
    job.say("s0", FlowReady(0))
    job.wait(4, ALL)
    assert "waiting for server 1 to be ready" in job.last("w0", Waiting).text


def test_a_worker_that_left_cannot_be_waited_for_by_a_new_model(job):
    job.say("w0", Left(5), Bye())
    job.say("w1", proposal())
    assert job.failure.kind == "left"
    assert "worker 0" in job.failure.text
    assert "worker 1 waits" in job.failure.text


def test_leaving_while_a_model_waits_fails_it(job):
    job.say("w1", proposal())
    job.say("w0", Left(5))
    assert (job.failure.kind, job.failure.role, job.failure.index) == ("left", "worker", 0)
    assert job.last("s0", JobFailed) == job.failure


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s0", proposal()),
        ("w0", FlowReady(0)),
        ("s0", FlowReady(4)),
        ("w0", Admitting("127.0.0.1:1")),
        ("s0", Admitting("127.0.0.1:1")),
        ("w0", hello("worker", 0)),
    ],
)
def test_what_breaks_the_protocol_fails_the_job_by_name(job, name, message):
    job.say(name, message)
    assert job.failure.kind == "protocol"
    assert (job.failure.role[0] + str(job.failure.index)) == name


# --- ends ---


def test_all_leaving_is_a_good_end(job):
    job.say("w0", Left(60), Bye())
    job.lose("w0")
    assert job.last("w1", MemberLeft) == MemberLeft("worker", 0, 60)
    assert Shutdown not in job.kinds("s0")
    job.say("w1", Left(61), Bye())
    assert job.kinds("s0")[-1] is Shutdown
    job.say("s0", Bye())
    assert not job.membership.is_over(job.now)
    job.say("s1", Left(-1), Bye())
    job.lose("s1")
    assert job.membership.is_over(job.now)
    assert job.membership.failure is None


def test_launchers_hear_of_a_good_end_when_the_last_server_has_gone(job):
    job.join("l0")  # even one that comes when all has begun
    assert job.kinds("l0") == [Welcome]
    assert job.kinds("w0").count(Roster) == 1
    job.say("w0", Left(1), Bye())
    job.say("w1", Left(1), Bye())
    job.say("l0", *(Ended("worker", i, 100 + i, "ended with exit code 0", True) for i in range(2)))
    job.say("s0", Bye())
    assert Shutdown not in job.kinds("l0")
    job.say("s1", Bye())
    assert job.kinds("l0")[-1] is Shutdown
    job.say("l0", Left(-1), Bye())
    assert job.membership.failure is None


def ended(index: int, how: str = "ended with exit code 5", role: str = "worker", **changes):
    values = {"role": role, "index": index, "pid": 100 + index, "how": how, "well": False}
    return Ended(**{**values, **changes})


def test_a_launcher_tells_of_a_process_that_never_joined():
    job = Job()
    for name in ("l0", "w0"):
        job.join(name)
    job.say("l0", ended(1))
    text = "worker 1 (host-a, pid 101) ended with exit code 5 and had never joined"
    assert job.failure == JobFailed("died", text, "worker", 1)
    assert job.last("w0", JobFailed) == job.last("l0", JobFailed) == job.failure


def test_a_good_end_without_having_joined_is_a_failure_too():
    job = Job()
    job.join("l0")
    job.say("l0", ended(1, "ended with exit code 0", well=True))
    assert "worker 1 (host-a, pid 101) ended with exit code 0 and had never joined" in (
        job.failure.text
    )
    assert "does its script call jaxrdma.connect()?" in job.failure.text


def test_a_launcher_is_not_needed_to_tell_of_who_has_a_stream(job):
    job.join("l0")
    job.say("l0", ended(1), ended(0, role="server", pid=100))
    assert job.membership.failure is None  # the end of its stream tells at which step it was
    job.lose("w1")
    assert "worker 1 (host-a, pid 101) died: its connection ended" in job.failure.text


def test_a_worker_that_fails_after_it_has_left_fails_the_job(job):
    job.join("l0")
    job.say("w1", Left(3), Bye())
    job.say("l0", ended(1))
    assert job.failure.text == (
        "worker 1 (host-a, pid 101) ended with exit code 5, after it had left the job"
    )


def test_the_second_claimant_of_an_index_ends_the_job_if_a_launcher_started_it(job):
    job.join("l0", host="host-b")
    job.join("w1", "other", host="host-b", pid=7)
    job.say("l0", ended(1, pid=7))
    assert "worker 1 (host-b, pid 7) ended with exit code 5 and had never joined" in (
        job.failure.text
    )
    assert "two processes claim to be worker 1" in job.failure.text


def test_a_launcher_with_other_settings_is_refused(job):
    job.join("l0", settings={"num_workers": 2, "num_servers": 2, "ordered": True})
    assert job.last("l0", Refused).kind == "settings"
    assert job.membership.failure is None


def test_a_launcher_that_vanishes_fails_the_job(job):
    job.join("l0", host="host-b", pid=9)
    job.lose("l0")
    assert "launcher (host-b, pid 9) died" in job.failure.text
    assert job.last("w0", JobFailed) == job.failure


def test_of_a_silent_machine_a_worker_is_named_rather_than_its_launcher():
    job = Job()
    for name in ("l0", "s0", "s1", "w0", "w1"):
        job.join(name)
    job.wait(15, "s0 s1 w0")
    assert (job.failure.kind, job.failure.role, job.failure.index) == ("silent", "worker", 1)


def test_only_launchers_speak_for_others(job):
    job.say("w0", ended(1))
    assert (job.failure.kind, job.failure.index) == ("protocol", 0)


def test_a_server_that_never_ends_is_named(job):
    job.say("w0", Left(1), Bye())
    job.say("w1", Left(1), Bye())
    job.say("s1", Bye())
    job.wait(SHUTDOWN_SECONDS + 1, "s0")
    assert (job.failure.role, job.failure.index) == ("server", 0)


# --- checkpoints; who saves what when is tested in test_saver.py ---


def start_saving(job: Job, **ready) -> None:
    """A model of which both servers hold something and save it at the end."""
    job.say("w0", proposal())
    job.say("w1", proposal())
    rule = SaveRule(0, 0.0)
    for name in ("s0", "s1"):
        job.say(name, FlowReady(0, True, rule, **ready))


def leave_all(job: Job) -> None:
    for name in ("w0", "w1"):
        job.say(name, Left(3), Bye())


def test_servers_end_once_the_last_step_is_saved(job):
    start_saving(job)
    leave_all(job)
    shard = ShardFile("a", 1, 1, 1)
    assert job.last("s0", SaveAt).step == -1 and job.membership.saving
    assert job.membership.waits_for() == ["server 0", "server 1"]
    job.say("s0", ShardSaved(0, 3, shard, True))
    job.wait(2 * SHUTDOWN_SECONDS, "s0 s1")
    assert "waiting for server 1 to save the last step" in job.membership.progress_text(job.now)
    job.say("s1", ShardSaved(0, 3, shard, True))
    assert Shutdown not in job.kinds("s0") and SaveCommit not in job.kinds("s1")
    job.say("s0", SaveCommitted(0, 3, "", True))
    assert job.kinds("s1")[-2:] == [SaveEnded, Shutdown] and job.last("s1", SaveEnded).saved
    assert not job.membership.saving and job.membership.failure is None
    assert "step 3 is saved, the last" in job.membership.notes[-1]


def test_a_last_save_that_takes_for_ever_fails_the_job(job):
    start_saving(job)
    leave_all(job)
    job.wait(LAST_SAVE_SECONDS + 1, "s0 s1")
    assert "server 0 and server 1 did not save the last step within 600 s" in job.failure.text


def test_a_server_that_dies_in_the_last_save_is_named(job):
    start_saving(job)
    leave_all(job)
    job.lose("s1")
    assert (job.failure.kind, job.failure.role, job.failure.index) == ("died", "server", 1)


def test_a_checkpoint_is_read_by_all_before_the_model_begins(job):
    start_saving(job, found=[4, 9])
    assert job.last("s1", Restore).step == 9
    job.say("s0", Restored(0, 9))
    assert FlowStart not in job.kinds("w0")
    job.say("s1", Restored(0, 9, "torn"))
    assert job.last("s0", Restore).step == 4
    job.wait(4, ALL)
    text = job.last("w0", Waiting).text
    assert "waiting for server 0 and server 1 to read the checkpoint of step 4" in text
    job.say("s0", Restored(0, 4))
    job.say("s1", Restored(0, 4))
    assert job.last("w1", FlowStart).restored == job.last("s1", FlowStart).restored == 4
    assert job.membership.notes == [
        "model 0 goes on from the checkpoint of step 4; a newer one is damaged: torn"
    ]


@pytest.mark.parametrize(
    "answer", [Restored(0, 7), ShardSaved(0, 1, ShardFile("a", 1, 1, 1)), SaveCommitted(0, 5)]
)
def test_an_answer_that_nobody_asked_for_breaks_the_protocol(job, answer):
    if not isinstance(answer, ShardSaved):
        start_saving(job)
    job.say("s1", answer)
    assert (job.failure.kind, job.failure.role) == ("protocol", "server")


def test_a_server_that_ends_early_fails_the_job(job):
    job.say("s1", Bye())
    assert job.failure.kind == "left"
    assert "server 1" in job.failure.text


def test_a_death_names_the_process_its_place_and_its_step(job):
    job.say("w1", Heartbeat(17, ""))
    job.lose("w1")
    assert job.failure.text == (
        "worker 1 (host-a, pid 101) died: its connection ended without a goodbye, last at step 17"
    )
    assert [job.kinds(name)[-1] for name in ("w0", "s0", "s1")] == [JobFailed] * 3
    assert job.kinds("w1")[-1] is not JobFailed


def test_the_first_cause_stays(job):
    job.say("w0", Failed("raised", "ValueError: x"))
    first = job.failure
    job.lose("w0")
    job.lose("w1")
    job.say("s0", Failed("raised", "other"))
    assert job.failure is first
    assert "worker 0 (host-a, pid 100) raised: ValueError: x" in first.text
    assert JobFailed not in job.kinds("w0")
    assert [m for m in job.got["s1"] if isinstance(m, JobFailed)] == [first]


def test_a_lost_connection_waits_for_the_death_that_explains_it(job):
    job.say("s0", Failed("connection", "worker 1 is unreachable"))
    job.say("w0", Failed("connection", "server 1 hung up"))
    job.lose("w0")  # it ended of its own failure: no death of its own
    job.wait(ROOT_CAUSE_SECONDS / 2, "s0 s1 w1")
    assert job.membership.failure is None
    job.lose("w1")
    assert (job.failure.kind, job.failure.role, job.failure.index) == ("died", "worker", 1)


def test_a_lost_connection_that_nothing_explains_is_the_cause(job):
    job.say("s0", Failed("connection", "worker 1 is unreachable"))
    job.wait(ROOT_CAUSE_SECONDS + 0.25, ALL)
    assert (job.failure.kind, job.failure.role, job.failure.index) == ("connection", "server", 0)
    assert "worker 1 is unreachable" in job.failure.text
    assert (
        job.last("s0", JobFailed) == job.failure
    )  # it has waited for a better cause, and may end now


def test_silence_is_found_and_the_silent_one_is_told_too(job):
    job.wait(13, "w0 s0 s1")
    assert (job.failure.kind, job.failure.role, job.failure.index) == ("silent", "worker", 1)
    assert "silent for 12 s" in job.failure.text
    assert job.last("w1", JobFailed) == job.failure


def test_a_pause_of_the_coordinator_is_nobodys_silence(job):
    job.wait(1, ALL)
    job.now += 60
    job.take(job.membership.tick(job.now))
    assert job.membership.failure is None


def test_a_slow_step_is_not_silence(job):
    job.wait(120, ALL)
    assert job.membership.failure is None


def test_a_failed_job_is_over_when_all_have_gone_or_had_time_to(job):
    job.lose("w0")
    assert not job.membership.is_over(job.now)
    for name in ("w1", "s0"):
        job.lose(name)
    job.say("s1", Bye())
    assert job.membership.is_over(job.now)


def test_a_failed_job_does_not_wait_for_ever(job):
    job.lose("w0")
    job.wait(LINGER_SECONDS + 0.25, "w1")
    assert job.membership.is_over(job.now)


def test_who_comes_after_the_failure_is_told_the_cause():
    job = Job()
    job.join("w0")
    job.lose("w0")
    job.join("w1")
    refused = job.last("w1", Refused)
    assert refused.kind == "failed"
    assert "worker 0 (host-a, pid 100) died" in refused.text


# --- any history ---

MESSAGES = st.sampled_from(
    [
        Heartbeat(3, "x"),
        Admitting("127.0.0.1:1"),
        proposal(0),
        proposal(1),
        proposal(0, digest="other"),
        FlowReady(0),
        Failed("raised", "boom"),
        Failed("connection", "gone"),
        Left(3),
        Bye(),
        Ended("worker", 0, 100, "ended with exit code 1", False),
        Ended("server", 1, 101, "ended with exit code 0", True),
        hello("worker", 0),
        hello("server", 1),
    ]
)
NAMES = st.sampled_from([*ALL.split(), "l0"])
EVENTS = st.one_of(
    st.tuples(st.just("join"), NAMES),
    st.tuples(st.just("lose"), NAMES),
    st.tuples(st.just("say"), NAMES, MESSAGES),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 3.0])),
)


class Watched(Job):
    """A job that notices messages to those who are gone, and a cause that changes."""

    def __init__(self) -> None:
        super().__init__(connect_timeout=60)
        self.gone: set[str] = set()
        self.first: JobFailed | None = None

    def take(self, out) -> None:
        names = {id: name for name, id in self.ids.items()}
        for id, message in out:
            assert names[id] not in self.gone, f"{message} to {names[id]}, who is gone"
            if isinstance(message, Refused):
                self.gone.add(names[id])
        super().take(out)
        self.check()

    def check(self) -> None:
        failure = self.membership.failure
        assert self.first is None or failure is self.first
        self.first = failure
        over = self.membership.is_over(self.now)
        assert over or self.membership.waits_for(), "it waits for nobody"

    def run(self, event) -> None:
        kind, *rest = event
        if kind == "join" and rest[0] not in self.ids:
            self.join(rest[0])
        elif kind == "lose" and rest[0] in self.ids:
            self.gone.add(rest[0])
            self.lose(rest[0])
        elif kind == "say" and rest[0] in self.ids and rest[0] not in self.gone:
            if isinstance(rest[1], Bye):
                self.gone.add(rest[0])
            self.say(*rest)
        elif kind == "wait":
            self.wait(rest[0], self.alive())

    def alive(self) -> str:
        return " ".join(name for name in self.ids if name not in self.gone)

    def finish(self) -> None:
        """Everybody still here does what is expected of it; then the job must end."""
        for _ in range(100):
            if self.membership.is_over(self.now):
                return
            for name in self.alive().split():
                kinds = self.kinds(name)
                if JobFailed in kinds or FlowRejected in kinds or Shutdown in kinds:
                    self.run(("say", name, Bye()))
                elif name[0] == "w" and Roster in kinds:
                    self.run(("say", name, Left(9)))
                    self.run(("say", name, Bye()))
                elif name[0] == "s" and Roster in kinds and name not in self.admitting:
                    self.admitting.add(name)
                    self.run(("say", name, Admitting("127.0.0.1:1")))
            self.wait(1, self.alive())
        raise AssertionError(f"not over; waits for {self.membership.waits_for()}")

    admitting: set[str]


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_no_history_hangs_changes_its_cause_or_talks_to_the_dead(events):
    job = Watched()
    job.admitting = set()
    for event in events:
        if event[0] == "say" and isinstance(event[2], Admitting):
            job.admitting.add(event[1])
        job.run(event)
        job.check()
    job.finish()


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.lists(EVENTS, max_size=20))
def test_no_history_of_a_complete_job_hangs(shuffle: random.Random, events):
    job = Watched()
    job.admitting = {"s0", "s1"}
    names = ALL.split()
    shuffle.shuffle(names)
    for name in names:
        job.join(name)
    for name in ("s0", "s1"):
        job.say(name, Admitting("127.0.0.1:1"))
    for event in events:
        job.run(event)
    job.finish()


# --- the process ---


def test_the_coordinator_and_the_launcher_import_no_jax_and_no_numpy():
    code = (
        "import sys, jaxrdma.cli.coordinator, jaxrdma.cli.launch; "
        "print([m for m in ('jax', 'numpy', 'optax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_address_beyond_loopback_needs_a_secret():
    with pytest.raises(coordinator.ConfigError, match="JAXRDMA_SECRET"):
        coordinator.run_coordinator("0.0.0.0:0", 1, 1)
