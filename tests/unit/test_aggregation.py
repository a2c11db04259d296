"""What is decided about gradients: rules, and a simulation of jobs whose messages come late, twice, out of order."""

import os
import random
import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrdma.aggregation import Aggregation, Count, Decision
from jaxrdma.control import Answered, Dropped, GradientName, Mean
from jaxrdma.policy import Async, BoundedStaleness, Policy, SyncReplicas

LONG = os.environ.get("TEST_LONG") == "1"


def make(policy: Policy, workers: int, servers: int = 1) -> Aggregation:
    replicas = {worker: 100 + worker for worker in range(workers)}
    return Aggregation(policy.resolve(workers), range(servers), replicas)


def name(worker: int, sequence: int = 0) -> GradientName:
    return GradientName(worker, 100 + worker, sequence)


def test_the_first_that_are_whole_on_every_server_form_the_mean() -> None:
    job = make(SyncReplicas(2), 3, servers=2)
    assert job.landed(0, name(0), 0) == []
    assert job.landed(0, name(1), 0) == []
    assert job.landed(0, name(2), 0) == []
    assert job.landed(1, name(2), 0) == []  # the first that is whole
    decided = job.landed(1, name(0), 0)
    assert decided == [
        Mean(0, [name(0), name(2)]),
        Answered(name(2), 1, True),
        Answered(name(0), 1, True),
    ]
    assert job.landed(1, name(1), 0) == [Dropped(name(1)), Answered(name(1), 1, False)]
    assert job.step == 1
    assert job.counts() == {0: Count(1, 0), 1: Count(0, 1), 2: Count(1, 0)}


def test_what_is_told_twice_or_of_an_incarnation_that_is_over_is_nothing() -> None:
    job = make(SyncReplicas(2), 3)
    assert job.landed(0, name(0), 0) == []
    assert job.landed(0, name(0), 0) == []
    assert job.landed(0, GradientName(1, 7, 0), 0) == []
    assert job.landed(5, name(1), 0) == []
    assert job.landed(0, GradientName(9, 109, 0), 0) == []
    assert [type(d) for d in job.landed(0, name(2), 0)] == [Mean, Answered, Answered]
    assert job.landed(0, name(2), 0) == []


def test_a_worker_gives_its_share_and_waits_then() -> None:
    job = make(SyncReplicas(3), 2)
    assert job.landed(0, name(0), 0) == [Answered(name(0), 0, True)]
    assert job.landed(0, name(0, 1), 0) == []  # two of three are all that one of two may give
    assert job.landed(0, name(1), 0) == [
        Mean(0, [name(0), name(0, 1), name(1)]),
        Answered(name(0, 1), 1, True),
        Answered(name(1), 1, True),
    ]
    assert job.landed(0, name(1, 1), 1) == [Answered(name(1, 1), 1, True)]


def test_asynchronous_gradients_are_applied_one_by_one() -> None:
    job = make(Async(), 2)
    assert job.landed(0, name(1), 0) == [Mean(0, [name(1)]), Answered(name(1), 1, True)]
    assert job.landed(0, name(0), 0) == [Mean(1, [name(0)]), Answered(name(0), 2, True)]


def test_who_is_ahead_waits_at_the_bound() -> None:
    job = make(BoundedStaleness(1), 2)
    assert job.landed(0, name(0), 0) == [Answered(name(0), 0, True)]
    assert job.landed(0, name(0, 1), 0) == []
    assert job.landed(0, name(1), 0) == [
        Mean(0, [name(0), name(1)]),
        Answered(name(0, 1), 1, True),
        Answered(name(1), 1, True),
    ]


@pytest.mark.parametrize(
    ("policy", "landed", "left", "why"),
    [
        (SyncReplicas(2), [0], [1, 2], "worker 1 and worker 2 left.*step 0 is over 2.*make it 1"),
        (SyncReplicas(2), [0], [1], ""),
        (SyncReplicas(2), [], [0, 1], ""),  # nobody waits
        (SyncReplicas(5), [0], [1], "worker 1 left.*over 5.*make it 4"),
        (Async(), [0], [1, 2], ""),
        (BoundedStaleness(0), [0], [1], "worker 1 left the job after 0 gradients.*step 0"),
        (BoundedStaleness(1), [0], [1], ""),  # it may go on
    ],
)
def test_a_step_that_can_never_be_is_known_as_soon_as_somebody_waits(
    policy: Policy, landed: list[int], left: list[int], why: str
) -> None:
    job = make(policy, 3)
    for worker in landed:
        job.landed(0, name(worker), 0)
    for worker in left:
        job.left(worker)
    if why:
        assert re.search(why, job.stranded())
    else:
        assert job.stranded() == ""


class Simulation:
    """Workers that push as soon as they are answered, and servers whose news come in any order, some twice."""

    def __init__(self, policy: Policy, workers: int, servers: int, seed: int) -> None:
        self.policy = policy.resolve(workers)
        self.servers = servers
        self.job = make(policy, workers, servers)
        self.chance = random.Random(seed)
        self.news: list[tuple[int, GradientName, int]] = []
        self.version = [0] * workers
        self.pushed = [0] * workers
        self.waiting: dict[GradientName, int] = {}  # pushed, and not answered: on which version
        self.means: list[Mean] = []
        self.dropped: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        for worker in range(workers):
            self.push(worker)

    def push(self, worker: int) -> None:
        gradient = name(worker, self.pushed[worker])
        self.pushed[worker] += 1
        self.held[worker] += 1
        assert self.held[worker] <= self.policy.held, "more than the servers keep"
        self.waiting[gradient] = self.version[worker]
        for server in range(self.servers):
            told = [(server, gradient, self.version[worker])]
            self.news += told * self.chance.choice((1, 1, 2))

    def turn(self) -> None:
        """One piece of news arrives."""
        at = self.chance.randrange(len(self.news))
        self.news[at], self.news[-1] = self.news[-1], self.news[at]
        for decision in self.job.landed(*self.news.pop()):
            self.carry_out(decision)

    def run(self, means: int) -> None:
        """Until there are so many means."""
        while len(self.means) < means:
            assert self.news, "everything has arrived, and nobody goes on"
            self.turn()
        self.check()

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case Mean(step, gradients):
                assert step == len(self.means), "steps are gapless"
                self.means.append(decision)
                if isinstance(self.policy, BoundedStaleness):
                    assert max(self.pushed) - min(self.pushed) <= self.policy.k + 1
                self.held.subtract(gradient.worker for gradient in gradients)
            case Dropped(gradient):
                self.dropped[gradient.worker] += 1
                self.held[gradient.worker] -= 1
            case Answered(gradient, step, accepted):
                on = self.waiting.pop(gradient)  # once, and of nobody who did not wait
                assert step == len(self.means), "the newest version"
                assert accepted or step > on
                self.version[gradient.worker] = step
                self.check_bound(gradient.worker)
                self.push(gradient.worker)

    def check_bound(self, worker: int) -> None:
        if isinstance(self.policy, BoundedStaleness):
            k = self.policy.k
            assert self.pushed[worker] - k <= self.version[worker] <= self.pushed[worker]

    def check(self) -> None:
        """What holds whenever one looks."""
        in_means = Counter(gradient for mean in self.means for gradient in mean.gradients)
        assert all(count == 1 for count in in_means.values()), "no gradient counts twice"
        for mean in self.means:
            assert mean.gradients == sorted(mean.gradients, key=lambda g: (g.worker, g.sequence))
        if isinstance(self.policy, SyncReplicas):
            assert all(len(m.gradients) == self.policy.replicas_to_aggregate for m in self.means)
        accepted = Counter(gradient.worker for gradient in in_means)
        for worker, count in self.job.counts().items():
            assert count == Count(accepted[worker], self.dropped[worker])


POLICIES = st.one_of(
    st.builds(SyncReplicas, st.integers(1, 12)),
    st.just(Async()),
    st.builds(BoundedStaleness, st.integers(0, 4)),
)


@settings(deadline=None, max_examples=60)
@given(POLICIES, st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**32))
def test_whatever_comes_late_or_twice_the_job_goes_on_and_counts_right(
    policy: Policy, workers: int, servers: int, seed: int
) -> None:
    if isinstance(policy, SyncReplicas) and policy.replicas_to_aggregate == workers:
        policy = Async()  # needs no decisions
    simulation = Simulation(policy, workers, servers, seed)
    simulation.run(6)


LARGE = (
    lambda n: SyncReplicas(n - n // 5),
    lambda n: SyncReplicas(n + n // 3),
    lambda n: BoundedStaleness(2),
    lambda n: Async(),
)


@pytest.mark.parametrize("policy", LARGE, ids=["backups", "shares", "bounded", "async"])
def test_many_replicas(policy: Callable[[int], Policy]) -> None:
    """In the long form (TEST_LONG=1) 1000 jobs of 50 replicas and 10 of 10,000."""
    for seed in range(1000 if LONG else 4):
        Simulation(policy(50), 50, 2, seed).run(4)
    for seed in range(10 if LONG else 1):
        workers = 10_000 if LONG else 1000
        Simulation(policy(workers), workers, 2, seed).run(2)


if LONG:
    test_many_replicas = pytest.mark.timeout(3000)(test_many_replicas)
