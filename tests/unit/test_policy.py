"""Policies as values: what is filled in, what is refused, what each answers."""

import msgspec
import pytest

from jaxrdma.errors import ConfigError
from jaxrdma.policy import Async, BoundedStaleness, SyncReplicas, Wire, from_wire, to_wire


@pytest.mark.parametrize(
    "policy", [SyncReplicas(), SyncReplicas(3), SyncReplicas(None, 3), SyncReplicas(3, 3)]
)
def test_all_of_all_is_resolved(policy):
    assert policy.complete(3) == SyncReplicas(3, 3, on_loss="fail")
    assert policy.complete(3).describe() == "sync_replicas(3 of 3, on_loss=fail)"


@pytest.mark.parametrize(
    ("policy", "held"),
    [
        (SyncReplicas(), 0),
        (SyncReplicas(on_loss="shrink"), 1),
        (SyncReplicas(on_loss="wait"), 1),
        (SyncReplicas(2), 1),
        (SyncReplicas(6), 2),
        (SyncReplicas(7), 3),
        (Async(), 1),
        (BoundedStaleness(0), 1),
        (BoundedStaleness(3), 4),
    ],
)
def test_servers_keep_as_many_gradients_as_may_be_undecided(policy, held):
    assert policy.complete(3).held == held


@pytest.mark.parametrize("policy", [SyncReplicas(2, 3), Async(), BoundedStaleness(2)])
def test_a_policy_survives_the_wire(policy):
    sent = msgspec.msgpack.encode(to_wire(policy))
    assert from_wire(msgspec.msgpack.decode(sent, type=Wire)) == policy


@pytest.mark.parametrize("wire", [{}, {"policy": "Mine"}, {"policy": "Async", "k": 3}])
def test_what_is_no_policy_is_refused(wire):
    with pytest.raises(ConfigError, match="there is no policy"):
        from_wire(wire)


@pytest.mark.parametrize(
    ("policy", "on_loss"),
    [
        (SyncReplicas(), "fail"),
        (SyncReplicas(3), "fail"),
        (SyncReplicas(5), "fail"),
        (SyncReplicas(2), "shrink"),
        (SyncReplicas(2, on_loss="fail"), "fail"),
        (SyncReplicas(on_loss="wait"), "wait"),
        (Async(), "shrink"),
        (BoundedStaleness(1), "fail"),
        (BoundedStaleness(1, on_loss="shrink"), "shrink"),
    ],
)
def test_a_loss_ends_the_job_only_where_the_replica_is_needed(policy, on_loss):
    assert policy.complete(3).on_loss == on_loss


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (SyncReplicas(0), "replicas_to_aggregate=0.*at least 1"),
        (SyncReplicas(2, 4), "total_replicas=4.*3 workers"),
        (BoundedStaleness(-1), "k=-1.*at least 0"),
        (Async(on_loss="retry"), "on_loss='retry'.*'fail', 'shrink', 'wait'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(policy, text):
    with pytest.raises(ConfigError, match=text):
        policy.complete(3)


def test_descriptions_differ_where_policies_do():
    policies = [SyncReplicas(*v) for v in [(), (1,), (None, 1), (1, 1)]]
    policies += [SyncReplicas(on_loss="fail"), SyncReplicas(on_loss="wait")]
    policies += [Async(), Async(on_loss="wait"), BoundedStaleness(0), BoundedStaleness(1)]
    assert len({policy.describe() for policy in policies}) == len(policies) == len(set(policies))
    assert Async().describe() == "async()"
    assert Async().complete(2).describe() == "async(on_loss=shrink)"
    assert BoundedStaleness(2).complete(2).describe() == "bounded_staleness(k=2, on_loss=fail)"


@pytest.mark.parametrize(
    ("policy", "quorums", "leasts"),
    [
        (SyncReplicas(), {1: 1, 2: 2, 4: 4, 5: 5}, {1: 1, 4: 1}),
        (SyncReplicas(2), {1: 1, 2: 2, 4: 2, 5: 2}, {1: 1, 2: 2, 4: 2}),
        (SyncReplicas(6), {1: 6, 4: 6, 6: 6, 9: 6}, {1: 1, 4: 1}),
        (Async(), {1: 1, 4: 1}, {4: 1}),
        (BoundedStaleness(3), {1: 1, 4: 4}, {4: 1}),
    ],
)
def test_the_quorum_follows_the_membership_as_documented(policy, quorums, leasts):
    policy = policy.complete(4)
    assert {members: policy.quorum(members) for members in quorums} == quorums
    assert {staying: policy.least(staying) for staying in leasts} == leasts


def test_only_sync_replicas_drops_what_is_old():
    assert SyncReplicas().step_of(7, 7, 7) == 7
    assert SyncReplicas().step_of(7, 6, 7) is None
    assert Async().step_of(3, 2, 7) == 7
    assert BoundedStaleness(2).step_of(8, 6, 7) == 8
