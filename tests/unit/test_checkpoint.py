"""A checkpoint is whole or not there, is noticed to be damaged, and is read by any number of servers."""

import errno
import fcntl
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrdma import checkpoint
from jaxrdma.checkpoint import FORMAT, DamagedError, Image, Manifest, Part, Reader
from jaxrdma.control import VERSION, LeafSpec
from jaxrdma.errors import MismatchError
from jaxrdma.plan import ITEM_BYTES, Plan, assign_partitions
from tests.unit import checkpoints

# --- another number of servers ---

SHAPES = st.lists(st.integers(0, 40), max_size=2).map(tuple)


def held(plan: Plan, server: int, states: int) -> list[Part]:
    """The parameters of a server, `states` state arrays along them, one that is the leaf's whole, one of no leaf."""
    parts: list[Part] = []
    for slot in range(-1, states):
        for leaf, ranges in enumerate(plan.pieces(server)):
            dtype = plan.leaves[leaf].dtype
            parts.append(Part(leaf, slot, dtype, ITEM_BYTES[dtype], ranges))
    if plan.whole_leaves:
        parts += [
            Part(i, states, "int8", 1, [(0, 3)]) for i, r in enumerate(plan.pieces(server)) if r
        ]
    return [*parts, Part(-1, 0, "uint32", 4, [(0, 2)])]


@settings(deadline=None, max_examples=60)
@given(
    leaves=st.lists(st.tuples(SHAPES, st.sampled_from(sorted(ITEM_BYTES))), min_size=1, max_size=5),
    servers=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    partition_bytes=st.tuples(st.integers(128, 1000), st.integers(128, 1000)),
    states=st.integers(0, 2),
    whole_leaves=st.booleans(),
    block=st.sampled_from([64, 100, 4096]),
)
def test_any_number_of_servers_reads_what_any_other_saved(
    leaves, servers, partition_bytes, states, whole_leaves, block
) -> None:
    specs = [LeafSpec(f"params[{i}]", shape, dtype) for i, (shape, dtype) in enumerate(leaves)]
    old, new = (
        assign_partitions(specs, count, size, whole_leaves)
        for count, size in zip(servers, partition_bytes, strict=True)
    )

    def content(part: Part) -> np.ndarray:
        elements = math.prod(specs[part.leaf].shape) if part.leaf >= 0 else 2
        array = checkpoints.whole(part, 9, max(elements, 3))
        cut = [array[b * part.item : (b + n) * part.item] for b, n in part.ranges]
        return np.concatenate([np.empty(0, np.uint8), *cut])

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(checkpoint, "BLOCK_BYTES", block)
        patch.setattr(os, "fsync", lambda descriptor: None)
        shards = []
        for server in range(old.servers):
            image = Image(held(old, server, states))
            image.copy([content(part) for part in held(old, server, states)])
            name = checkpoint.shard_name(server, old.servers)
            shards.append(checkpoint.write_shard(Path(folder), name, image))
        manifest = Manifest(FORMAT, VERSION, "job", 0, 9, specs, "u", old.servers, shards)
        with Reader(Path(folder), manifest) as reader:
            for server in range(new.servers):
                for part in held(new, server, states):
                    into = np.full(part.bytes, 7, np.uint8)
                    if into.size:
                        reader.read(part, into)
                    np.testing.assert_array_equal(into, content(part))


# --- whole or not there ---


@pytest.mark.timeout(60)
def test_a_save_killed_anywhere_leaves_the_previous_or_the_new_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "killed_saves.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr
    previous, new = map(int, done.stdout.split())
    assert previous > 20 and new > 5, "not killed at every point"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_any_call_leaves_the_previous_or_the_new_checkpoint(
    tmp_path: Path, number: int
) -> None:
    model = tmp_path / "model-0"
    seen = set()

    def fail(name: str, real, args) -> None:
        if name == "close":
            real(*args)  # the descriptor is gone even so
        raise OSError(number, os.strerror(number))

    for call in range(1000):
        checkpoints.save(model, 1, keep=1)
        undo = checkpoints.on_call(call, fail)
        try:
            checkpoints.save(model, 2, keep=1)
            failed = False
        except OSError as error:
            failed = True
            # shutil closes once more what failed to close
            assert error.errno in (number, errno.EBADF)
        calls = undo()
        steps = checkpoints.check_all(model)
        assert steps in ([1], [2], [2, 1]), call
        seen.add(steps[0])
        assert not list(model.rglob(".*")), "half a file is left"
        checkpoint.retire_after(model, 0)
        if call >= calls:
            assert not failed
            break
    assert seen == {1, 2} and call > 20


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    model = tmp_path / "model-0"
    checkpoints.save(model, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, limit[1]))  # the first shard has more
        with pytest.raises(OSError, match="File too large"):
            checkpoints.save(model, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoints.check_all(model) == [1]
    assert list((model / "step-000000002").iterdir()) == []
    checkpoints.save(model, 3)
    assert checkpoints.check_all(model) == [3, 1]
    assert not (model / "step-000000002").exists()


# --- damage ---


def damage_of(model: Path) -> str:
    """What is found to be wrong with the only checkpoint, or nothing if it is what was saved."""
    manifests, damaged = checkpoint.find(model)
    if damaged:
        return damaged[0]
    try:
        checkpoints.read(model, manifests[0])
    except DamagedError as error:
        return str(error)
    return ""


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 5)
    files = sorted((tmp_path / "step-000000005").iterdir())
    assert len(files) == 3
    for path in files:
        good = path.read_bytes()
        for place in range(len(good)):
            bad = bytearray(good)
            bad[place] ^= 1 << place % 8
            path.write_bytes(bad)
            try:
                assert path.name in damage_of(tmp_path), (path.name, place)
            except MismatchError as error:  # a manifest of format 0 or 3, say
                pytest.fail(f"{path.name}, byte {place}: {error}")
        path.write_bytes(good)
    assert damage_of(tmp_path) == ""


@pytest.mark.parametrize("name", ["server-001-of-002.shard", "manifest.json"])
def test_a_torn_file_is_noticed_and_the_previous_checkpoint_found(
    tmp_path: Path, name: str
) -> None:
    checkpoints.save(tmp_path, 5)
    checkpoints.save(tmp_path, 6)
    torn = tmp_path / "step-000000006" / name
    for size in (torn.stat().st_size - 1, 100, 0):
        os.truncate(torn, size)
        manifests, damaged = checkpoint.find(tmp_path)
        assert [manifest.step for manifest in manifests] == [5]
        assert len(damaged) == 1 and str(torn) in damaged[0]
    checkpoints.read(tmp_path, manifests[0])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 5)
    (tmp_path / "step-000000005" / "server-000-of-002.shard").unlink()
    assert checkpoint.find(tmp_path)[1][0].endswith("server-000-of-002.shard is missing")


# --- what is kept ---


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        checkpoints.save(tmp_path, step, keep=2)
    assert checkpoints.check_all(tmp_path) == [40, 30]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_newest_whole_one_is_kept_whatever_is_newer(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 10)
    checkpoints.save(tmp_path, 20)
    os.truncate(tmp_path / "step-000000020" / "server-000-of-002.shard", 5)
    checkpoint.prune(tmp_path, 1)
    assert checkpoints.check_all(tmp_path) == [10]


def test_damaged_ones_are_out_of_the_way_and_go_with_the_next(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoints.save(tmp_path, step)
    checkpoint.retire_after(tmp_path, 10)
    assert checkpoints.check_all(tmp_path) == [10]
    checkpoints.save(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000010", "step-000000020"]


def test_what_is_set_aside_keeps_its_content(tmp_path: Path) -> None:
    model = tmp_path / "model-0"
    assert checkpoint.set_aside(model) is None
    for number in (1, 2):
        checkpoints.save(model, number)
        aside = checkpoint.set_aside(model)
        assert aside == tmp_path / f"model-0-set-aside-{number}"
        assert checkpoints.check_all(aside) == [number] and not model.exists()


def test_what_is_being_removed_is_no_checkpoint_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: str, dir_fd: int) -> None:
        raise OSError(errno.EIO, folder)

    checkpoints.save(tmp_path, 1)
    checkpoints.save(tmp_path, 2)
    monkeypatch.setattr("shutil.rmtree", fail)
    with pytest.raises(OSError, match="step-000000001"):
        checkpoint.prune(tmp_path, 1)
    assert checkpoints.check_all(tmp_path) == [2]


# --- what somebody who may write there leads elsewhere ---


def elsewhere(tmp_path: Path) -> tuple[Path, dict[Path, bytes]]:
    """A checkpoint of somebody else, and every file of it."""
    foreign = tmp_path / "elsewhere" / "model-0"
    checkpoints.save(foreign, 20)
    return foreign, content(foreign)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize("name", ["server-000-of-002.shard", "manifest.json"])
def test_a_file_is_not_written_through_a_link(tmp_path: Path, name: str, plant) -> None:
    model, mine = tmp_path / "model-0", tmp_path / "mine"
    mine.write_text("precious")
    step = model / "step-000000005"
    step.mkdir(parents=True)
    plant(step / f".{name}.part", mine)
    plant(step / name, mine)
    checkpoints.save(model, 5)
    assert mine.read_text() == "precious"
    assert checkpoints.check_all(model) == [5] and len(list(step.iterdir())) == 3


def test_what_a_crash_has_left_is_written_anew(tmp_path: Path) -> None:
    step = tmp_path / "step-000000005"
    step.mkdir()
    (step / ".server-000-of-002.shard.part").write_bytes(bytes(100_000))
    checkpoints.save(tmp_path, 5)
    assert checkpoints.check_all(tmp_path) == [5]


def test_a_link_to_a_checkpoint_is_none_and_is_named(tmp_path: Path) -> None:
    foreign, before = elsewhere(tmp_path)
    model = tmp_path / "model-0"
    checkpoints.save(model, 10)
    link = model / "step-000000020"
    link.symlink_to(foreign / link.name)
    manifests, damaged = checkpoint.find(model)
    assert [manifest.step for manifest in manifests] == [10]
    assert len(damaged) == 1 and f"{link} is not a folder, and links are not" in damaged[0]
    with pytest.raises(DamagedError, match="links are not followed"):
        checkpoints.read(model, checkpoint.find(foreign)[0][0])
    assert content(foreign) == before


@pytest.mark.parametrize("retired", [False, True])
def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path, retired: bool) -> None:
    foreign, before = elsewhere(tmp_path)
    model = tmp_path / "model-0"
    checkpoints.save(model, 10)
    for name in ("step-000000020", "damaged-step-000000020", "damaged-more"):
        (model / name).symlink_to(foreign / "step-000000020")
    (model / "step-000000030").symlink_to(tmp_path / "nowhere")
    (model / "step-000000040").write_text("no folder")
    if retired:
        checkpoint.retire_after(model, 10)
        assert checkpoint.find(model)[1] == []
    checkpoint.prune(model, 3)
    assert [path.name for path in model.iterdir()] == ["step-000000010"]
    assert content(foreign) == before and checkpoints.check_all(foreign) == [20]


@pytest.mark.parametrize("which", ["model-0", "model-0/step-000000020"])
def test_nothing_is_saved_where_a_link_leads(tmp_path: Path, which: str) -> None:
    foreign, before = elsewhere(tmp_path)
    link = tmp_path / which
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(foreign.parent / which)
    with pytest.raises(NotADirectoryError, match="links are not followed here"):
        checkpoints.save(tmp_path / "model-0", 20)
    manifest = checkpoint.find(foreign)[0][0]
    with pytest.raises(NotADirectoryError, match="links are not followed here"):
        checkpoint.commit(tmp_path / "model-0", manifest)
    checkpoint.drop(tmp_path / "model-0" / "step-000000020", "server-000-of-002.shard")
    assert content(foreign) == before
    assert len(list(foreign.iterdir())) == 1


def test_the_folder_of_a_model_that_is_a_link_is_left_alone_and_can_be_set_aside(
    tmp_path: Path,
) -> None:
    foreign, before = elsewhere(tmp_path)
    model = tmp_path / "model-0"
    model.symlink_to(foreign)
    (tmp_path / "model-0-set-aside-1").symlink_to(tmp_path / "nowhere")
    manifests, (text,) = checkpoint.find(model)
    assert manifests == [] and f"{model} is not a folder, and links are not" in text
    checkpoint.prune(model, 1)
    with pytest.raises(NotADirectoryError, match="links are not followed here"):
        checkpoint.retire_after(model, 0)
    assert content(foreign) == before
    assert checkpoint.set_aside(model) == tmp_path / "model-0-set-aside-2"
    checkpoints.save(model, 1)
    assert checkpoints.check_all(model) == [1] and content(foreign) == before


def test_the_folder_of_checkpoints_may_be_reached_by_links(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch" / "real").mkdir()
    (tmp_path / "runs" / "one").symlink_to("real")
    model = tmp_path / "runs" / "one" / "model-0"
    for step in (1, 2, 3):
        checkpoints.save(model, step, keep=2)
    checkpoint.retire_after(model, 2)
    assert checkpoints.check_all(tmp_path / "scratch" / "real" / "model-0") == [2]
    assert checkpoint.set_aside(model) == model.with_name("model-0-set-aside-1")


@pytest.mark.timeout(20)  # who opens a FIFO waits for somebody who writes
@pytest.mark.parametrize("name", ["server-001-of-002.shard", "manifest.json"])
@pytest.mark.parametrize("kind", ["fifo", "link", "link to a fifo", "folder"])
def test_only_a_file_is_read_as_one(tmp_path: Path, name: str, kind: str) -> None:
    checkpoints.save(tmp_path, 5)
    checkpoints.save(tmp_path, 6)
    manifest = checkpoint.find(tmp_path)[0][0]
    path, other = tmp_path / "step-000000006" / name, tmp_path / "other"
    path.rename(other)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(other)
    else:
        fifo = path if kind == "fifo" else tmp_path / "fifo"
        os.mkfifo(fifo)
        if fifo != path:
            path.symlink_to(fifo)
    manifests, damaged = checkpoint.find(tmp_path)
    assert [found.step for found in manifests] == [5]
    assert len(damaged) == 1 and str(path) in damaged[0]
    if name != checkpoint.MANIFEST:  # put there after it was looked at
        with pytest.raises(DamagedError, match=name):
            checkpoints.read(tmp_path, manifest)
    checkpoint.prune(tmp_path, 1)
    assert checkpoints.check_all(tmp_path) == [5] and other.exists()
    assert not path.parent.exists()


def test_a_file_that_is_lent_to_a_client_of_a_file_server_is_waited_for(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 5)
    # As the NFS server of the kernel does it: who opens the file has the lease asked back, by a signal here.
    lent = os.open(tmp_path / "step-000000005" / "manifest.json", os.O_RDWR)
    asked = 0

    def give_back(*_: object) -> None:
        nonlocal asked
        asked += 1
        fcntl.fcntl(lent, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    before = signal.signal(signal.SIGIO, give_back)
    try:
        try:
            fcntl.fcntl(lent, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"no leases on this file system: {error}")
        assert checkpoints.check_all(tmp_path) == [5]
        assert asked == 1
    finally:
        os.close(lent)
        signal.signal(signal.SIGIO, before)


# --- another model ---


@pytest.mark.parametrize(
    ("leaves", "text"),
    [
        (checkpoints.LEAVES[:1], r"the checkpoint has params\['b'\] float64\[7\], this job has no"),
        (
            [checkpoints.LEAVES[0], LeafSpec("params['b']", (8,), "float64")],
            r"shape of a leaf differs: this job has params\['b'\] float64\[8\], the checkpoint has",
        ),
        (
            [LeafSpec("params['w']", (40, 5), "float16"), checkpoints.LEAVES[1]],
            "dtype of a leaf differs",
        ),
    ],
)
def test_another_model_is_refused_with_the_first_difference(tmp_path, leaves, text) -> None:
    checkpoints.save(tmp_path, 5)
    (manifest,), _ = checkpoint.find(tmp_path)
    with pytest.raises(MismatchError, match=f"{text}.*another directory, or --checkpoint-restore"):
        checkpoint.check_model(manifest, tmp_path, leaves, None)


def test_another_update_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 5)
    (manifest,), _ = checkpoint.find(tmp_path)
    with pytest.raises(
        MismatchError, match="another optax update.*--checkpoint-restore new-update"
    ):
        checkpoint.check_model(manifest, tmp_path, checkpoints.LEAVES, "v")
    checkpoint.check_model(manifest, tmp_path, checkpoints.LEAVES, "u")
    checkpoint.check_model(manifest, tmp_path, checkpoints.LEAVES, None)


def test_a_state_with_other_arrays_is_refused(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 5)
    (manifest,), _ = checkpoint.find(tmp_path)
    into = np.empty(4, np.uint8)
    with Reader(tmp_path / "step-000000005", manifest) as reader:
        with pytest.raises(MismatchError, match=r"has no state array 1 of params\['w'\]"):
            reader.read(Part(0, 1, "float32", 4, [(0, 1)]), into)
        with pytest.raises(MismatchError, match="is int32 here and float32 in"):
            reader.read(Part(0, 0, "int32", 4, [(0, 1)]), into)
        with pytest.raises(MismatchError, match=r"update has no state array 0 of params\['w'\]"):
            reader.check_slots([-1, 0], [(-1, 0)])
        reader.check_slots([-1, 0], [(-1, 0), (0, 0)])
        reader.check_slots([-1, 1], [(-1, 0)])


def test_a_format_of_another_release_is_named(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 5)
    (manifest,), _ = checkpoint.find(tmp_path)
    checkpoint.commit(tmp_path, msgspec.structs.replace(manifest, format=2, release="7.0"))
    with pytest.raises(MismatchError, match=r"format 2, of jaxrdma 7\.0.*reads format 1"):
        checkpoint.find(tmp_path)
