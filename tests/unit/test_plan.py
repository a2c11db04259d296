"""The plan: every element placed once, evenly, and alike on every process; leaves that cannot be trained are named."""

import math
import subprocess
import sys
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrdma import errors, plan
from jaxrdma.control import LeafSpec

hypothesis.settings.register_profile("steady", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("steady")

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
leaf_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(plan.ITEM_BYTES))), max_size=8).map(
    lambda pairs: [LeafSpec(f"params[{i}]", shape, dtype) for i, (shape, dtype) in enumerate(pairs)]
)
arguments = st.tuples(leaf_lists, st.integers(1, 5), st.integers(128, 20000), st.booleans())


def elements(leaf: LeafSpec) -> int:
    return math.prod(leaf.shape)


@hypothesis.given(arguments)
def test_every_element_is_in_exactly_one_partition_in_push_order(args):
    made = plan.assign_partitions(*args)
    expected = 0
    per_leaf = dict.fromkeys(range(len(args[0])), 0)
    for part in made.partitions:
        assert part.leaf >= expected
        expected = part.leaf
        assert part.begin == per_leaf[part.leaf]
        assert part.elements > 0
        assert 0 <= part.server < args[1]
        per_leaf[part.leaf] += part.elements
    assert per_leaf == {index: elements(leaf) for index, leaf in enumerate(args[0])}


@hypothesis.given(arguments)
def test_a_partition_fits_its_slot_even_if_a_16_bit_leaf_comes_as_float32(args):
    for part in plan.assign_partitions(*args).partitions:
        assert part.elements * max(4, plan.ITEM_BYTES[args[0][part.leaf].dtype]) <= args[2]
        assert part.begin % plan.ALIGN_ELEMENTS == 0


@hypothesis.given(arguments)
def test_no_server_holds_more_than_the_mean_and_one_partition(args):
    leaves, servers, partition_bytes, whole = args
    made = plan.assign_partitions(*args)
    loads = [made.server_bytes(server) for server in range(servers)]
    leaf_bytes = [elements(leaf) * plan.ITEM_BYTES[leaf.dtype] for leaf in leaves]
    assert sum(loads) == sum(leaf_bytes)
    assert max(loads) <= sum(loads) / servers + (
        max(leaf_bytes, default=0) if whole else partition_bytes
    )


@hypothesis.given(arguments)
def test_a_servers_share_of_a_leaf_is_one_range(args):
    leaves, servers, _, whole = args
    made = plan.assign_partitions(*args)
    for server in range(servers):
        for index, ranges in enumerate(made.pieces(server)):
            assert len(ranges) <= 1
            assert sum(size for _, size in ranges) == made.server_elements(server, index)
            assert not whole or made.server_elements(server, index) in (0, elements(leaves[index]))


@hypothesis.given(arguments, arguments)
def test_the_digest_is_equal_exactly_if_the_plans_are(one, other):
    a, b, again = (plan.assign_partitions(*args) for args in (one, other, one))
    assert a == again
    assert a.digest == again.digest
    assert (a == b) == (a.digest == b.digest)
    assert (one == other) == (a == b)


@hypothesis.given(arguments)
def test_a_server_finds_the_proposed_plan_by_its_digest(args):
    made = plan.assign_partitions(*args)
    assert plan.agreed_plan(args[0], args[1], args[2], made.digest) == made


many_leaves = st.tuples(
    st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from(sorted(plan.ITEM_BYTES))), max_size=60
    ),
    st.integers(1, 4),
    st.integers(128, 20000),
    st.booleans(),
).map(
    lambda args: (
        [LeafSpec(f"params[{i}]", (size,), dtype) for i, (size, dtype) in enumerate(args[0])],
        *args[1:],
    )
)


@hypothesis.given(many_leaves)
def test_every_element_travels_once_and_in_a_leaf_of_its_type(args):
    made = plan.assign_partitions(*args)
    wire = made.wire
    filled = [0] * len(wire.leaves)
    for leaf, member in zip(made.leaves, wire.members, strict=True):
        assert wire.leaves[member.leaf].dtype == leaf.dtype
        assert member.elements == elements(leaf)
        assert member.begin == filled[member.leaf]
        filled[member.leaf] += member.elements
    assert filled == [elements(leaf) for leaf in wire.leaves]
    pushed = [0] * len(wire.leaves)
    for part in wire.partitions:
        assert part.begin == pushed[part.leaf]
        pushed[part.leaf] += part.elements
        assert part.elements * max(4, plan.ITEM_BYTES[wire.leaves[part.leaf].dtype]) <= args[2]
    assert pushed == filled


@hypothesis.given(many_leaves)
def test_a_pack_is_one_partition_of_small_leaves_of_one_server(args):
    made = plan.assign_partitions(*args)
    packed = [leaf for pack in made.packs for leaf in pack]
    assert len(packed) == len(set(packed))
    for pack in made.packs:
        assert len(pack) > 1
        assert list(pack) == sorted(pack)
        (partition,) = [
            part for part in made.wire.partitions if part.leaf == made.wire.members[pack[0]].leaf
        ]
        assert partition.elements == sum(elements(made.leaves[leaf]) for leaf in pack)
        for leaf in pack:
            full = plan.partition_elements(made.leaves[leaf].dtype, args[2])
            assert 0 < elements(made.leaves[leaf]) <= full // plan.SMALL_SHARE
            assert made.server_elements(partition.server, leaf) == elements(made.leaves[leaf])


@hypothesis.given(many_leaves)
def test_leaves_that_are_not_packed_travel_as_they_lie(args):
    made = plan.assign_partitions(*args)
    packed = {leaf for pack in made.packs for leaf in pack}
    own = {member.leaf: leaf for leaf, member in enumerate(made.wire.members) if leaf not in packed}
    travelling = [
        (own[p.leaf], p.server, p.begin, p.elements) for p in made.wire.partitions if p.leaf in own
    ]
    lying = [(p.leaf, p.server, p.begin, p.elements) for p in made.partitions]
    assert travelling == [each for each in lying if each[0] not in packed]


@hypothesis.given(many_leaves)
def test_of_small_leaves_of_a_type_no_server_has_two_packs_that_are_not_nearly_full(args):
    made = plan.assign_partitions(*args)
    for server in range(args[1]):
        for dtype in plan.ITEM_BYTES:
            full = plan.partition_elements(dtype, args[2])
            small = [
                leaf
                for leaf, spec in enumerate(made.leaves)
                if spec.dtype == dtype
                and 0 < elements(spec) <= full // plan.SMALL_SHARE
                and made.server_elements(server, leaf)
            ]
            packs = [pack for pack in made.packs if pack[0] in small]
            sizes = [sum(elements(made.leaves[leaf]) for leaf in pack) for pack in packs]
            assert all(size > full - full // plan.SMALL_SHARE for size in sizes[:-1])
            assert len(small) - sum(map(len, packs)) <= 1


def test_averages_lie_where_their_parameters_do_and_16_bit_ones_are_float32():
    leaves = [
        LeafSpec("params['w']", (70, 30), "bfloat16"),
        LeafSpec("params['b']", (500,), "float32"),
        LeafSpec("params['d']", (3,), "float64"),
    ]
    made = plan.assign_partitions(leaves, 2, 512)
    averages = plan.average_plan(made)
    assert [leaf.dtype for leaf in averages.leaves] == ["float32", "float32", "float64"]
    for server in range(2):
        assert averages.pieces(server) == made.pieces(server)
        assert averages.server_bytes(server) >= made.server_bytes(server)
    assert averages.digest != made.digest
    assert plan.agreed_average_plan(made, averages.digest) == averages
    assert averages.packs == made.packs
    with pytest.raises(errors.MismatchError, match="run the same version of jaxrdma"):
        plan.agreed_average_plan(made, made.digest)


def test_an_unknown_digest_is_refused():
    leaves = [LeafSpec("params['w']", (3,), "float32")]
    with pytest.raises(errors.MismatchError, match="digest .* JAXRDMA_PARTITION_BYTES"):
        plan.agreed_plan(leaves, 1, 1 << 20, "0" * 64)


@hypothesis.given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=12))
def test_a_mirror_is_another_server_and_on_another_host_wherever_that_can_be(hosts):
    mirrors = plan.place_mirrors(hosts)
    assert sorted(mirrors) == list(range(len(hosts)))  # each keeps one copy
    assert all(mirror != server for server, mirror in enumerate(mirrors))
    together = sum(hosts[server] == hosts[mirror] for server, mirror in enumerate(mirrors))
    largest = max(map(hosts.count, hosts))
    assert together == max(0, 2 * largest - len(hosts))


def test_a_single_server_has_no_mirror():
    with pytest.raises(errors.PlanError, match="needs another server"):
        plan.place_mirrors(["a"])


@hypothesis.given(st.one_of(arguments, many_leaves))
def test_a_servers_part_is_a_plan_of_its_own(args):
    made = plan.assign_partitions(*args)
    for server in range(made.servers):
        part = plan.part_plan(made, server)
        assert [p.elements for p in part.wire.partitions] == [
            p.elements for p in made.wire.partitions if p.server == server
        ]
        assert part.server_bytes(0) == made.server_bytes(server)
        assert [p.elements for p in part.partitions] == [
            p.elements for p in made.partitions if p.server == server
        ]
        for leaf in range(len(made.leaves)):
            size = made.server_elements(server, leaf)
            assert part.leaves[leaf].shape == (size,)
            assert part.pieces(0)[leaf] == ([(0, size)] if size else [])


def test_the_plan_is_known_in_advance():
    leaves = [
        LeafSpec("params['a']", (100,), "float32"),
        LeafSpec("params['b']", (), "float32"),
        LeafSpec("params['c']", (0, 7), "float32"),
        LeafSpec("params['d']", (6, 10), "bfloat16"),
    ]
    made = plan.assign_partitions(leaves, servers=2, partition_bytes=128)
    assert [(p.leaf, p.server, p.begin, p.elements) for p in made.partitions] == [
        (0, 0, 0, 32),
        (0, 0, 32, 32),
        (0, 1, 64, 32),
        (0, 1, 96, 4),
        (1, 0, 0, 1),
        (3, 1, 0, 32),
        (3, 1, 32, 28),
    ]


def test_a_large_leaf_is_spread_evenly_and_quickly():
    leaves = [LeafSpec("params['w']", (1 << 27,), "float32")]
    start = time.perf_counter()
    made = plan.assign_partitions(leaves, servers=3, partition_bytes=1 << 20)
    assert made.digest
    assert time.perf_counter() - start < 1
    assert [made.server_bytes(server) >> 20 for server in range(3)] == [171, 171, 170]


def test_a_leaf_beyond_4_gib_is_cut_without_a_gap():
    count = (5 << 28) + 3  # elements: 5 GiB and some bytes
    made = plan.assign_partitions([LeafSpec("w", (count,), "float32")], 2, 1 << 20)
    assert sum(made.server_bytes(server) for server in range(2)) == 4 * count
    end = 0
    for partition in sorted(made.partitions, key=lambda each: each.begin):
        assert partition.begin == end
        assert partition.elements <= 1 << 18
        end += partition.elements
    assert end == count


def test_a_thousand_leaves_are_planned_quickly():
    leaves = [LeafSpec(f"params[{i}]", (i, 300), "float32") for i in range(1000)]
    start = time.perf_counter()
    made = plan.assign_partitions(leaves, servers=4, partition_bytes=1 << 16)
    assert made.digest
    assert all(made.pieces(server) for server in range(4))
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("servers", "partition_bytes", "text"),
    [(0, 1 << 20, "0 servers"), (1, 64, "partition_bytes is 64")],
)
def test_impossible_settings_are_refused(servers, partition_bytes, text):
    with pytest.raises(errors.PlanError, match=text):
        plan.assign_partitions([], servers, partition_bytes)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn", "object"])
def test_a_leaf_that_cannot_be_summed_is_refused_by_name(dtype):
    with pytest.raises(errors.PlanError, match=rf"params\['n'\] {dtype}\[2\] cannot be averaged"):
        plan.assign_partitions([LeafSpec("params['n']", (2,), dtype)], 1, 1 << 20)


def test_the_plan_and_the_comparison_need_no_jax():
    code = (
        "import sys; from jaxrdma import plan; from jaxrdma.control import LeafSpec;"
        "leaf = LeafSpec('params', (3,), 'float32'); plan.assign_partitions([leaf], 1, 1024).digest;"
        "plan.compare_leaves([leaf], []); sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


W = LeafSpec("params['w']", (3, 4), "float32")
B = LeafSpec("params['b']", (4,), "float32")


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ([B, W], [B, W], None),
        ([], [], None),
        (
            [B, W],
            [B, LeafSpec(W.path, (3, 5), "float32")],
            "the shape of a leaf differs: worker 0 has params['w'] float32[3,4], worker 1 has params['w'] float32[3,5]",
        ),
        (
            [B, W],
            [B, LeafSpec(W.path, (3, 4), "bfloat16")],
            "the dtype of a leaf differs: worker 0 has params['w'] float32[3,4], "
            "worker 1 has params['w'] bfloat16[3,4]",
        ),
        (
            [B],
            [LeafSpec(B.path, (), "bfloat16")],
            "the shape and dtype of a leaf differs: worker 0 has params['b'] float32[4], "
            "worker 1 has params['b'] bfloat16[]",
        ),
        (
            [B, W],
            [W],
            "a leaf is missing: worker 0 has params['b'] float32[4], worker 1 has no params['b']",
        ),
        (
            [B],
            [B, W],
            "a leaf is missing: worker 1 has params['w'] float32[3,4], worker 0 has no params['w']",
        ),
        (
            [B, W],
            [W, B],
            "the order of the leaves differs: leaf 0 is params['b'] float32[4] for worker 0 "
            "and params['w'] float32[3,4] for worker 1",
        ),
    ],
)
def test_the_first_differing_leaf_is_named_with_both_versions(mine, theirs, text):
    assert plan.compare_leaves(mine, theirs, "worker 0", "worker 1") == text


@hypothesis.given(leaf_lists, leaf_lists)
def test_leaves_compare_alike_exactly_if_they_are(mine, theirs):
    assert (plan.compare_leaves(mine, theirs) is None) == (mine == theirs)


def test_leaves_are_described_with_paths_in_flatten_order():
    tree = {
        "layers": [{"w": jnp.zeros((2, 3)), "b": None}, {"w": np.zeros((0, 4), "float16")}],
        "scale": 0.5,
    }
    specs, treedef, leaves = plan.describe_leaves(tree)
    assert specs == [
        LeafSpec("params['layers'][0]['w']", (2, 3), "float32"),
        LeafSpec("params['layers'][1]['w']", (0, 4), "float16"),
        LeafSpec("params['scale']", (), "float32"),
    ]
    assert treedef == jax.tree.structure(tree)
    assert [leaf.dtype.name for leaf in leaves] == ["float32", "float16", "float32"]
    assert leaves[2] == 0.5


def test_a_bare_array_and_foreign_byte_order_are_leaves():
    specs, _, leaves = plan.describe_leaves(np.arange(3, dtype=">f4"))
    assert specs == [LeafSpec("params", (3,), "float32")]
    assert leaves[0].dtype.isnative
    assert leaves[0].tolist() == [0, 1, 2]
    bfloat16 = np.zeros(2, jnp.bfloat16)
    assert plan.describe_leaves([bfloat16])[0] == [LeafSpec("params[0]", (2,), "bfloat16")]


def test_an_empty_tree_has_no_leaves():
    assert plan.describe_leaves({"a": None})[0] == []


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (3, "is 3, of type int, and cannot be averaged"),
        (True, "is True, of type bool"),
        (1j, "is 1j, of type complex"),
        ("relu", "is 'relu', of type str"),
        (math.sin, "is <built-in function sin>, of type builtin_function_or_method"),
        (
            jnp.zeros(2, jnp.int32),
            r"is int32\[2\] and cannot be averaged; keep it out of the params, e.g. eqx",
        ),
        (np.zeros(2, bool), r"is bool\[2\]"),
        (jnp.zeros(2, jnp.complex64), r"is complex64\[2\]"),
        (jnp.zeros(2, jnp.float8_e4m3fn), r"is float8_e4m3fn\[2\]"),
        (np.array([None]), r"is object\[1\]"),
        (np.float64(2), r"is float64\[\], but 64-bit types are off .* convert it"),
        (np.zeros(2), r"is float64\[2\], but 64-bit types are off"),
    ],
)
def test_a_leaf_that_is_no_parameter_is_named_with_the_reason(leaf, text):
    with pytest.raises(errors.PlanError, match=rf"leaf params\['net'\]\.?\[?0\]? {text}"):
        plan.describe_leaves({"net": [leaf], "ok": jnp.zeros(1)})


def test_a_plan_says_what_each_server_holds_and_where_each_leaf_lies():
    leaves = [
        LeafSpec("params['a']", (100,), "float32"),
        LeafSpec("params['b']", (8,), "bfloat16"),
        LeafSpec("params['c']", (0, 3), "float32"),
    ]
    assert plan.assign_partitions(leaves, servers=3, partition_bytes=256).text(4) == [
        "model 4: 3 leaves, 416 bytes on 3 servers, leaves may be cut, partitions of at most 256 bytes",
        "  server 0: 256 bytes ( 61.5 %), 1 partitions",
        "  server 1: 144 bytes ( 34.6 %), 1 partitions",
        "  server 2:  16 bytes (  3.8 %), 1 partitions",
        "  params['a'] float32[100]: server 0 [0:64], server 1 [64:100]",
        "  params['b'] bfloat16[8]: server 2 [0:8]",
        "  params['c'] float32[0,3]: empty",
    ]


def test_a_plan_says_which_small_leaves_travel_as_one():
    leaves = [
        LeafSpec("params['a']", (3,), "float32"),
        LeafSpec("params['b']", (64,), "float32"),
        LeafSpec("params['c']", (2, 2), "float32"),
    ]
    made = plan.assign_partitions(leaves, servers=1, partition_bytes=256)
    assert made.packs == ((0, 2),)
    assert made.text(0) == [
        "model 0: 3 leaves, 284 bytes on 1 servers, leaves may be cut, partitions of at most 256 bytes",
        "  server 0: 284 bytes (100.0 %), 2 partitions",
        "  params['a'] float32[3]: server 0 [0:3], in partition 0 with 1 more",
        "  params['b'] float32[64]: server 0 [0:64]",
        "  params['c'] float32[2,2]: server 0 [0:4], in partition 0 with 1 more",
    ]


def test_a_prng_key_is_named():
    with pytest.raises(errors.PlanError, match=r"params\['key'\] is a PRNG key"):
        plan.describe_leaves({"key": jax.random.key(0)})


def test_further_bad_leaves_are_counted():
    with pytest.raises(
        errors.PlanError, match=r"params\['a'\] is 1, .* \(1 more leaves cannot either\)"
    ):
        plan.describe_leaves({"a": 1, "b": 2, "c": 3.0})


def test_float64_is_a_parameter_where_x64_is_on():
    with jax.enable_x64(True):
        specs, _, leaves = plan.describe_leaves([np.zeros(2), 1.0])
    assert [spec.dtype for spec in specs] == ["float64", "float64"]
    assert [leaf.dtype.name for leaf in leaves] == ["float64", "float64"]
