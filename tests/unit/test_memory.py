"""What is locked over verbs is reckoned as the engines have it, and refused in time, with the cure."""

import pytest

from jaxrdma import memory
from jaxrdma.control import LeafSpec
from jaxrdma.errors import TransportError
from jaxrdma.memory import Locked, LockLimit
from jaxrdma.plan import assign_partitions

LEAVES = [LeafSpec("w", (1000, 64), "float32"), LeafSpec("b", (1000,), "bfloat16")]
PLAN = assign_partitions(LEAVES, 1, 1 << 16)


def pages(number: int) -> int:
    return (number + 4095) // 4096 * 4096


def test_a_server_locks_sums_and_what_it_sends_if_that_is_another_thing():
    sums = pages(1000 * 64 * 4 + (1000 * 4 + 63) // 64 * 64)
    parameters = pages(1000 * 64 * 4 + (1000 * 2 + 63) // 64 * 64)
    assert memory.shard_bytes(PLAN, 0, "update", 2) == sums + parameters
    assert memory.shard_bytes(PLAN, 0, "update", 2, held=True) == sums + 4 * parameters
    assert memory.shard_bytes(PLAN, 0, "average", 2) == sums + pages(1000 * 2)
    assert memory.shard_bytes(PLAN, 0, "average", 1) == 0


def test_a_follower_costs_a_server_one_more_copy_of_what_it_sends():
    parameters = pages(1000 * 64 * 4 + (1000 * 2 + 63) // 64 * 64)
    assert memory.version_bytes(PLAN, 0) == parameters
    held = memory.shard_bytes(PLAN, 0, "update", 2, held=True)
    assert held - memory.shard_bytes(PLAN, 0, "update", 2) == 3 * memory.version_bytes(PLAN, 0)


def test_the_shards_of_several_servers_are_the_model_once():
    plan = assign_partitions(LEAVES[:1], 3, 1 << 16)
    shards = sum(memory.shard_bytes(plan, server, "average", 2) for server in range(3))
    assert 256_000 <= shards <= 256_000 + 3 * 4096


def test_a_worker_locks_each_leaf_once():
    assert memory.copy_bytes(PLAN) == pages(256_000) + pages(2000)


def test_what_is_too_much_is_refused_with_need_limit_and_cure():
    said = []
    locked = Locked("worker 3", said.append, LockLimit(1 << 20, 2 << 20, exempt=False))
    locked.add("slots", 1 << 19)
    assert said == [
        "worker 3 locks 512 KiB for slots; limit of this process 1 MiB (hard limit 2 MiB), "
        "no CAP_IPC_LOCK"
    ]
    with pytest.raises(
        TransportError,
        match=r"worker 3 .*for a model: it needs 768 KiB, 1.25 MiB in all; limit of this process 1 MiB "
        r".*ulimit -l unlimited",
    ):
        locked.add("a model", 3 << 18)
    locked.add("the rest", 1 << 19)
    assert "512 KiB for the rest, 1 MiB in all" in said[-1]


def test_each_of_several_devices_locks_all_of_it():
    said = []
    locked = Locked("worker 3", said.append, LockLimit(1 << 20, 2 << 20, exempt=False), devices=2)
    locked.add("slots", 1 << 18)
    assert locked.bytes == 1 << 19
    assert said[0].startswith(
        "worker 3 locks 512 KiB (256 KiB by each of 2 devices) for slots; limit"
    )
    with pytest.raises(
        TransportError,
        match=r"it needs 768 KiB \(384 KiB by each of 2 devices\), 1.25 MiB in all; .*ulimit -l unlimited.*; or "
        "name fewer devices by JAXRDMA_DEVICE",
    ):
        locked.add("a model", 3 << 17)


@pytest.mark.parametrize("limit", [LockLimit(None, None, False), LockLimit(0, 0, True)])
def test_no_limit_and_one_that_does_not_count_refuse_nothing(limit):
    locked = Locked("server 0", lambda text: None, limit)
    locked.add("all there is", 1 << 50)
    assert locked.bytes == 1 << 50
