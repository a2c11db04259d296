"""A checkpoint whose bytes are not those that were written is noticed, or gives what was saved all the same."""

import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from jaxrdma import checkpoint
from jaxrdma.checkpoint import DamagedError, Manifest
from jaxrdma.control import ShardFile
from jaxrdma.errors import JaxRdmaError, MismatchError
from tests.fuzz.examples import patience, search
from tests.fuzz.test_control_messages import anything
from tests.unit import checkpoints

pytestmark = patience

STEP = 7
NAMES = ["server-000-of-002.shard", "server-001-of-002.shard", checkpoint.MANIFEST]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several blocks."""
    model = tmp_path_factory.mktemp("saved") / "model-0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK_BYTES", 256)
        checkpoints.save(model, STEP)
    return model


def outcome(saved: Path, spoil: Any) -> str:
    """What comes of reading a copy that `spoil` has changed: "read", bit for bit, or the error's name."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK_BYTES", 256)
        model = Path(folder) / "model-0"
        shutil.copytree(saved, model)
        spoil(checkpoint.step_folder(model, STEP))
        try:
            whole, damaged = checkpoint.find(model)
            assert len(whole) + len(damaged) <= 1
            for manifest in whole:
                step = checkpoint.step_folder(model, manifest.step)
                checkpoint.check_model(manifest, step, checkpoints.LEAVES, "u")
                checkpoints.read(model, manifest)
        except JaxRdmaError as error:
            return type(error).__name__
        return "damaged" if damaged else "read" if whole else "none"


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["change", "cut", "insert", "zero"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


@search(2)
@given(name=st.sampled_from(NAMES), changes=CHANGES)
def test_any_damage_is_noticed_or_does_no_harm(saved: Path, name: str, changes: Any) -> None:
    def spoil(step: Path) -> None:
        data = bytearray((step / name).read_bytes())
        for what, where, piece in changes:
            at = int(where * len(data))
            match what:
                case "change":
                    data[at : at + len(piece)] = piece
                case "cut":
                    del data[at:]
                case "insert":
                    data[at:at] = piece
                case _:
                    data[at : at + 50] = bytes(len(data[at : at + 50]))
        (step / name).write_bytes(data)

    came = outcome(saved, spoil)
    # A release that reads another format may have written a manifest that says so, and is named.
    assert came in ("read", "damaged", DamagedError.__name__)


@search(0.5)
@given(name=st.sampled_from(NAMES), data=st.binary(max_size=300) | st.just(b"[" * 100_000))
def test_other_files_in_its_place_are_no_checkpoint(saved: Path, name: str, data: bytes) -> None:
    came = outcome(saved, lambda step: (step / name).write_bytes(data))
    assert came in ("damaged", DamagedError.__name__)


def seal(manifest: Any) -> bytes:
    content = msgspec.json.encode(manifest)
    return msgspec.json.encode({"checksum": zlib.crc32(content), "manifest": msgspec.Raw(content)})


SHARDS = st.builds(
    ShardFile,
    name=st.sampled_from([*NAMES, "../../model-0", "", ".", "a\0b", "/etc/hostname", "x" * 300]),
    bytes=st.sampled_from([0, 1, 100, 1 << 62]),
    index_bytes=st.sampled_from([0, 1, 50, 1 << 40, 1 << 62]),
    checksum=st.sampled_from([0, 1 << 31]),
)


@search()
@given(
    manifest=st.builds(
        Manifest,
        format=st.sampled_from([checkpoint.FORMAT, checkpoint.FORMAT, 2, -1]),
        release=st.just("0"),
        job=st.text(max_size=3),
        flow=st.integers(-1, 1),
        step=st.sampled_from([STEP, STEP, -1]),
        leaves=st.just(checkpoints.LEAVES) | st.just([]),
        update=st.just("u"),
        servers=st.integers(-1, 3),
        shards=st.lists(SHARDS, max_size=3),
    )
    | st.sampled_from([None, [], 3, "text", {"format": checkpoint.FORMAT}, {"format": [1]}, {}])
)
def test_a_manifest_that_is_absurd_but_sealed_ends_in_an_error_of_ours(
    saved: Path, manifest: Any
) -> None:
    came = outcome(saved, lambda step: (step / checkpoint.MANIFEST).write_bytes(seal(manifest)))
    assert came in ("damaged", DamagedError.__name__, MismatchError.__name__)


INDEX = anything(inspect.type_info(checkpoint._Index))


@search()
@given(index=INDEX.map(msgspec.msgpack.encode) | st.binary(max_size=60))
def test_an_index_that_is_absurd_but_sealed_ends_in_an_error_of_ours(
    saved: Path, index: bytes
) -> None:
    def spoil(step: Path) -> None:
        (manifest,) = checkpoint.find(step.parent)[0]
        first, *rest = manifest.shards
        data = (step / first.name).read_bytes()
        data = data[: first.bytes - first.index_bytes] + index
        (step / first.name).write_bytes(data)
        shard = ShardFile(first.name, len(data), len(index), zlib.crc32(index))
        changed = msgspec.structs.replace(manifest, shards=[shard, *rest])
        (step / checkpoint.MANIFEST).write_bytes(seal(changed))

    assert outcome(saved, spoil) in (DamagedError.__name__, MismatchError.__name__)
