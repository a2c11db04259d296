"""Membership: the first cause wins, nobody waits for nothing, and strangers stay out."""

import itertools
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrdma import control, coordinator
from jaxrdma.control import (
    MOST_FOLLOWERS,
    AdmitFollower,
    Admitting,
    AdmitWorker,
    Alive,
    Answered,
    Bye,
    Decided,
    DismissFollower,
    Ended,
    Failed,
    FlowAgreed,
    FlowProposal,
    FlowReady,
    FlowRejected,
    FlowStart,
    FollowerAdmitted,
    Follows,
    GradientName,
    Heartbeat,
    Held,
    Hello,
    JobFailed,
    Landed,
    LeafSpec,
    Left,
    LostWorker,
    Mean,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Offer,
    Refused,
    RescueCommitted,
    RescueSaved,
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
    WorkerAdmitted,
)
from jaxrdma.coordinator import LINGER_SECONDS, ROOT_CAUSE_SECONDS, SHUTDOWN_SECONDS, Membership
from jaxrdma.errors import TransportError
from jaxrdma.policy import Async, BoundedStaleness, Policy, SyncReplicas, to_wire
from jaxrdma.savepoints import LAST_SAVE_SECONDS

LEAF = LeafSpec("params['w']", (2, 3), "float32")


def hello(role: str, index: int, **changes) -> Hello:
    values = {
        "role": role,
        "index": index,
        "incarnation": 7,
        "version": control.VERSION,
        "job": "job",
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
    """A membership, and what every member was sent.

    Members are called w0, w1, s0, s1, launchers l0, l1, followers f0, f1.
    """

    def __init__(self, workers: int = 2, servers: int = 2, **options) -> None:
        self.now = 1000.0
        self.workers, self.servers = workers, servers
        self.places = options.get("most_workers", workers)
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
        role = {"w": "worker", "s": "server", "l": "launcher", "f": "follower"}[name[0]]
        if role == "follower":
            changes.setdefault("settings", {})
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


def test_it_is_said_soon_and_ever_less_often_who_is_missing():
    job = Job(2, 1)
    job.join("w0")
    job.wait(290, "w0")
    told = [int(m.text.split()[-2]) for m in job.got["w0"] if isinstance(m, Waiting)]
    assert told[:3] == [3, 6, 9]
    assert len(told) < 25
    assert told[-1] > 230
    assert all(later - earlier <= 60 for earlier, later in itertools.pairwise(told))


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


@pytest.mark.parametrize(
    ("secret", "text"),
    [(b"t", "a wrong one came"), (b"", "none came"), (b"\xff", "a wrong one came")],
)
def test_a_stream_without_the_secret_may_not_speak_and_is_told_why(secret, text):
    membership = Job().membership
    refused = membership.knock(secret, 0.0)
    assert refused is not None
    assert (refused.kind, text in refused.text) == ("secret", True)
    assert "'s'" not in refused.text and "guess" not in refused.text
    assert membership.knock(b"s", 0.0) is None


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
    for number in (0, 1):
        job.say("w0", proposal(number, digest=f"{number}"))
        job.say("w1", proposal(number, digest=f"{number}"))
        job.say("s0", FlowReady(number))
        job.say("s1", FlowReady(number))
    for kind in (FlowAgreed, FlowStart):
        assert [m.flow for m in job.got["w0"] if isinstance(m, kind)] == [0, 1]
    assert [m.digest for m in job.got["w1"] if isinstance(m, FlowAgreed)] == ["0", "1"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((1,), "model 1, and model 0 was expected, the next after those that it has proposed"),
        ((0, 2), "model 2, and model 1 was expected, the next after those that it has proposed"),
        ((0, 1), "model 1, and was expected to wait until model 0 has started"),
    ],
)
@pytest.mark.parametrize("agreed", [False, True], ids=["alone", "agreed"])
def test_a_worker_is_ahead_by_one_model_at_most(job, numbers, text, agreed):
    *before, last = numbers
    for number in before:
        job.say("w0", proposal(number, programs=[b"p", b"q"]))
        if agreed:
            job.say("w1", proposal(number))
    job.say("w0", proposal(last, programs=[b"p", b"q"]))
    assert job.failure.kind == "protocol"
    assert job.failure.text.endswith(f"worker 0 (host-a, pid 100) proposed {text}")
    assert len(job.membership._flows) == len(before)


def test_who_came_to_a_spare_place_is_ahead_by_one_model_at_most():
    job = growing()
    come_in(job, "w2")
    take_up(job, "w2", policy=SHRINKING)
    take_up(job, "w2", number=1, policy=SHRINKING)
    take_up(job, "w2", number=2, policy=SHRINKING)
    assert "worker 2 (host-a, pid 102) proposed model 2" in job.failure.text
    assert "expected to wait until model 1 has started" in job.failure.text


def test_programs_of_others_than_worker_0_are_not_kept(job):
    job.say("w1", proposal(programs=[bytes(100), bytes(100)]))
    (kept,) = job.membership._flows[0].proposals.values()
    assert kept.programs == []
    job.say("w0", proposal(programs=[b"p0", b"p1"]))
    assert [job.last(name, FlowAgreed).program for name in ("s0", "s1")] == [b"p0", b"p1"]
    assert all(p.programs == [] for p in job.membership._flows[0].proposals.values())


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
    assert job.failure.kind == "left"  # no restart would make it join
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


# --- attempts ---


@pytest.mark.parametrize("name", ["w0", "s0"])
def test_only_processes_of_this_attempt_get_in(name):
    job = Job(attempt=2)
    job.join(name, "older", attempt=1)
    assert job.last("older", Refused).kind == "attempt"
    job.join(name, "newer", attempt=3)
    assert job.last("newer", Refused).kind == "early"
    job.join(name, "right", attempt=2)
    assert job.last("right", Welcome).attempt == 2


def test_a_launcher_that_comes_later_takes_part_in_the_attempt_that_is_on():
    job = Job(attempt=2)
    job.join("l0", attempt=0)
    assert job.last("l0", Welcome).attempt == 2


def test_a_launcher_that_saw_this_attempt_fail_waits_for_the_next(job):
    job.join("l0", attempt=1)
    assert job.last("l0", Refused).kind == "early"
    assert job.membership.failure is None
    job.lose("w0")
    job.join("l1", attempt=1)
    assert job.last("l1", Refused).kind == "early"
    job.join("l0", "late", attempt=0)
    assert job.last("late", Refused).kind == "failed"


def test_a_launcher_that_comes_too_late_is_told_which_attempt_that_was():
    job = Job(attempt=4)
    job.join("w0", attempt=4)
    job.lose("w0")
    job.join("l0", attempt=1)
    refused = job.last("l0", Refused)
    assert (refused.kind, refused.attempt) == ("failed", 4)


def test_launchers_follow_a_coordinator_that_somebody_started_anew():
    job = Job(attempt=0)
    job.join("l0", attempt=3)
    assert job.last("l0", Welcome).attempt == 0


def test_who_comes_early_is_no_news():
    job = Job(1, 1)
    job.join("w0", "early", attempt=1)
    job.join("w0")
    job.wait(4, "w0")
    assert "refused" not in job.last("w0", Waiting).text


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
    job.wait(18, "s0 s1 w0")
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
    job.wait(16, "w0 s0 s1")
    assert (job.failure.kind, job.failure.role, job.failure.index) == ("silent", "worker", 1)
    assert "silent for 15 s" in job.failure.text
    assert job.last("w1", JobFailed) == job.failure


def test_a_pause_of_the_coordinator_is_nobodys_silence(job):
    job.wait(1, ALL)
    job.now += 60
    job.take(job.membership.tick(job.now))
    assert job.membership.failure is None


def test_who_gave_up_a_coordinator_that_stood_still_is_not_all_that_is_blamed(job):
    job.wait(1, ALL)
    job.now += 60
    job.lose("w0")  # before any tick
    assert re.search(
        "worker 0 .* died.*; but the coordinator itself stood still for 60 s", job.failure.text
    )


def test_a_death_long_after_a_pause_of_the_coordinator_is_a_death(job):
    job.wait(1, ALL)
    job.now += 60
    job.wait(10, ALL)
    job.lose("w0")
    assert "stood still" not in job.failure.text


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


# --- followers ---


def follow(job: Job, name: str, number: int) -> None:
    """It comes, and both servers let it in."""
    job.join(name)
    for server in ("s0", "s1"):
        job.say(server, FollowerAdmitted(number))


def agree(job: Job) -> None:
    """Model 0 starts."""
    job.say("w0", proposal(programs=[b"a", b"b"]))
    job.say("w1", proposal())
    job.say("s0", FlowReady(0))
    job.say("s1", FlowReady(0))


def test_a_follower_that_is_early_knocks_when_every_server_expects_it():
    job = Job()
    job.join("f0")
    assert job.kinds("f0") == [Welcome]
    job.wait(100, "f0")  # the time for all to come begins with the first of the job
    assert job.membership.failure is None
    for name in ALL.split():
        job.join(name)
    job.say("s0", Admitting("127.0.0.1:1"))
    assert AdmitFollower not in job.kinds("s0")
    job.say("s1", Admitting("127.0.0.1:2"))
    told = [job.last(server, AdmitFollower) for server in ("s0", "s1")]
    assert [(each.number, each.incarnation) for each in told] == [(0, 7)] * 2
    assert len({each.token for each in told}) == 2
    job.say("s0", FollowerAdmitted(0))
    assert job.kinds("f0") == [Welcome]
    job.say("s1", FollowerAdmitted(0))
    follows = job.last("f0", Follows)
    assert [e.address for e in follows.servers] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert [e.tokens for e in follows.servers] == [{0: each.token} for each in told]
    assert follows.settings["partition_bytes"] == 64
    assert follows.transport == "tcp"
    agree(job)
    assert job.kinds("f0")[2:] == [FlowAgreed, FlowStart]
    assert job.last("f0", FlowAgreed).program is None


def test_a_follower_that_is_late_is_told_what_was_agreed(job):
    agree(job)
    follow(job, "f0", 0)
    assert job.kinds("f0") == [Welcome, Follows, FlowAgreed, FlowStart]
    agreed = job.last("f0", FlowAgreed)
    assert (agreed.leaves, agreed.digest, agreed.program) == ([LEAF], "d", None)
    assert not any(isinstance(m, AdmitFollower) for m in job.got["w0"])


@pytest.mark.parametrize("end", ["dies", "leaves", "fails", "is silent", "talks nonsense"])
def test_the_end_of_a_follower_is_told_to_the_servers_and_concerns_nobody_else(job, end):
    follow(job, "f0", 0)
    follow(job, "f1", 1)
    match end:
        case "dies":
            job.lose("f0")
        case "leaves":
            job.say("f0", Left(3), Bye())
        case "fails":
            job.say("f0", Failed("raised", "boom"))
        case "is silent":
            job.wait(16, f"{ALL} f1")
        case _:
            job.say("f0", proposal())
    assert job.membership.failure is None
    for server in ("s0", "s1"):
        assert [m.number for m in job.got[server] if isinstance(m, DismissFollower)] == [0]
    told = [m for m in job.got["f0"] if isinstance(m, JobFailed)]
    if end in ("is silent", "talks nonsense"):
        assert told[0].kind == {"is silent": "silent"}.get(end, "protocol")
        assert told[0].text.startswith("follower 0 (host-a, pid 100) was dismissed: it ")
        assert job.membership.notes == [told[0].text]
    else:
        assert told == []
    job.say("s0", FollowerAdmitted(0))  # too late, and no harm
    assert job.kinds("f1") == [Welcome, Follows]
    for name in ("w0", "w1", "s0", "s1"):
        assert JobFailed not in job.kinds(name)


def test_a_follower_that_a_server_cannot_serve_is_told_why(job):
    job.join("f0")
    job.say("s0", FollowerAdmitted(0))
    job.say("s1", FollowerAdmitted(0, "no memory"))
    told = job.last("f0", JobFailed)
    assert told.kind == "transport"
    assert "server 1 (host-a, pid 101) cannot serve it: no memory" in told.text
    assert job.last("s0", DismissFollower).number == 0
    assert job.membership.failure is None


def test_followers_hear_of_the_failure_and_do_not_keep_the_job_from_ending(job):
    follow(job, "f0", 0)
    job.lose("w0")
    assert job.last("f0", JobFailed) is job.failure
    for name in ("w1", "s0", "s1"):
        job.say(name, Bye())
    assert job.membership.is_over(job.now)


def test_followers_hear_of_the_end_and_do_not_keep_the_job_from_ending(job):
    follow(job, "f0", 0)
    for worker in ("w0", "w1"):
        assert Shutdown not in job.kinds("f0")
        job.say(worker, Left(9), Bye())
    assert job.kinds("f0")[-1] is Shutdown
    for server in ("s0", "s1"):
        job.say(server, Left(9), Bye())
    assert job.membership.is_over(job.now)
    job.join("f1")
    assert job.last("f1", Refused).kind == "ended"


def test_a_follower_too_many_is_refused_until_another_goes(job):
    for number in range(MOST_FOLLOWERS):
        follow(job, f"f{number}", number)
    job.join("f64")
    refused = job.last("f64", Refused)
    assert (refused.kind, "64 followers are here" in refused.text) == ("full", True)
    job.lose("f3")
    job.join("f65")
    assert job.kinds("f65") == [Welcome]


@pytest.mark.parametrize("end", ["dies", "leaves", "is dismissed", "fails", "is early"])
def test_of_followers_that_came_and_went_nothing_is_kept(job, end):
    if end == "is early":
        job = Job()
        job.join("s0")
    known = dict(job.membership._members)
    for number in range(3 * MOST_FOLLOWERS):
        name = f"f{number}"
        job.join(name)
        match end:
            case "leaves":
                job.say(name, Left(3), Bye())
            case "fails":
                job.say(name, Failed("raised", "boom"))
            case "is dismissed":
                job.say("s0", FollowerAdmitted(number, "no memory"))
                assert job.last(name, JobFailed).kind == "transport"
                job.say(name, Heartbeat(3, "x"))  # what it said before it heard
            case _:
                pass
        job.lose(name)
        job.lose(name)  # the driver tells of either half of a stream
        for server in ("s0", "s1") if end != "is early" else ():
            job.say(server, FollowerAdmitted(number))  # too late, and no harm
            dismissed = [m for m in job.got[server] if isinstance(m, DismissFollower)]
            assert [m.number for m in dismissed] == list(range(number + 1))
    assert job.membership._members == known
    assert job.membership.status(job.now).followers == 0
    assert job.membership.failure is None


def test_of_launchers_that_came_and_went_nothing_is_kept(job):
    known = dict(job.membership._members)
    for number, end in enumerate(("says goodbye", "dies")):
        job.join(f"l{number}", spare=True)
        assert job.kinds(f"l{number}") == [Welcome]
        if end == "says goodbye":
            job.say(f"l{number}", Bye())
        job.lose(f"l{number}")
    assert job.membership._members == known
    assert job.membership.failure is None


def test_only_a_server_admits_followers(job):
    job.say("w0", FollowerAdmitted(0))
    assert "worker 0 (host-a, pid 100) admitted a follower" in job.failure.text


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
        FollowerAdmitted(0),
        FollowerAdmitted(1, "no memory"),
        Held([]),
        RescueSaved(0, 1, []),
        RescueCommitted(0, 1),
        hello("worker", 0),
        hello("server", 1),
    ]
)
NAMES = st.sampled_from([*ALL.split(), "l0", "f0", "f1"])
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


# --- losses that the others bear ---


def shrinking(policy: Policy | None = None, workers: int = 3, servers: int = 2, **options) -> Job:
    """A job whose model 0 has started: by default, means of 2 of 3 workers."""
    job = Job(workers, servers, **options)
    for s in range(servers):
        job.join(f"s{s}")
    for w in range(workers):
        job.join(f"w{w}")
    for s in range(servers):
        job.say(f"s{s}", Admitting("127.0.0.1:1"))
    start_model(job, 0, policy or SyncReplicas(2))
    return job


def start_model(job: Job, number: int, policy: Policy) -> None:
    wire = to_wire(policy.complete(job.places))
    for w in range(job.workers):
        job.say(f"w{w}", proposal(number, policy=wire))
    for s in range(job.servers):
        job.say(f"s{s}", FlowReady(number))
    assert job.last("w0", FlowStart).flow == number


def land(job: Job, worker: int, sequence: int, step: int, life: int = 7) -> None:
    for s in range(job.servers):
        job.say(f"s{s}", Landed(0, GradientName(worker, life, sequence), step))


def made_means(job: Job) -> list[Mean]:
    told = [d for m in job.got["s0"] if isinstance(m, Decided) for d in m.decisions]
    return [d for d in told if isinstance(d, Mean)]


def check_counted_once(made: list[Mean]) -> None:
    """Every step has one mean, and no gradient is in two."""
    assert [d.step for d in made] == [*range(len(made))]
    counted = [gradient for d in made for gradient in d.gradients]
    assert len(counted) == len({*map(str, counted)}), "a gradient counted twice"


def means(job: Job) -> list[tuple[int, list[int]]]:
    return [(d.step, [g.worker for g in d.gradients]) for d in made_means(job)]


def die(job: Job) -> None:
    job.lose("w2", "killed")


def fall_silent(job: Job) -> None:
    job.wait(17, "w0 w1 s0 s1")


def lose_a_connection(job: Job) -> None:
    job.say("s1", LostWorker(2, 7, "server 1 lost its connection to worker 2"))


def raise_an_error(job: Job) -> None:
    job.say("w2", Failed("raised", "ValueError: no"))
    job.lose("w2")


@pytest.mark.parametrize(
    ("way", "says"),
    [
        (die, "died: killed"),
        (fall_silent, "has been silent for"),
        (lose_a_connection, "server 1 .* reports: server 1 lost its connection to worker 2"),
        (raise_an_error, "raised: ValueError: no"),
    ],
)
def test_the_others_go_on_without_a_lost_worker_where_its_policy_says_so(way, says):
    job = shrinking()
    job.join("l0")
    land(job, 2, 0, 0)
    way(job)
    assert job.membership.failure is None
    for name in ("s0", "s1", "w0", "l0"):
        lost = job.last(name, MemberLost)
        assert (lost.role, lost.index) == ("worker", 2)
        assert re.search(says, lost.text), lost.text
    (note,) = job.membership.notes
    assert note.endswith("; the job goes on without it")
    land(job, 0, 0, 0)
    assert means(job) == []  # what came from the lost one does not count
    land(job, 1, 0, 0)
    assert means(job) == [(0, [0, 1])]
    # Nor is anything else heard of it: that it has other news, dies at last, or how it ended.
    job.say("w2", Failed("raised", "too late"))
    job.lose("w2")
    job.say("s0", LostWorker(2, 7, "again"))
    job.say("l0", ended(2, "killed by SIGKILL", pid=102))
    land(job, 2, 1, 1)
    assert means(job) == [(0, [0, 1])]
    for name in ("w0", "w1"):
        job.say(name, Left(1), Bye())
    assert job.kinds("s0")[-1] is Shutdown
    assert job.membership.failure is None


def test_a_lost_worker_that_lives_is_told_that_it_has_no_part_in_the_job():
    job = shrinking()
    fall_silent(job)
    told = job.last("w2", JobFailed)
    assert told.kind == "lost"
    assert "worker 2 (host-a, pid 102) has been silent" in told.text
    assert "The job goes on without this worker" in told.text


def test_with_too_few_left_the_job_fails_and_says_how_many_it_needs():
    job = shrinking()
    die(job)
    job.lose("w0")
    assert job.failure.kind == "died"
    assert "worker 0 (host-a, pid 100) died" in job.failure.text
    assert re.search("1 remain, and .* needs at least 2", job.failure.text), job.failure.text
    assert job.last("s0", JobFailed) == job.last("w1", JobFailed) == job.failure


@pytest.mark.parametrize("policy", [SyncReplicas(), SyncReplicas(2, on_loss="fail")])
def test_where_the_policy_says_fail_a_loss_ends_the_job(policy):
    job = shrinking(policy)
    die(job)
    assert job.failure.text.startswith("worker 2 (host-a, pid 102) died: killed")


def test_all_of_all_shrinks_where_it_is_asked_to():
    job = shrinking(SyncReplicas(on_loss="shrink"))
    for worker in range(3):
        land(job, worker, 0, 0)
    die(job)
    land(job, 0, 1, 1)
    land(job, 1, 1, 1)
    assert means(job) == [(0, [0, 1, 2]), (1, [0, 1])]


def test_a_loss_ends_the_job_while_one_of_its_models_cannot_bear_it():
    job = shrinking(Async())
    start_model(job, 1, SyncReplicas())
    die(job)
    assert job.failure.text.startswith("worker 2 (host-a, pid 102) died")


def test_a_loss_before_training_ends_the_job():
    job = Job(3, 1)
    for name in ("s0", "w0", "w1", "w2"):
        job.join(name)
    job.say("s0", Admitting("127.0.0.1:1"))
    for w in range(2):
        job.say(f"w{w}", proposal(policy=to_wire(SyncReplicas(2).complete(3))))
    die(job)
    assert job.failure.text.startswith("worker 2 (host-a, pid 102) died")


def test_a_model_that_a_lost_worker_would_have_to_agree_on_is_refused_with_its_name():
    job = shrinking()
    die(job)
    job.say("w0", proposal(1, policy=to_wire(SyncReplicas(2).complete(3))))
    assert "worker 2 (host-a, pid 102) was lost" in job.failure.text
    assert "never called init for model 1" in job.failure.text


def test_a_server_is_needed_by_everybody():
    job = shrinking()
    job.lose("s1")
    assert job.failure.text.startswith("server 1 (host-a, pid 101) died")
    job = shrinking()
    job.say("w0", LostWorker(2, 7, "not mine to tell"))
    assert "worker 0 (host-a, pid 100) lost worker 2, which it never had" in job.failure.text


# --- another life in the place of a lost one ---


WAITING = SyncReplicas(on_loss="wait")


def come_back(job: Job, name: str = "w2", life: int = 8, pid: int = 202, **changes) -> None:
    """Another life says hello, and every server lets it in."""
    job.join(name, f"{name}-{life}", incarnation=life, pid=pid, **changes)
    for s in range(job.servers):
        asked = job.last(f"s{s}", AdmitWorker)
        assert (asked.index, asked.incarnation) == (int(name[1:]), life)
        job.say(f"s{s}", WorkerAdmitted(asked.index, life))


def take_up(job: Job, name: str = "w2-8", number: int = 0, policy: Policy = WAITING) -> None:
    job.say(name, proposal(number, policy=to_wire(policy.complete(job.places))))


def test_who_comes_back_is_let_in_by_new_tokens_once_every_server_expects_it():
    job = shrinking(WAITING)
    old = {s: job.last(f"s{s}", Roster).servers[s].tokens[2] for s in range(2)}
    die(job)
    (note,) = job.membership.notes
    assert note.endswith("died: killed, with no step reported yet; its place is kept")
    assert job.last("s0", MemberLost).waits
    assert job.membership.waits_for() == ["worker 0", "worker 1", "worker 2"]
    job.join("w2", "w2-8", incarnation=8, pid=202)
    assert job.kinds("w2-8") == [Welcome]
    for s in range(2):
        asked = job.last(f"s{s}", AdmitWorker)
        assert (asked.index, asked.incarnation) == (2, 8)
        assert asked.token != old[s]
        assert Roster not in job.kinds("w2-8")
        job.say(f"s{s}", WorkerAdmitted(2, 8))
    roster = job.last("w2-8", Roster)
    assert [entry.tokens for entry in roster.servers] == [
        {2: job.last(f"s{s}", AdmitWorker).token} for s in range(2)
    ]
    assert [entry.address for entry in roster.servers] == ["127.0.0.1:1"] * 2
    job.say("s0", WorkerAdmitted(2, 8))  # twice is once
    assert job.kinds("w2-8").count(Roster) == 1


@pytest.mark.parametrize("on_loss", ["wait", "shrink"])
def test_a_server_that_does_not_let_in_who_comes_back_is_named_and_the_wait_ends(on_loss):
    job = shrinking(SyncReplicas(on_loss=on_loss), connect_timeout=60)
    die(job)
    job.join("w2", "w2-8", incarnation=8, pid=202)
    job.say("s0", WorkerAdmitted(2, 8))  # and s1 says nothing
    job.wait(12, "w0 w1 s0 s1 w2-8")
    named = "server 1 (host-a, pid 101) to let worker 2 (host-a, pid 202) in, which came back"
    assert job.last("w2-8", Waiting).text.endswith(named)
    assert job.membership.notes[-1].endswith(named)
    assert (Waiting in map(type, job.got["w0"])) == (on_loss == "wait")
    assert "to call init" not in job.last("w2-8", Waiting).text
    # It gives up after its own time, and then nobody takes its place.
    job.lose("w2-8", "gave up")
    assert job.membership.failure is None
    job.wait(61, "w0 w1 s0 s1")
    if on_loss == "wait":
        assert job.failure.text.endswith("nobody took its place in 60 s")
    else:
        assert job.membership.failure is None


def test_the_others_wait_and_go_on_with_the_next_life():
    job = shrinking(WAITING)
    for worker in range(3):
        land(job, worker, 0, 0)
    land(job, 2, 1, 1)  # landed, and yet not in a mean: that would be one over two epochs
    die(job)
    land(job, 0, 1, 1)
    land(job, 1, 1, 1)
    come_back(job)
    assert means(job) == [(0, [0, 1, 2])]
    take_up(job)
    assert job.last("w2-8", FlowStart) == FlowStart(0, joined=1)
    land(job, 2, 2, 1)  # of the life that is over
    assert means(job) == [(0, [0, 1, 2])]
    land(job, 2, 0, 1, life=8)
    assert means(job) == [(0, [0, 1, 2]), (1, [0, 1, 2])]
    mean = [d for m in job.got["s1"] if isinstance(m, Decided) for d in m.decisions]
    lives = [[g.incarnation for g in d.gradients] for d in mean if isinstance(d, Mean)]
    assert lives == [[7, 7, 7], [7, 7, 8]]
    for name in ("w0", "w1", "w2-8"):
        job.say(name, Left(2), Bye())
    assert job.kinds("s0")[-1] is Shutdown
    assert job.membership.failure is None


def test_who_comes_back_to_a_job_that_went_on_has_a_part_from_the_next_step_on():
    policy = SyncReplicas(on_loss="shrink")
    job = shrinking(policy)
    die(job)
    land(job, 0, 0, 0)
    land(job, 1, 0, 0)
    land(job, 0, 1, 1)
    come_back(job)
    take_up(job, policy=policy)
    assert FlowStart not in job.kinds("w2-8")  # a step is under way
    land(job, 1, 1, 1)
    assert job.last("w2-8", FlowStart).joined == 2
    land(job, 0, 2, 2)
    land(job, 1, 2, 2)
    assert means(job) == [(0, [0, 1]), (1, [0, 1])]
    land(job, 2, 0, 2, life=8)
    assert means(job)[2:] == [(2, [0, 1, 2])]


def test_models_are_taken_up_one_after_the_other_and_new_ones_begun_together():
    job = shrinking(WAITING)
    start_model(job, 1, Async(on_loss="wait"))
    die(job)
    come_back(job)
    third = proposal(2, policy=to_wire(SyncReplicas(2).complete(3)))
    job.say("w0", third)
    for number, policy in enumerate((WAITING, Async(on_loss="wait"))):
        take_up(job, number=number, policy=policy)
        assert job.last("w2-8", FlowStart) == FlowStart(number, joined=0)
    job.say("w1", third)
    job.say("w2-8", third)
    for s in range(2):
        job.say(f"s{s}", FlowReady(2))
    assert job.last("w2-8", FlowStart) == job.last("w0", FlowStart) == FlowStart(2)


@pytest.mark.parametrize("policy", [WAITING, SyncReplicas(2), BoundedStaleness(1, on_loss="wait")])
def test_another_model_is_refused_with_the_difference_and_concerns_nobody_else(policy):
    job = shrinking(policy)
    die(job)
    come_back(job)
    before = {name: job.kinds(name) for name in ("w0", "w1")}
    wire = to_wire(policy.complete(3))
    other = [LeafSpec("params['w']", (2, 4), "float32")]
    job.say("w2-8", proposal(policy=wire, leaves=other))
    told = job.last("w2-8", FlowRejected).text
    assert re.search("not that of the job: the shape of a leaf differs: worker 2 .*, the job", told)
    assert JobFailed not in job.kinds("w2-8")
    assert job.membership.failure is None
    for name in ("w0", "w1"):
        assert job.kinds(name) == [*before[name], MemberLost]
    assert job.last("s0", MemberLost).kind == "mismatch"
    job.lose("w2-8")
    come_back(job, life=9, pid=302)
    take_up(job, "w2-9", policy=policy)
    assert job.last("w2-9", FlowStart).joined == 0


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        (
            {"incarnation": 7},
            "duplicate",
            "gives the incarnation of a process that was here before",
        ),
        ({"offer": Offer("verbs", verbs=True, why="")}, "settings", "the job has tcp"),
        ({"attempt": 1}, "early", "attempt 2"),
    ],
)
def test_who_cannot_take_the_place_is_refused_and_it_stays_free(changes, kind, text):
    job = shrinking(WAITING)
    die(job)
    job.join("w2", "stranger", **{"incarnation": 8, "pid": 202, **changes})
    refused = job.last("stranger", Refused)
    assert (refused.kind, job.kinds("stranger")) == (kind, [Refused])
    assert text in refused.text
    come_back(job)
    take_up(job)
    assert job.last("w2-8", FlowStart).joined == 0


def test_a_place_is_not_taken_from_who_lives_or_left_in_good_order():
    job = shrinking(WAITING)
    job.join("w2", "twin", incarnation=8, pid=202)
    assert "two processes claim to be worker 2" in job.last("twin", Refused).text
    job.say("w1", Left(3), Bye())
    job.join("w1", "again", incarnation=8, pid=201)
    assert "was here and has ended" in job.last("again", Refused).text


def test_nobody_comes_back_to_a_job_that_is_over():
    job = shrinking(SyncReplicas(2))
    die(job)
    for name in ("w0", "w1"):
        job.say(name, Left(1), Bye())
    job.join("w2", "late", incarnation=8, pid=202)
    assert job.last("late", Refused).kind == "ended"


def test_a_life_that_is_lost_before_it_has_a_part_leaves_the_place_free():
    job = shrinking(WAITING)
    die(job)
    job.join("w2", "w2-8", incarnation=8, pid=202)
    job.say("s0", WorkerAdmitted(2, 8))
    job.lose("w2-8")
    job.say("s1", WorkerAdmitted(2, 8))
    come_back(job, life=9, pid=302)
    job.lose("w2-9")
    come_back(job, life=10, pid=402)
    take_up(job, "w2-10")
    for worker, life in ((0, 7), (1, 7), (2, 10)):
        land(job, worker, 0, 0, life)
    assert means(job) == [(0, [0, 1, 2])]
    # What servers and launchers tell of lives that are over is no news.
    job.join("l0")
    job.say("s0", LostWorker(2, 7, "its connection ended"))
    for pid in (102, 202, 302):
        job.say("l0", ended(2, "killed by SIGKILL", pid=pid))
    assert job.membership.failure is None
    assert JobFailed not in job.kinds("w2-10")
    job.say("s0", LostWorker(2, 10, "its connection ended"))
    assert job.last("w2-10", JobFailed).kind == "lost"


def test_a_server_that_cannot_let_it_in_is_named_to_who_came():
    job = shrinking(WAITING)
    die(job)
    job.join("w2", "w2-8", incarnation=8, pid=202)
    job.say("s0", WorkerAdmitted(2, 8, "there is no memory for it"))
    told = job.last("w2-8", JobFailed)
    assert (told.kind, told.role, told.index) == ("transport", "worker", 2)
    assert "server 0 (host-a, pid 100) cannot let it in: there is no memory for it" in told.text
    assert job.membership.failure is None


def test_who_waits_for_whom_is_said_with_the_way_to_bring_it_back():
    job = shrinking(WAITING)
    job.membership.address = "10.0.0.1:7000"
    die(job)
    job.wait(11, "w0 w1 s0 s1")
    for told in (job.membership.notes[-1], job.last("w0", Waiting).text):
        assert re.search(
            r"training stands still, and waits for worker 2, which was lost 10 s ago: worker 2 \(host-a, pid 102\) "
            r"died: killed.* JAXRDMA_COORDINATOR=10.0.0.1:7000 JAXRDMA_INDEX=2 JAXRDMA_NUM_WORKERS=3 ",
            told,
        ), told
    come_back(job)
    job.say("w2-8", Heartbeat(-1, "joining"))
    job.wait(11, "w0 w1 w2-8 s0 s1")
    assert "worker 2 (host-a, pid 202, no news), which came back, to call init for model 0" in (
        job.last("w0", Waiting).text
    )
    take_up(job)
    said = len(job.got["w0"])
    job.wait(30, "w0 w1 w2-8 s0 s1")
    assert not any(isinstance(message, Waiting) for message in job.got["w0"][said:])


def test_a_place_is_kept_for_so_long_while_nothing_can_be_done_without_it():
    job = shrinking(WAITING, connect_timeout=60)
    die(job)
    job.wait(59, "w0 w1 s0 s1")
    assert job.membership.failure is None
    job.wait(2, "w0 w1 s0 s1")
    assert (job.failure.kind, job.failure.index) == ("died", 2)
    assert re.search("worker 2 .*died: killed.*; nobody took its place in 60 s", job.failure.text)


def test_a_place_is_kept_for_as_long_as_the_others_can_do_without_it():
    job = shrinking(Async(on_loss="wait"), connect_timeout=60)
    die(job)
    job.wait(100, "w0 w1 s0 s1")
    land(job, 0, 0, 0)
    assert means(job) == [(0, [0])]
    assert not any(isinstance(message, Waiting) for message in job.got["w0"])
    for name in ("w0", "w1"):
        job.say(name, Left(1), Bye())
    assert Shutdown not in job.kinds("s0")  # its data have not run out
    come_back(job)
    take_up(job, policy=Async(on_loss="wait"))
    land(job, 2, 0, 1, life=8)
    assert means(job) == [(0, [0]), (1, [2])]
    job.say("w2-8", Left(2), Bye())
    assert job.kinds("s0")[-1] is Shutdown


def test_who_comes_back_and_leaves_at_once_gives_up_the_place():
    job = shrinking(WAITING)
    die(job)
    come_back(job)
    land(job, 0, 0, 0)
    land(job, 1, 0, 0)
    assert means(job) == []
    job.say("w2-8", Left(0), Bye())
    assert means(job) == [(0, [0, 1])]


def test_a_job_that_has_failed_bears_no_losses():
    job = shrinking(WAITING)
    job.lose("s1")
    said = list(job.membership.notes)
    die(job)
    assert MemberLost not in job.kinds("s0")
    assert job.membership.notes == said
    assert job.failure.role == "server"


def test_all_may_be_lost_and_come_back():
    job = shrinking(WAITING)
    for worker in range(3):
        job.lose(f"w{worker}")
    assert job.membership.failure is None
    for worker in range(3):
        come_back(job, f"w{worker}", pid=200 + worker)
        take_up(job, f"w{worker}-8")
    for worker in range(3):
        land(job, worker, 0, 0, life=8)
    assert means(job) == [(0, [0, 1, 2])]


class Lives:
    """Workers of a job that waits, which train, are lost at any moment, and come back."""

    def __init__(self, job: Job, policy: Policy) -> None:
        self.job, self.policy = job, policy
        self.life = dict.fromkeys(range(3), 7)
        self.stage = dict.fromkeys(range(3), "trains")
        self.sequence = dict.fromkeys(range(3), 0)

    def name(self, w: int) -> str:
        return f"w{w}" if self.life[w] == 7 else f"w{w}-{self.life[w]}"

    def act(self, w: int, *, dies: bool = False) -> None:
        """The next thing that a worker does, or its end; then what it has been told since."""
        if dies and self.stage[w] != "lost":
            self.job.lose(self.name(w))
            self.stage[w] = "lost"
            return
        match self.stage[w]:
            case "lost":
                self.life[w] += 1
                life = self.life[w]
                self.job.join(f"w{w}", self.name(w), incarnation=life, pid=100 * life + w)
                self.stage[w] = "knocks"
            case "knocks":
                for s in range(2):
                    self.job.say(f"s{s}", WorkerAdmitted(w, self.life[w]))
                assert Roster in self.job.kinds(self.name(w))
                self.stage[w] = "is in"
            case "is in":
                take_up(self.job, self.name(w), policy=self.policy)
                self.stage[w], self.sequence[w] = "trains", 0
            case _:
                self.push(w)

    def push(self, w: int) -> None:
        told = [m.joined for m in self.job.got[self.name(w)] if isinstance(m, FlowStart)]
        mine = GradientName(w, self.life[w], self.sequence[w] - 1)
        told += [
            d.step
            for m in self.job.got["s0"]
            if isinstance(m, Decided)
            for d in m.decisions
            if isinstance(d, Answered) and d.gradient == mine
        ]
        if (self.sequence[w] > 0 and len(told) < 2) or not told:
            return  # not answered yet
        land(self.job, w, self.sequence[w], told[-1] or 0, self.life[w])
        self.sequence[w] += 1


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    "policy",
    [
        WAITING,
        SyncReplicas(2, on_loss="wait"),
        BoundedStaleness(1, on_loss="wait"),
        Async(on_loss="wait"),
    ],
    ids=lambda policy: policy.describe(),
)
def test_no_history_of_losses_stops_a_job_that_waits(policy, seed):
    job, chance = shrinking(policy), random.Random(seed)
    lives = Lives(job, policy)
    for _ in range(60):
        lives.act(chance.randrange(3), dies=chance.random() < 0.15)
    before = len(means(job))
    for _ in range(12):
        for w in range(3):
            lives.act(w)
    assert job.membership.failure is None
    made = made_means(job)
    assert len(made) >= before + 3
    check_counted_once(made)
    quorum = policy.complete(3).quorum(3)
    newest = dict.fromkeys(range(3), 0)
    for d in made:
        assert len({gradient.worker for gradient in d.gradients}) == quorum
        for gradient in d.gradients:
            # Never again a life that another one has followed.
            assert gradient.incarnation >= newest[gradient.worker]
            newest[gradient.worker] = gradient.incarnation


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


# --- spare places ---

SHRINKING = SyncReplicas(on_loss="shrink")


def growing(policy: Policy = SHRINKING, most: int = 4, **options) -> Job:
    """A job of 2 workers, whose model 0 has started, with places for more."""
    job = Job(2, 2, most_workers=most, **options)
    for name in ("s0", "w1", "w0", "s1"):
        job.join(name)
    for name in ("s0", "s1"):
        job.say(name, Admitting("127.0.0.1:1"))
    start_model(job, 0, policy)
    return job


def test_a_job_begins_without_those_who_may_come_and_does_not_name_them():
    job = Job(2, 1, most_workers=4)
    job.join("s0")
    job.join("w0")
    assert job.membership.waits_for() == ["worker 1"]
    job.wait(4, "s0 w0")
    text = job.last("w0", Waiting).text
    assert text.startswith("have 1 of 2 workers and 1 of 1 server, waiting for worker 1, ")
    job.join("w1")
    job.say("s0", Admitting("127.0.0.1:1"))
    roster = job.last("w0", Roster)
    assert [worker.index for worker in roster.workers] == [0, 1]
    assert job.membership.status(job.now).spare == [2, 3]


def test_who_takes_a_spare_place_is_in_every_mean_from_the_next_step_on():
    job = growing()
    land(job, 0, 0, 0)
    come_in(job, "w2")
    assert job.last("w0", MemberJoined) == MemberJoined("worker", 2)
    assert [worker.index for worker in job.last("w2", Roster).workers] == [0, 1, 2]
    take_up(job, "w2", policy=SHRINKING)
    assert FlowStart not in job.kinds("w2")  # a step is under way
    land(job, 1, 0, 0)
    assert job.last("w2", FlowStart) == FlowStart(0, joined=1)
    land(job, 0, 1, 1)
    land(job, 1, 1, 1)
    assert means(job) == [(0, [0, 1])]
    land(job, 2, 0, 1)
    assert means(job) == [(0, [0, 1]), (1, [0, 1, 2])]
    assert job.membership.status(job.now).spare == [3]
    come_in(job, "w3")
    take_up(job, "w3", policy=SHRINKING)
    for worker in range(3):
        land(job, worker, 2 - worker // 2, 2)
    assert means(job)[2:] == []  # worker 3 is in at once: nothing had landed
    land(job, 3, 0, 2)
    assert means(job)[2:] == [(2, [0, 1, 2, 3])]
    for name in ("w3", "w0", "w1"):
        job.say(name, Left(3), Bye())
    assert Shutdown not in job.kinds("s0")
    job.say("w2", Left(3), Bye())
    assert job.kinds("s0")[-1] is Shutdown
    assert job.membership.failure is None


def come_in(job: Job, name: str, **changes) -> None:
    """Somebody says hello for a spare place, and every server lets it in."""
    job.join(name, **changes)
    for s in range(job.servers):
        asked = job.last(f"s{s}", AdmitWorker)
        assert asked.index == int(name[1:])
        job.say(f"s{s}", WorkerAdmitted(asked.index, asked.incarnation))


def test_the_end_of_a_job_waits_for_nobody_in_spare_places():
    job = growing()
    for name in ("w0", "w1"):
        job.say(name, Left(1), Bye())
    assert job.kinds("s0")[-1] is Shutdown
    job.join("w2")
    assert job.last("w2", Refused).kind == "ended"


def test_who_comes_early_to_a_spare_place_is_let_in_when_the_job_has_begun():
    job = Job(2, 2, most_workers=3)
    for name in ("w2", "s0", "w0", "s1"):
        job.join(name)
    assert job.membership.waits_for() == ["worker 1"]
    job.lose("w2")
    assert job.membership.failure is None
    job.join("w2", "w2-8", incarnation=8)
    job.join("w1")
    for s in range(2):
        assert set(job.last(f"s{s}", Roster).servers[s].tokens) == {0, 1}
        job.say(f"s{s}", Admitting("127.0.0.1:1"))
    assert [worker.index for worker in job.last("w1", Roster).workers] == [0, 1]
    assert Roster not in job.kinds("w2-8")
    for s in range(2):
        asked = job.last(f"s{s}", AdmitWorker)
        assert (asked.index, asked.incarnation) == (2, 8)
        job.say(f"s{s}", WorkerAdmitted(2, 8))
    # Nor does a model wait for it, and it waits until the model has begun.
    take_up(job, "w2-8", policy=SHRINKING)
    job.wait(1, "w0 w1 w2-8 s0 s1")
    text = "model 0 has not begun: waiting for worker 0 and worker 1 to call init for it"
    assert job.last("w2-8", Waiting).text == text
    start_model(job, 0, SHRINKING)
    assert [m for m in job.got["w2-8"] if isinstance(m, FlowStart)] == [FlowStart(0, joined=0)]
    assert FlowAgreed not in job.kinds("w2-8")


def test_the_loss_of_who_came_is_borne_and_its_place_spare_again():
    job = growing()
    come_in(job, "w2")
    job.lose("w2", "killed")  # before it has called init
    assert job.last("s0", MemberLost).index == 2
    assert job.membership.status(job.now).spare == [2, 3]
    land(job, 0, 0, 0)
    land(job, 1, 0, 0)
    assert means(job) == [(0, [0, 1])]
    come_back(job)
    take_up(job, policy=SHRINKING)
    land(job, 2, 0, 1, life=8)
    job.lose("w2-8", "killed")
    land(job, 0, 1, 1)
    land(job, 1, 1, 1)
    assert means(job) == [(0, [0, 1]), (1, [0, 1])]
    assert job.membership.failure is None


def test_who_came_may_be_lost_while_a_model_waits_for_others():
    job = growing()
    come_in(job, "w2")
    job.say("w0", proposal(1, policy=to_wire(SHRINKING.complete(4))))
    job.lose("w2", "killed")
    assert job.membership.failure is None
    job.lose("w1", "killed")
    assert "worker 1" in job.failure.text


@pytest.mark.parametrize("tells", ["s0", "w2"])
def test_a_broken_connection_of_who_came_is_nobody_elses_affair(tells):
    job = Job(2, 2, most_workers=3)
    for name in ("s0", "s1", "w0", "w1"):
        job.join(name)
    for name in ("s0", "s1"):
        job.say(name, Admitting("127.0.0.1:1"))
    come_in(job, "w2")
    text = "server 0 cannot be reached"
    job.say(tells, LostWorker(2, 7, text) if tells == "s0" else Failed("connection", text))
    job.wait(3, "s0 s1 w0 w1")
    assert job.membership.failure is None
    assert text in job.last("s1", MemberLost).text
    start_model(job, 0, SHRINKING)


def test_a_place_is_kept_only_for_who_has_had_a_part():
    job = growing(WAITING)
    come_in(job, "w2")
    job.lose("w2", "killed")
    assert not job.last("s0", MemberLost).waits
    come_back(job)
    take_up(job)
    land(job, 2, 0, 0, life=8)
    job.lose("w2-8", "killed")
    assert job.last("s0", MemberLost).waits
    land(job, 0, 0, 0)
    land(job, 1, 0, 0)
    assert means(job) == []
    job.membership.address = "10.0.0.1:7000"
    job.wait(11, "w0 w1 s0 s1")
    assert "JAXRDMA_INDEX=2 JAXRDMA_NUM_WORKERS=2 JAXRDMA_MOST_WORKERS=4 " in (
        job.last("w0", Waiting).text
    )
    come_back(job, life=9, pid=302)
    job.lose("w2-9", "killed")  # the life before it had a part
    assert job.last("s0", MemberLost).waits
    come_back(job, life=10, pid=402)
    take_up(job, "w2-10")
    land(job, 2, 0, 0, life=10)
    assert means(job) == [(0, [0, 1, 2])]


def test_who_left_a_job_that_grows_may_be_followed_by_another():
    job = growing()
    job.say("w1", Left(0), Bye())
    land(job, 0, 0, 0)
    come_back(job, "w1", pid=201)
    take_up(job, "w1-8", policy=SHRINKING)
    land(job, 0, 1, 1)
    land(job, 1, 0, 1, life=8)
    assert means(job) == [(0, [0]), (1, [0, 1])]


@pytest.mark.parametrize(
    ("name", "changes", "kind", "text"),
    [
        ("w4", {}, "index", "there are 4 workers at most, so the index must be 0 to 3"),
        ("w2", {"offer": Offer("verbs", verbs=True, why="")}, "settings", "the job has tcp"),
        ("w2", {"job": "other"}, "job", "belongs to job 'other'"),
        (
            "w2",
            {"settings": {"num_workers": 2, "num_servers": 2, "most_workers": 3}},
            "settings",
            "expects 3 workers at most, the coordinator 4. Set JAXRDMA_MOST_WORKERS alike",
        ),
    ],
)
def test_who_cannot_take_a_spare_place_is_refused_with_the_reason(name, changes, kind, text):
    job = growing()
    job.join(name, **changes)
    refused = job.last(name, Refused)
    assert refused.kind == kind
    assert text in refused.text


def test_two_processes_for_one_spare_place_are_both_named():
    job = growing()
    come_in(job, "w2")
    job.join("w2", "twin", incarnation=8, pid=202)
    assert job.last("twin", Refused).text == (
        "two processes claim to be worker 2: host-a, pid 102, which came first, and now host-a, pid 202. "
        "Give each its own JAXRDMA_INDEX."
    )
    for name, spare in (("l0", True), ("l1", False)):
        job.join(name, spare=spare)
        job.say(name, ended(2, "ended with exit code 1", pid=202))
        assert (MemberLost in job.kinds(name)) == (not spare)
    assert job.membership.failure is None


@pytest.mark.parametrize(
    "policy",
    [SyncReplicas(), BoundedStaleness(1), Async(on_loss="fail")],
    ids=lambda policy: policy.describe(),
)
def test_a_policy_by_which_nobody_can_be_added_is_refused(policy):
    job = Job(2, 1, most_workers=3)
    for name in ("s0", "w0", "w1"):
        job.join(name)
    job.say("s0", Admitting("127.0.0.1:1"))
    job.say("w0", proposal(policy=to_wire(policy.complete(3))))
    assert "no worker can be added" in job.failure.text


def test_a_launcher_of_spare_places_alone_is_missed_by_nobody():
    job = growing()
    job.join("l0")
    job.join("l1", spare=True)
    job.lose("l1")
    job.join("l1", "again", spare=True)
    job.say("again", Failed("interrupted", "SIGINT"))
    assert job.membership.failure is None
    job.lose("l0")
    assert "launcher" in job.failure.text


def test_a_second_model_begins_without_who_came_and_lets_it_in():
    job = growing()
    come_in(job, "w2")
    take_up(job, "w2", policy=SHRINKING)
    take_up(job, "w2", number=1, policy=SHRINKING)
    assert [m.flow for m in job.got["w2"] if isinstance(m, FlowStart)] == [0]
    start_model(job, 1, SHRINKING)
    assert job.last("w2", FlowStart) == FlowStart(1, joined=0)
    assert job.membership.failure is None


def test_another_model_of_who_came_early_concerns_nobody_else():
    job = growing()
    come_in(job, "w2")
    take_up(job, "w2", policy=SHRINKING)
    wire = to_wire(SHRINKING.complete(4))
    job.say("w2", proposal(1, policy=wire, digest="other"))
    start_model(job, 1, SHRINKING)
    assert "the plan differs" in job.last("w2", FlowRejected).text
    assert job.membership.failure is None
    assert job.membership.status(job.now).spare == [2, 3]


class Growth(Lives):
    """As `Lives`, in a job that begins with one worker and has places for two more."""

    def __init__(self, job: Job, policy: Policy) -> None:
        super().__init__(job, policy)
        for w in (1, 2):
            self.life[w], self.stage[w] = 6, "lost"


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    "policy",
    [
        WAITING,
        SyncReplicas(2, on_loss="wait"),
        SyncReplicas(4, on_loss="wait"),
        BoundedStaleness(1, on_loss="wait"),
        Async(on_loss="wait"),
    ],
    ids=lambda policy: policy.describe(),
)
def test_no_history_of_those_who_come_and_are_lost_stops_a_job_that_grows(policy, seed):
    job, chance = Job(1, 2, most_workers=3), random.Random(seed)
    for name in ("s0", "s1", "w0"):
        job.join(name)
    for name in ("s0", "s1"):
        job.say(name, Admitting("127.0.0.1:1"))
    start_model(job, 0, policy)
    lives = Growth(job, policy)
    for _ in range(60):
        lives.act(chance.randrange(3), dies=chance.random() < 0.15)
    before = len(made_means(job))
    for _ in range(12):
        for w in range(3):
            lives.act(w)
    assert job.membership.failure is None
    made = made_means(job)
    assert len(made) >= before + 3
    check_counted_once(made)
    assert {gradient.worker for gradient in made[-1].gradients} == {0, 1, 2} or policy != WAITING
    newest: dict[int, int] = {}
    for d in made:
        for gradient in d.gradients:
            assert gradient.incarnation >= newest.get(gradient.worker, 0)
            newest[gradient.worker] = gradient.incarnation
