"""Policies as values: what they become in a job of a size, and what is refused."""

import msgspec
import pytest

from jaxrdma.errors import ConfigError
from jaxrdma.policy import Async, BoundedStaleness, Policy, SyncReplicas


@pytest.mark.parametrize(
    "policy", [SyncReplicas(), SyncReplicas(3), SyncReplicas(None, 3), SyncReplicas(3, 3)]
)
def test_all_of_all_is_resolved_and_leaves_nothing_to_decide(policy: SyncReplicas) -> None:
    assert policy.resolve(3) == SyncReplicas(3, 3)
    assert policy.resolve(3).describe() == "sync_replicas(3 of 3)"
    assert policy.resolve(3).held == 0


@pytest.mark.parametrize(
    ("policy", "held"),
    [
        (SyncReplicas(2), 1),
        (SyncReplicas(4), 2),
        (SyncReplicas(6), 2),
        (SyncReplicas(7), 3),
        (Async(), 1),
        (BoundedStaleness(0), 1),
        (BoundedStaleness(3), 4),
    ],
)
def test_servers_keep_as_many_gradients_as_may_be_undecided(policy: Policy, held: int) -> None:
    assert policy.resolve(3).held == held


def test_numbers_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"total_replicas=2\) in a job of 3 workers.*start 2"):
        SyncReplicas(total_replicas=2).resolve(3)
    for quorum in (0, -1):
        with pytest.raises(ConfigError, match=f"replicas_to_aggregate={quorum}.*at least 1"):
            SyncReplicas(quorum).resolve(3)
    with pytest.raises(ConfigError, match=r"BoundedStaleness\(k=-1\).*at least 0"):
        BoundedStaleness(-1).resolve(3)


def test_descriptions_differ_where_policies_do() -> None:
    policies: list[Policy] = [SyncReplicas(*v) for v in ((), (1,), (None, 1), (1, 1))]
    policies += [Async(), BoundedStaleness(0), BoundedStaleness(1)]
    assert len({policy.describe() for policy in policies}) == 7


@pytest.mark.parametrize("policy", [SyncReplicas(2, 3), Async(), BoundedStaleness(2)])
def test_a_policy_survives_the_wire(policy: Policy) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(policy), type=Policy) == policy
