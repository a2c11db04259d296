"""Checkpoints on disk: how a server's share is written, what makes files a checkpoint, and how any piece is read.

    DIR/model-0/                        one folder per model of a job, in the order of its `init` calls
        step-000000120/
            server-000-of-002.shard     what server 0 held: parameters and optimizer state
            server-001-of-002.shard
            manifest.json               names the files above; written last

A folder is a checkpoint if it has a manifest, and only then: the manifest is written when every server has said that
its file is on the disk. Each file is written under another name, flushed (fsync), renamed, and its folder flushed, so
that under its own name it is whole or not there, whatever dies when. What a crash leaves has no manifest, and is
removed when the next checkpoint has been saved.

A shard is an image of the arrays that a server held, each at a multiple of 64 bytes, then an index (msgpack): which
ranges of which array lie where, and a checksum of each 4 MiB of the image. The manifest has the checksum of the index,
and one of itself. So whoever reads a piece verifies what he reads and no more: a server of another number of servers
reads its own ranges from any shards, through one block of memory for each.

Checksums are CRC-32 of zlib: 2 GB/s on one core where SHA-256 has 1 and BLAKE2 less than half, and no dependency. They
find every burst of up to 32 bits, and of other damage all but one in 2^32. They do not keep out anybody who may write
there. He may put in what he likes, but not lead out of there: DIR may be reached by links, `model-0` and all below it
is opened without following any, each by the descriptor of what it lies in, so that nothing can be put in between; and
only files are read as files, for a FIFO would be waited for.

Files are read with pread, not mapped: a mapped file that a disk fails to deliver kills the process.
"""

import bisect
import contextlib
import errno
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from jaxrdma.control import VERSION, LeafSpec, ShardFile
from jaxrdma.errors import JaxRdmaError, MismatchError
from jaxrdma.plan import compare_leaves, describe

# Raised by any change that an older release would read wrongly.
FORMAT = 1

BLOCK_BYTES = 4 << 20  # what one checksum covers, one write writes and one read reads
ALIGN_BYTES = 64  # a cache line

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{9,})")
_SHARD = re.compile(r"server-\d{3,9}-of-\d{3,9}\.shard")
_DAMAGED = "damaged-"
_PARAMETERS = -1
# Linux takes a lease from who does not give it back within 45 s (/proc/sys/fs/lease-break-time).
_LEASE_SECONDS = 60.0
_CURE = "give another directory, or --checkpoint-restore never, which sets these checkpoints aside and begins anew"
_NO_FOLDER = (
    "not a folder, and links are not followed here: move the folder itself there, or remove this"
)
_OTHER = f"it was saved with another update; {_CURE}"

Bytes = NDArray[np.uint8]


class DamagedError(JaxRdmaError):
    """A checkpoint is not what was written: a file is missing, short, or has other bytes."""


class Part(msgspec.Struct, frozen=True):
    """What one server holds of one array.

    - `leaf`: index of the leaf of whose parameters or state it is; -1 for state of no leaf (a step count).
    - `slot`: -1 for parameters; else which of the state's arrays of that leaf, or of no leaf, it is.
    - `dtype`, `item`: of an element, the name and the bytes.
    - `ranges`: `(begin, elements)` in the flattened array, ascending.
    """

    leaf: int
    slot: int
    dtype: str
    item: int
    ranges: list[tuple[int, int]]

    @property
    def bytes(self) -> int:
        """Of all ranges together."""
        return self.item * sum(elements for _, elements in self.ranges)


class PolicyRecord(msgspec.Struct, frozen=True):
    """What a policy needs to go on. None of the present ones needs anything, and that is version 0."""

    version: int = 0
    content: dict[str, Any] = {}


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint is of, and which files it consists of.

    - `format`: `FORMAT` of the release that wrote it; `release`: which.
    - `update`: the fingerprint of the optax update.
    - `servers`: of the job that saved; `shards`: of those of them that held something.
    """

    format: int
    release: str
    job: str
    flow: int
    step: int
    leaves: list[LeafSpec]
    update: str
    servers: int
    shards: list[ShardFile]
    policy: PolicyRecord = PolicyRecord()


class _Sealed(msgspec.Struct, frozen=True):
    """The file `manifest.json`."""

    checksum: int
    manifest: msgspec.Raw


class _Entry(msgspec.Struct, frozen=True):
    part: Part
    offset: int


class _Index(msgspec.Struct, frozen=True):
    arrays: list[_Entry]
    blocks: list[int]


def parameter_part(leaf: int, dtype: str, item: int, ranges: list[tuple[int, int]]) -> Part:
    """The part that holds `ranges` of a leaf itself."""
    return Part(leaf, _PARAMETERS, dtype, item, ranges)


# --- names ---


def model_folder(directory: str | Path, flow: int) -> Path:
    """Where the checkpoints of a model lie."""
    return Path(directory) / f"model-{flow}"


def step_folder(model: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, in the folder of a model. Sorted by name they are sorted by step."""
    return model / f"step-{step:09d}"


def shard_name(server: int, servers: int) -> str:
    """The name of a server's file."""
    return f"server-{server:03d}-of-{servers:03d}.shard"


def _names(model: Path) -> list[str]:
    """What is in the folder of a model; nothing where there is none, or something else in its place."""
    try:
        with _closing(_open_folder(model)) as descriptor:
            return os.listdir(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _steps(model: Path) -> dict[int, Path]:
    """What has the name of a step's folder, whatever it is and is in it."""
    found = ((_STEP.fullmatch(name), model / name) for name in _names(model))
    return dict(sorted((int(match[1]), entry) for match, entry in found if match is not None))


# --- opening ---

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def _open_folder(path: Path, at: int | None = None) -> int:
    """Open a folder and no link to one; `at`: the descriptor of the folder that it lies in."""
    try:
        return os.open(path if at is None else path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except NotADirectoryError as error:
        raise NotADirectoryError(error.errno, _NO_FOLDER, str(path)) from None


@contextlib.contextmanager
def _closing(descriptor: int) -> Generator[int, None, None]:
    """The descriptor of a folder: it was only read from, and has nothing to tell when it is closed."""
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextlib.contextmanager
def _opened_step(folder: Path) -> Generator[int, None, None]:
    """The folder of a step, by way of that of its model: neither is a link."""
    with (
        _closing(_open_folder(folder.parent)) as model,
        _closing(_open_folder(folder, model)) as descriptor,
    ):
        yield descriptor


@contextlib.contextmanager
def _made_step(folder: Path) -> Generator[int, None, None]:
    """The same, made if need be."""
    top = folder.parent.parent
    _make_folder(top)
    with (
        _closing(os.open(top, _FOLDER)) as base,
        _closing(_make_in(folder.parent, base)) as model,
        _closing(_make_in(folder, model)) as descriptor,
    ):
        yield descriptor


def _make_in(folder: Path, at: int) -> int:
    """Open a folder, made if need be, and let the disk know of it."""
    try:
        return _open_folder(folder, at)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder.name, dir_fd=at)
            os.fsync(at)
        return _open_folder(folder, at)


def _open_file(path: Path, folder: int) -> int:
    """Open what is a file, and no link to one, to read it. `folder`: the descriptor of the one that it lies in.

    **Raises:** `DamagedError` if it is something else; `OSError`.
    """
    # Who opens a FIFO would wait for somebody who writes.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    end = time.monotonic() + _LEASE_SECONDS
    while True:
        try:
            descriptor = os.open(path.name, flags, dir_fd=folder)
            break
        except BlockingIOError:
            # Of a file alone, where an NFS or SMB server of this machine has lent it to a client and asks it back now.
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise DamagedError(f"{path} is a link, which is not followed here") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise DamagedError(f"{path} is not a file")


# --- writing ---


class Image:
    """Memory for a copy of `parts`, laid out as a shard is. Its pages are touched, so that copying costs a copy."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.entries: list[_Entry] = []
        end = 0
        for part in parts:
            begin = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            self.entries.append(_Entry(part, begin))
            end = begin + part.bytes
        self.memory: Bytes = np.empty(end, np.uint8)
        self.memory.fill(0)

    def copy(self, arrays: Sequence[Bytes]) -> None:
        """Take the bytes of every part, in their order."""
        for entry, array in zip(self.entries, arrays, strict=True):
            np.copyto(self.memory[entry.offset : entry.offset + entry.part.bytes], array)


def _never() -> bool:
    return False


def write_shard(
    folder: Path, name: str, image: Image, cancelled: Callable[[], bool] = _never
) -> ShardFile:
    """Write an image as the file `name` of a step's folder, which is made if need be. It is on the disk on return.

    **Arguments:**

    - `cancelled`: asked between blocks whether to give up.

    **Returns:** what the manifest must say of it.

    **Raises:** `OSError` if it could not be written, `InterruptedError` among them if it was cancelled; nothing of it
    is left then.
    """
    index = b""
    blocks: list[int] = []

    def content() -> Iterable[memoryview | bytes]:
        nonlocal index
        for begin in range(0, image.memory.size, BLOCK_BYTES):
            if cancelled():
                raise InterruptedError(f"the writing of {folder / name} was given up")
            block = image.memory[begin : begin + BLOCK_BYTES]
            blocks.append(zlib.crc32(block.data))
            yield block.data
        index = msgspec.msgpack.encode(_Index(image.entries, blocks))
        yield index

    with _made_step(folder) as descriptor:
        size = _write_durably(name, descriptor, content())
    return ShardFile(name, size, len(index), zlib.crc32(index))


def commit(model: Path, manifest: Manifest) -> None:
    """Make the files of a step's folder a checkpoint.

    **Raises:** `OSError`; it is none then.
    """
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    sealed = msgspec.json.encode(_Sealed(zlib.crc32(content), msgspec.Raw(content)))
    with _opened_step(step_folder(model, manifest.step)) as folder:
        _write_durably(MANIFEST, folder, [sealed])


def prune(model: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what crashes have left. No step may be in the making.

    **Raises:** `OSError`.
    """
    whole, _ = find(model)
    kept = {manifest.step for manifest in whole[: max(1, keep)]}
    gone = [folder for step, folder in _steps(model).items() if step not in kept]
    gone += [model / name for name in _names(model) if name.startswith(_DAMAGED)]
    if gone:
        with _closing(_open_folder(model)) as descriptor:
            for folder in gone:
                _remove(folder, descriptor)


def drop(folder: Path, name: str) -> None:
    """Remove one server's file of a step that did not become a checkpoint. The folder goes with `prune`."""
    with contextlib.suppress(OSError), _opened_step(folder) as descriptor:
        os.unlink(name, dir_fd=descriptor)


def retire_after(model: Path, step: int) -> None:
    """Put the steps after `step`, which cannot be read, out of the way of the ones to come. They go with `prune`.

    **Raises:** `OSError`.
    """
    if not model.is_dir():
        return
    with _closing(_open_folder(model)) as descriptor:
        for number, folder in _steps(model).items():
            if number <= step:
                continue
            target = model / f"{_DAMAGED}{folder.name}"
            _remove(target, descriptor)
            os.rename(folder.name, target.name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        os.fsync(descriptor)


def set_aside(model: Path) -> Path | None:
    """Give the folder of a model another name, if there is one, so that a new beginning does not mix with it.

    **Returns:** the new name.

    **Raises:** `OSError`.
    """
    if not _steps(model) and not _is_no_folder(model):
        return None
    number = 1
    while os.path.lexists(target := model.with_name(f"{model.name}-set-aside-{number}")):
        number += 1
    model.rename(target)
    _sync_folder(target.parent)
    return target


def _write_durably(name: str, folder: int, content: Iterable[memoryview | bytes]) -> int:
    """Write a file, in the folder of that descriptor, that appears whole or not at all; its size."""
    part = f".{name}.part"
    size = 0
    try:
        # What a crash has left, or what somebody has put there to be written through: it is not opened.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o644, dir_fd=folder)
        try:
            for data in content:
                view = memoryview(data)
                size += len(view)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        for left in (part, name):
            with contextlib.suppress(OSError):
                os.unlink(left, dir_fd=folder)
        raise
    return size


def _make_folder(folder: Path) -> None:
    """Make it and what is missing above it, and let the disk know of each."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    with _closing(os.open(folder, _FOLDER)) as descriptor:
        os.fsync(descriptor)


def _remove(folder: Path, model: int) -> None:
    """The manifest first: what a crash leaves of the rest must not look like a checkpoint. Of a link, the link."""
    try:
        status = os.stat(folder.name, dir_fd=model, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(folder.name, dir_fd=model)
        return
    with _closing(_open_folder(folder, model)) as descriptor:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(MANIFEST, dir_fd=descriptor)
        os.fsync(descriptor)
    shutil.rmtree(folder.name, dir_fd=model)


# --- reading ---


def find(model: Path) -> tuple[list[Manifest], list[str]]:
    """The checkpoints of a model whose manifest can be read and whose files are there with their lengths.

    **Returns:** them, the newest first; and a text on each that has a manifest and is damaged all the same, or has the
    name of a checkpoint and is a link.

    **Raises:** `MismatchError` if one was written by a release with another format; `OSError`.
    """
    whole: list[Manifest] = []
    damaged: list[str] = []
    if _is_no_folder(model):
        return [], [f"{model} is {_NO_FOLDER}"]
    for step, folder in reversed(_steps(model).items()):
        try:
            with _opened_step(folder) as descriptor:
                manifest = _check_step(folder, descriptor, step)
        except FileNotFoundError:
            continue  # another server has removed it meanwhile
        except NotADirectoryError:
            damaged.append(f"{folder} is {_NO_FOLDER}")
        except OSError as error:
            damaged.append(f"{folder} cannot be opened: {error.strerror}")
        except DamagedError as error:
            damaged.append(str(error))
        else:
            if manifest is not None:
                whole.append(manifest)
    return whole, damaged


def _check_step(folder: Path, descriptor: int, step: int) -> Manifest | None:
    """The manifest of a step's folder, if there is one and its files are there."""
    manifest = _read_manifest(folder / MANIFEST, descriptor)
    if manifest is None:
        return None
    if manifest.step != step:
        raise DamagedError(f"{folder / MANIFEST} is of step {manifest.step}")
    for shard in manifest.shards:
        # The checksums do not keep out anybody who may write here: no file elsewhere is read for a name.
        if not _SHARD.fullmatch(shard.name) or shard.index_bytes > shard.bytes:
            raise DamagedError(f"{folder / MANIFEST} names {shard.name!r}, which is no shard")
        _check_length(folder / shard.name, descriptor, shard.bytes)
    return manifest


def _is_no_folder(path: Path) -> bool:
    """Whether there is something else than a folder, such as a link to one."""
    try:
        return not stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _read_manifest(path: Path, folder: int) -> Manifest | None:
    try:
        with open(_open_file(path, folder), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        content = bytes(sealed.manifest)
        if zlib.crc32(content) != sealed.checksum:
            raise DamagedError(f"{path} has other bytes than were written")
        version: dict[str, Any] = msgspec.json.decode(content)
        if version["format"] == FORMAT:
            return msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    raise MismatchError(
        f"{path} has format {version['format']}, of jaxrdma {version.get('release')}; this is jaxrdma {VERSION}, which "
        f"reads format {FORMAT}. Install that release, or take another directory"
    )


def _check_length(path: Path, folder: int, expected: int) -> None:
    try:
        status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(f"{path} is not a file, and links are not followed here")
    if status.st_size != expected:
        raise DamagedError(f"{path} has {status.st_size} bytes, {expected} were written")


def check_model(
    manifest: Manifest, folder: Path, leaves: Sequence[LeafSpec], update: str | None
) -> None:
    """Refuse a checkpoint of another model.

    **Arguments:**

    - `update`: the fingerprint that it must have; `None` for any.

    **Raises:** `MismatchError` with the first difference and what can be done.
    """
    difference = compare_leaves(leaves, manifest.leaves, "this job", "the checkpoint")
    if difference is not None:
        raise MismatchError(f"{folder} is a checkpoint of another model: {difference}; {_CURE}")
    if update is not None and update != manifest.update:
        raise MismatchError(
            f"{folder} was saved with another optax update: its fingerprint is {manifest.update[:12]}.., this job's "
            f"{update[:12]}... If that is meant (another learning rate), go on with --checkpoint-restore new-update; "
            f"else {_CURE}"
        )


class Reader:
    """A checkpoint that is being read. Owns the open files; a context manager. Reads through one block of memory
    for each shard.

    **Raises:** when made and in every method: `DamagedError` for what is not as it was written or cannot be read.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._leaves = manifest.leaves
        self._files: list[_ShardReader] = []
        # by array: where its ranges lie, as (begin, elements, file, offset of the first), sorted
        self._sources: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self._dtypes: dict[tuple[int, int], str] = {}
        try:
            with _opened_step(folder) as descriptor:
                for number, shard in enumerate(manifest.shards):
                    self._files.append(_ShardReader(folder / shard.name, descriptor, shard))
                    self._learn(number, self._files[-1].index)
        except OSError as error:
            self.close()
            raise DamagedError(f"{folder} cannot be opened: {error.strerror}") from None
        except BaseException:
            self.close()
            raise
        for sources in self._sources.values():
            sources.sort()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def check_slots(self, leaves: Sequence[int], wanted: Sequence[tuple[int, int]]) -> None:
        """Refuse a state with arrays, of these leaves, that nobody wants: it was made by another update.

        **Arguments:**

        - `leaves`: indices of leaves, -1 for none.
        - `wanted`: `(leaf, slot)` of each state array that will be read.

        **Raises:** `MismatchError`.
        """
        extra = sorted(
            (leaf, slot)
            for leaf, slot in self._sources.keys() - set(wanted)
            if slot != _PARAMETERS and leaf in leaves
        )
        for leaf, slot in extra:
            name = self._name(Part(leaf, slot, "", 0, []))
            raise MismatchError(f"this job's update has no {name}, as {self._folder} has: {_OTHER}")

    def read(self, part: Part, into: Bytes) -> None:
        """Fill `into` with the ranges of `part`, one after the other.

        **Raises:** `MismatchError` if the checkpoint has no such array, or another dtype for it.
        """
        key = part.leaf, part.slot
        name = self._name(part)
        if key not in self._sources:
            raise MismatchError(f"{self._folder} has no {name}, as this job's update has: {_OTHER}")
        if self._dtypes[key] != part.dtype:
            raise MismatchError(
                f"{name} is {part.dtype} here and {self._dtypes[key]} in {self._folder}: {_OTHER}"
            )
        sources = self._sources[key]
        done = 0
        for begin, elements in part.ranges:
            at, end = begin, begin + elements
            while at < end:
                place = bisect.bisect_right(sources, at, key=lambda source: source[0]) - 1
                first, count, file, offset = sources[place] if place >= 0 else (0, 0, 0, 0)
                stop = min(end, first + count)
                if stop <= at:
                    raise MismatchError(f"{self._folder} has no element {at} of {name}")
                size = (stop - at) * part.item
                target = into[done : done + size]
                self._files[file].read(offset + (at - first) * part.item, target)
                done += size
                at = stop

    def _learn(self, number: int, index: _Index) -> None:
        for entry in index.arrays:
            key = entry.part.leaf, entry.part.slot
            self._dtypes[key] = entry.part.dtype
            offset = entry.offset
            for begin, elements in entry.part.ranges:
                self._sources.setdefault(key, []).append((begin, elements, number, offset))
                offset += elements * entry.part.item

    def _name(self, part: Part) -> str:
        whose = describe(self._leaves[part.leaf]) if part.leaf >= 0 else "no leaf"
        return (
            f"parameters of {whose}"
            if part.slot == _PARAMETERS
            else f"state array {part.slot} of {whose}"
        )


class _ShardReader:
    """One open shard, and the block of it that was read last."""

    def __init__(self, path: Path, folder: int, shard: ShardFile) -> None:
        self._path = path
        self._end = shard.bytes - shard.index_bytes
        self._number = -1
        self._block: Bytes = np.empty(0, np.uint8)
        try:
            self._descriptor = _open_file(path, folder)
        except OSError as error:
            raise DamagedError(f"{path} cannot be opened: {error.strerror}") from None
        try:
            index: Bytes = np.empty(shard.index_bytes, np.uint8)
            self._pread(index, self._end)
            data = index.data
            if zlib.crc32(data) != shard.checksum:
                raise DamagedError(f"the index of {path} has other bytes than were written")
            try:
                self.index = msgspec.msgpack.decode(data, type=_Index)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise DamagedError(f"the index of {path} cannot be read: {error}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, begin: int, into: Bytes) -> None:
        """Fill `into` with what lies at `begin`, having verified it."""
        done = 0
        while done < into.size:
            number, inside = divmod(begin + done, BLOCK_BYTES)
            block = self._load(number)
            piece = block[inside : inside + into.size - done]
            if piece.size == 0:
                raise DamagedError(f"{self._path} ends before byte {begin + into.size}")
            np.copyto(into[done : done + piece.size], piece)
            done += piece.size

    def _load(self, number: int) -> Bytes:
        if number == self._number:
            return self._block
        begin = number * BLOCK_BYTES
        size = max(0, min(BLOCK_BYTES, self._end - begin))
        if self._block.size != size:
            self._block = np.empty(size, np.uint8)
        self._number = -1
        self._pread(self._block, begin)
        if (
            number >= len(self.index.blocks)
            or zlib.crc32(self._block.data) != self.index.blocks[number]
        ):
            raise DamagedError(
                f"{self._path}, bytes {begin} to {begin + size}: other bytes than were written"
            )
        self._number = number
        return self._block

    def _pread(self, into: Bytes, offset: int) -> None:
        done = 0
        while done < into.size:
            try:
                count = os.preadv(self._descriptor, [into[done:].data], offset + done)
            except OSError as error:
                raise DamagedError(f"{self._path} cannot be read: {error.strerror}") from None
            if count == 0:
                raise DamagedError(f"{self._path} ends at byte {offset + done}")
            done += count
