"""Leaf -> partition -> server: pure functions that give the same answer on every process.

Nothing here imports JAX at import time; `describe_leaves` alone needs it, and imports it when it is called, so that the
coordinator and the launcher can use the rest of the module.
"""

import hashlib
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from jaxrdma.control import LeafSpec
from jaxrdma.errors import MismatchError, PlanError

# Bytes of one element of each type that can be summed.
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}

# Partitions begin at multiples of this many elements: 64 bytes of float32, one cache line and one vector register.
ALIGN_ELEMENTS = 16

# A bound of one partition that still fits 16 elements of the widest type.
MIN_PARTITION_BYTES = 128

# A leaf of at most this share of a full partition travels with others of its kind. What a partition costs of its own, a
# request, an answer and a completion, is some 30 microseconds: as long as copying 64 KiB, a sixteenth of the usual
# 1 MiB, into a pack and out of it takes. And packs of such leaves are nearly full.
SMALL_SHARE = 16

# Raised by any change to how leaves are cut and placed, so that digests of different rules differ.
_RULES = 2

_KEEP_OUT = "keep it out of the params, e.g. eqx.partition(model, eqx.is_inexact_array)"


class Partition(msgspec.Struct, frozen=True):
    """A piece of one leaf, held by one server.

    - `leaf`: index of the leaf in `jax.tree.flatten` order.
    - `server`: index of the server.
    - `begin`: first element within the flattened leaf.
    - `elements`: how many, more than 0.
    """

    leaf: int
    server: int
    begin: int
    elements: int


class Member(msgspec.Struct, frozen=True):
    """Where a leaf travels.

    - `leaf`: index in `Wire.leaves`.
    - `begin`: its first element there.
    - `elements`: how many.
    """

    leaf: int
    begin: int
    elements: int


class Wire(msgspec.Struct, frozen=True):
    """A plan as the engines have it: a pack is one leaf there, in the place of its first member.

    - `leaves`: what travels; a pack has the path of its first member.
    - `members`: by leaf of the plan, where it is in `leaves`.
    - `partitions`: of `leaves`, in the order in which they are pushed. Their numbers are those of traces and stalls.
    """

    leaves: list[LeafSpec]
    members: list[Member]
    partitions: list[Partition]


@dataclass(frozen=True)
class Plan:
    """Where every element of every leaf lives. Made by `assign_partitions`, equal on every process.

    - `leaves`: what was planned.
    - `servers`: how many servers there are. One of them may hold nothing.
    - `partition_bytes`: upper bound of a partition, in bytes, on the wire.
    - `whole_leaves`: whether each leaf lies on one server.
    - `partitions`: in the order in which they are pushed: leaf after leaf, from the beginning of each to its end.
    - `packs`: small leaves that travel as one partition, one after the other: at least two each, ascending, of one type
      and on one server. `partitions` has them one by one.
    """

    leaves: tuple[LeafSpec, ...]
    servers: int
    partition_bytes: int
    whole_leaves: bool
    partitions: tuple[Partition, ...] = field(repr=False)
    packs: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over the leaves, the settings and every partition: equal exactly if the plans are equal."""
        leaves = [(leaf.path, list(leaf.shape), leaf.dtype) for leaf in self.leaves]
        cuts = [(p.leaf, p.server, p.begin, p.elements) for p in self.partitions]
        settings = (self.servers, self.partition_bytes, self.whole_leaves)
        content = (_RULES, leaves, *settings, cuts, self.packs)
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()

    @cached_property
    def wire(self) -> Wire:
        """The plan as the engines have it."""
        sizes = [math.prod(leaf.shape) for leaf in self.leaves]
        # By packed leaf, the one before it in its pack; by the first of a pack, the elements of all.
        before = {b: a for pack in self.packs for a, b in itertools.pairwise(pack)}
        whole = {pack[0]: sum(sizes[leaf] for leaf in pack) for pack in self.packs}
        leaves: list[LeafSpec] = []
        members: list[Member] = []
        for index, leaf in enumerate(self.leaves):
            if index in before:
                last = members[before[index]]
                members.append(Member(last.leaf, last.begin + last.elements, sizes[index]))
                continue
            members.append(Member(len(leaves), 0, sizes[index]))
            shape = (whole[index],) if index in whole else leaf.shape
            leaves.append(LeafSpec(leaf.path, shape, leaf.dtype))
        partitions = [
            Partition(members[p.leaf].leaf, p.server, p.begin, whole.get(p.leaf, p.elements))
            for p in self.partitions
            if p.leaf not in before
        ]
        return Wire(leaves, members, partitions)

    def pieces(self, server: int) -> list[list[tuple[int, int]]]:
        """What `server` holds: for each leaf the `(begin, elements)` ranges, ascending, neighbours joined.

        The server stores the ranges of a leaf one after the other without gaps, in this order.
        """
        return self._pieces[server]

    def server_elements(self, server: int, leaf: int) -> int:
        """How many elements of `leaf` lie on `server`."""
        return sum(elements for _, elements in self._pieces[server][leaf])

    def server_bytes(self, server: int) -> int:
        """Bytes of parameters that lie on `server`."""
        return sum(
            elements * ITEM_BYTES[leaf.dtype]
            for leaf, ranges in zip(self.leaves, self._pieces[server], strict=True)
            for _, elements in ranges
        )

    def text(self, model: int) -> list[str]:
        """The plan in lines, for people: what each server holds, and where each leaf of model number `model` lies."""
        total = sum(self.server_bytes(server) for server in range(self.servers))
        lines = [
            f"model {model}: {len(self.leaves)} leaves, {total:,} bytes on {self.servers} servers, "
            + ("leaves kept whole" if self.whole_leaves else "leaves may be cut")
            + f", partitions of at most {self.partition_bytes:,} bytes"
        ]
        for server in range(self.servers):
            size = self.server_bytes(server)
            count = sum(part.server == server for part in self.wire.partitions)
            share = 100 * size / total if total else 0.0
            lines.append(
                f"  server {server}: {size:>{len(f'{total:,}')},} bytes ({share:5.1f} %), {count} partitions"
            )
        number = {part.leaf: number for number, part in enumerate(self.wire.partitions)}
        packed = {
            leaf: f", in partition {number[self.wire.members[leaf].leaf]} with {len(pack) - 1} more"
            for pack in self.packs
            for leaf in pack
        }
        for index, leaf in enumerate(self.leaves):
            places = [
                f"server {server} [{begin}:{begin + elements}]"
                for server in range(self.servers)
                for begin, elements in self._pieces[server][index]
            ]
            where = ", ".join(places) or "empty"
            lines.append(f"  {describe(leaf)}: {where}{packed.get(index, '')}")
        return lines

    @cached_property
    def _pieces(self) -> list[list[list[tuple[int, int]]]]:
        pieces: list[list[list[tuple[int, int]]]] = [
            [[] for _ in self.leaves] for _ in range(self.servers)
        ]
        for part in self.partitions:
            ranges = pieces[part.server][part.leaf]
            if ranges and sum(ranges[-1]) == part.begin:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + part.elements)
            else:
                ranges.append((part.begin, part.elements))
        return pieces


def partition_elements(dtype: str, partition_bytes: int) -> int:
    """How many elements a full partition of a leaf of `dtype` has.

    16-bit leaves count as 32-bit ones, because their gradients may be pushed as float32.
    """
    elements = partition_bytes // max(4, ITEM_BYTES[dtype])
    return max(ALIGN_ELEMENTS, elements - elements % ALIGN_ELEMENTS)


def assign_partitions(
    leaves: Sequence[LeafSpec], servers: int, partition_bytes: int, whole_leaves: bool = False
) -> Plan:
    """Cut each leaf into partitions and place them, the same on every process.

    Largest partition first onto the least loaded server; ties go to the lower index. No server holds more than the mean
    plus one partition (one leaf, with `whole_leaves`). Full partitions of one leaf are alike, so which of them a server
    gets is chosen last: neighbours, such that its share of a leaf is one range. Small leaves of one type that have come
    to lie on one server are packed: they travel as one partition, and lie where they would without.

    **Arguments:**

    - `leaves`: path, shape and dtype of each leaf, in `jax.tree.flatten` order.
    - `servers`: how many servers, at least 1. A server may end up with none.
    - `partition_bytes`: upper bound of a partition, in bytes.
    - `whole_leaves`: place leaves, not partitions, for an update that needs all of its leaf.

    **Returns:** the plan; `plan.digest` is equal on two processes exactly if their plans are.

    **Raises:** `PlanError`, naming the leaf, if one has a dtype that cannot be summed or a negative size.
    """
    if servers < 1:
        raise PlanError(f"cannot place parameters on {servers} servers: at least 1 is needed")
    if partition_bytes < MIN_PARTITION_BYTES:
        raise PlanError(
            f"partition_bytes is {partition_bytes}: at least {MIN_PARTITION_BYTES} is needed"
        )
    for leaf in leaves:
        if leaf.dtype not in ITEM_BYTES:
            raise PlanError(f"{describe(leaf)} cannot be averaged; {_KEEP_OUT}")
        if any(size < 0 for size in leaf.shape):
            raise PlanError(f"{describe(leaf)} has a negative size")

    # Blocks are what the greedy rule places: (bytes, leaf, elements of it).
    blocks: list[tuple[int, int, int]] = []
    for index, leaf in enumerate(leaves):
        size, item = math.prod(leaf.shape), ITEM_BYTES[leaf.dtype]
        block = size if whole_leaves else partition_elements(leaf.dtype, partition_bytes)
        blocks += [(block * item, index, block)] * (size // block if size else 0)
        if size and size % block:
            blocks.append((size % block * item, index, size % block))
    blocks.sort(key=lambda block: (-block[0], block[1]))

    loads = [(0, server) for server in range(servers)]
    placed: list[list[tuple[int, int]]] = [
        [] for _ in leaves
    ]  # per leaf: (server, elements), largest first
    for size_bytes, index, elements in blocks:
        load, server = loads[0]
        placed[index].append((server, elements))
        heapq.heapreplace(loads, (load + size_bytes, server))

    partitions: list[Partition] = []
    for index, blocks_of_leaf in enumerate(placed):
        if not blocks_of_leaf:
            continue
        # The short block at the end of the leaf is the last in `blocks_of_leaf`; its server's share goes to the end.
        last = blocks_of_leaf[-1][0]
        blocks_of_leaf.sort(key=lambda block: (block[0] == last, block[0], -block[1]))
        full, begin = partition_elements(leaves[index].dtype, partition_bytes), 0
        for server, elements in blocks_of_leaf:
            for end in _cuts(begin, elements, full):
                partitions.append(Partition(index, server, begin, end - begin))
                begin = end
    packs = _packs(leaves, partitions, partition_bytes)
    return Plan(tuple(leaves), servers, partition_bytes, whole_leaves, tuple(partitions), packs)


def _packs(
    leaves: Sequence[LeafSpec], partitions: Sequence[Partition], partition_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Which small leaves travel as one: those of a type on a server, in their order, as many as fit a partition."""
    packs: list[list[int]] = []
    open_packs: dict[tuple[int, str], tuple[list[int], int]] = {}  # and how many elements more fit
    for part in partitions:
        leaf = leaves[part.leaf]
        full = partition_elements(leaf.dtype, partition_bytes)
        if part.elements < math.prod(leaf.shape) or part.elements * SMALL_SHARE > full:
            continue
        key = part.server, leaf.dtype
        pack, room = open_packs.get(key, ([], 0))
        if part.elements > room:
            pack, room = [], full
            packs.append(pack)
        pack.append(part.leaf)
        open_packs[key] = pack, room - part.elements
    return tuple(tuple(pack) for pack in packs if len(pack) > 1)


def _cuts(begin: int, elements: int, full: int) -> list[int]:
    end = begin + elements
    return [*range(begin + full, end, full), end]


def agreed_plan(
    leaves: Sequence[LeafSpec], servers: int, partition_bytes: int, digest: str
) -> Plan:
    """The plan with this digest: how a server learns, from a proposal alone, whether leaves stay whole.

    **Raises:** `MismatchError` if no plan for these leaves has the digest.
    """
    for whole_leaves in (False, True):
        plan = assign_partitions(leaves, servers, partition_bytes, whole_leaves)
        if plan.digest == digest:
            return plan
    raise _other_plan(leaves, servers, partition_bytes, plan.digest, digest)


def agreed_average_plan(plan: Plan, digest: str) -> Plan:
    """`average_plan`, which must have this digest.

    **Raises:** `MismatchError` if it has another.
    """
    averages = average_plan(plan)
    if averages.digest != digest:
        raise _other_plan(
            averages.leaves, plan.servers, plan.partition_bytes, averages.digest, digest
        )
    return averages


def _other_plan(
    leaves: Sequence[LeafSpec], servers: int, partition_bytes: int, mine: str, theirs: str
) -> MismatchError:
    return MismatchError(
        f"the plan for {len(leaves)} leaves on {servers} servers with partition_bytes={partition_bytes} has the digest "
        f"{mine[:12]}.. here and {theirs[:12]}.. on the worker that proposed it: run the same version of "
        "jaxrdma, with the same JAXRDMA_PARTITION_BYTES, everywhere"
    )


def average_plan(plan: Plan) -> Plan:
    """Where the moving averages of the parameters of `plan` lie: where those do. 16-bit leaves have float32 averages.

    A change of one part in a thousand is less than a 16-bit average can tell from none.
    """
    leaves = tuple(
        LeafSpec(leaf.path, leaf.shape, "float32" if ITEM_BYTES[leaf.dtype] == 2 else leaf.dtype)
        for leaf in plan.leaves
    )
    return replace(plan, leaves=leaves)


def place_mirrors(hosts: Sequence[str]) -> list[int]:
    """By server, which other one keeps a copy of its part. Each keeps one; none its own.

    On another host wherever that can be: if no host has more than half of the servers, for all.

    **Arguments:**

    - `hosts`: by server, the name of its machine. At least two servers.
    """
    servers = len(hosts)
    if servers < 2:
        raise PlanError("a copy of a server's part needs another server")
    by_host: dict[str, list[int]] = {}
    for server, host in enumerate(hosts):
        by_host.setdefault(host, []).append(server)
    groups = sorted(by_host.values(), key=lambda group: (-len(group), group[0]))
    order = [server for group in groups for server in group]
    # Shifted by the largest group, no server of a group falls on its own group again before that is exhausted.
    shift = len(groups[0]) % servers or 1
    mirrors = [0] * servers
    for place, server in enumerate(order):
        mirrors[server] = order[(place + shift) % servers]
    return mirrors


def part_plan(plan: Plan, server: int) -> Plan:
    """What `server` holds, as a plan for one server: each leaf is the elements that it has of it, in its order."""
    begins = [0] * len(plan.leaves)
    partitions: list[Partition] = []
    for part in plan.partitions:
        if part.server == server:
            partitions.append(Partition(part.leaf, 0, begins[part.leaf], part.elements))
            begins[part.leaf] += part.elements
    leaves = tuple(
        LeafSpec(leaf.path, (elements,), leaf.dtype)
        for leaf, elements in zip(plan.leaves, begins, strict=True)
    )
    packs = tuple(pack for pack in plan.packs if begins[pack[0]])
    return Plan(leaves, 1, plan.partition_bytes, plan.whole_leaves, tuple(partitions), packs)


def describe(leaf: LeafSpec) -> str:
    """`params['w'] float32[3,4]`: how a leaf is written in every message."""
    return f"{leaf.path} {leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def compare_leaves(
    mine: Sequence[LeafSpec],
    theirs: Sequence[LeafSpec],
    mine_name: str = "this side",
    theirs_name: str = "the other",
) -> str | None:
    """The first difference between two processes' leaves, with both versions, or None if they are alike.

    **Arguments:**

    - `mine`, `theirs`: leaves in `jax.tree.flatten` order.
    - `mine_name`, `theirs_name`: how the text calls the two processes, e.g. `worker 0`.
    """
    if list(mine) == list(theirs):
        return None
    here, there = ({leaf.path: leaf for leaf in leaves} for leaves in (mine, theirs))
    for position in range(max(len(mine), len(theirs))):
        a = mine[position] if position < len(mine) else None
        b = theirs[position] if position < len(theirs) else None
        if a is not None and b is not None and a.path == b.path:
            if a == b:
                continue
            what = (
                "dtype"
                if a.shape == b.shape
                else "shape"
                if a.dtype == b.dtype
                else "shape and dtype"
            )
            return f"the {what} of a leaf differs: {mine_name} has {describe(a)}, {theirs_name} has {describe(b)}"
        if a is not None and a.path not in there:
            return (
                f"a leaf is missing: {mine_name} has {describe(a)}, {theirs_name} has no {a.path}"
            )
        if b is not None and b.path not in here:
            return (
                f"a leaf is missing: {theirs_name} has {describe(b)}, {mine_name} has no {b.path}"
            )
        if a is not None and b is not None:
            return (
                f"the order of the leaves differs: leaf {position} is {describe(a)} for {mine_name} "
                f"and {describe(b)} for {theirs_name}"
            )
    return f"the leaves differ: {mine_name} has {len(mine)}, {theirs_name} has {len(theirs)}"


def describe_leaves(tree: Any) -> tuple[list[LeafSpec], Any, list[Any]]:
    """Path, shape and dtype of every leaf of a parameter tree.

    JAX and NumPy arrays and Python floats are parameters if they are float32, float16, bfloat16 or, with x64 enabled,
    float64. A float64 NumPy array while x64 is off is refused: JAX would quietly make it float32, and whoever wrote
    float64 should say which of the two is meant. Python floats have no width and become JAX's default float.

    **Returns:** the leaves' specs, the treedef, and the leaves as arrays, all in `jax.tree.flatten` order.

    **Raises:** `PlanError`, naming the first leaf that cannot be trained, why, and how many others there are.
    """
    import jax

    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    specs: list[LeafSpec] = []
    leaves: list[Any] = []
    problems: list[str] = []
    for key_path, leaf in flat:
        path = f"params{jax.tree_util.keystr(key_path)}"
        array, problem = _as_parameter(leaf)
        if problem is not None:
            problems.append(f"leaf {path} {problem}")
            continue
        specs.append(LeafSpec(path, tuple(int(size) for size in array.shape), array.dtype.name))
        leaves.append(array)
    if problems:
        more = f" ({len(problems) - 1} more leaves cannot either)" if len(problems) > 1 else ""
        raise PlanError(problems[0] + more)
    return specs, treedef, leaves


def _as_parameter(leaf: Any) -> tuple[Any, str | None]:
    """The leaf as an array, or why it cannot be a parameter."""
    import jax
    import numpy as np

    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
        if isinstance(leaf, float):
            return np.asarray(leaf, jax.numpy.zeros(()).dtype), None
        value = repr(leaf)
        value = value if len(value) <= 40 else value[:37] + "..."
        return (
            None,
            f"is {value}, of type {type(leaf).__name__}, and cannot be averaged; {_KEEP_OUT}",
        )
    dtype = leaf.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return None, f"is a PRNG key ({dtype}) and cannot be averaged; {_KEEP_OUT}"
    if dtype.name not in ITEM_BYTES:
        return None, f"is {dtype.name}{list(leaf.shape)} and cannot be averaged; {_KEEP_OUT}"
    if dtype.name == "float64" and not jax.config.read("jax_enable_x64"):
        return None, (
            f"is float64{list(leaf.shape)}, but 64-bit types are off in JAX and it would become float32: convert it, "
            "e.g. jax.tree.map(jnp.asarray, params), or set jax_enable_x64"
        )
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(leaf, dtype.newbyteorder("=")), None
    return leaf, None
