"""How much memory a process locks over verbs, by the sizes in native/engine, and how much it may.

What is reckoned here is for one device; `Locked` multiplies. Each of several devices registers all of the memory, and
the kernel counts it each time; and each has a link to the peer, with its queues. Where the peer has more devices there
are as many links as it has: this end does not know that, and reckons with its own.
"""

import math
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrdma.errors import TransportError

if TYPE_CHECKING:
    from jaxrdma.plan import Plan

# Landing memory of one worker is this many partitions: enough to keep the wire busy while one is summed.
SLOTS_PER_WORKER = 16

# Of a follower, without room for data: what it asks for.
SLOTS_PER_FOLLOWER = 4

# Of a queue pair and its completion queue, where the driver keeps them in memory of the process: 512 sends of up to
# 256 bytes, some 1000 receives of 16, their completions of 64.
QUEUE_BYTES = 256 << 10

CURE = (
    "`ulimit -l unlimited`; docker --ulimit memlock=-1; systemd LimitMEMLOCK=infinity (a job of Slurm has "
    "the limit of its daemon)"
)

_HEADER_BYTES = 64  # of a slot, beside its partition
_PAGE_BYTES = 4096  # what is locked is locked by pages
_CAP_IPC_LOCK = 14


def _pages(number: int) -> int:
    return -(-number // _PAGE_BYTES) * _PAGE_BYTES


# Of the parameters, where gradients are held: the newest, the one that is being made, one that is still read.
_COPIES = 3


def slots_bytes(slots: int, partition_bytes: int) -> int:
    """The slots of one worker on one server: landing memory there, and what is on its way here. By one device."""
    return _pages(slots * (_HEADER_BYTES + -(-partition_bytes // 64) * 64))


def connections_bytes(peers: int, partition_bytes: int, slots: int = SLOTS_PER_WORKER) -> int:
    """What the connections to so many peers lock, on either side. By one device, and by one link to each peer."""
    return peers * (slots_bytes(slots, partition_bytes) + QUEUE_BYTES)


def shard_bytes(plan: "Plan", server: int, mode: str, workers: int, held: bool = False) -> int:
    """What a server locks for its part of a model: the sums, and the parameters or the means if they are others.

    `held`: gradients are held until it is decided about them, and answered with copies of one version. Three copies are
    reckoned with; there is one more for each further worker that is still reading an older version.
    """
    from jaxrdma.plan import ITEM_BYTES

    if mode == "average" and workers == 1:
        return 0  # the mean of one is sent from where it landed
    sums = results = 0
    for dtype, count in _held_elements(plan, server):
        width = ITEM_BYTES[dtype]
        if mode != "ema":
            sums += -(-count * max(width, 4) // 64) * 64
        if mode != "average" or width < 4:
            results += -(-count * width // 64) * 64
    copies = _COPIES * _pages(results) if held else 0
    return _pages(sums) + _pages(results) + copies


def version_bytes(plan: "Plan", server: int) -> int:
    """One copy of a server's part of the parameters, as it keeps it for a follower."""
    from jaxrdma.plan import ITEM_BYTES

    held = _held_elements(plan, server)
    return _pages(sum(-(-count * ITEM_BYTES[dtype] // 64) * 64 for dtype, count in held))


def _held_elements(plan: "Plan", server: int) -> list[tuple[str, int]]:
    """Type and number of the elements that a server has of each leaf; a pack is one leaf."""
    elements = [0] * len(plan.wire.leaves)
    for partition in plan.wire.partitions:
        if partition.server == server:
            elements[partition.leaf] += partition.elements
    types = [leaf.dtype for leaf in plan.wire.leaves]
    return list(zip(types, elements, strict=True))


def copy_bytes(plan: "Plan") -> int:
    """One copy of a model between the wire and XLA's buffers on a worker, each leaf or pack by itself."""
    from jaxrdma.plan import ITEM_BYTES

    leaves = plan.wire.leaves
    return sum(_pages(math.prod(leaf.shape) * ITEM_BYTES[leaf.dtype]) for leaf in leaves)


@dataclass(frozen=True)
class LockLimit:
    """How much memory this process may lock, in bytes; `None`: no limit.

    `exempt`: it has CAP_IPC_LOCK, so that no limit counts.
    """

    soft: int | None
    hard: int | None
    exempt: bool

    def allows(self, need: int) -> bool:
        """Whether `need` bytes may be locked."""
        return self.exempt or self.soft is None or self.soft >= need

    @property
    def text(self) -> str:
        """For people."""
        if self.soft is None:
            return "the limit is unlimited"
        if self.exempt:
            return f"the limit, {bytes_text(self.soft)}, does not count for a process with CAP_IPC_LOCK"
        hard = "unlimited" if self.hard is None else bytes_text(self.hard)
        return f"limit of this process {bytes_text(self.soft)} (hard limit {hard}), no CAP_IPC_LOCK"


def read_lock_limit() -> LockLimit:
    """The limit of this process."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return LockLimit(soft, hard, _has_ipc_lock())


def _has_ipc_lock() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
        users = Path("/proc/self/uid_map").read_text().split()
    except OSError:
        return False
    # The kernel asks for the machine's own right; root of a user namespace (a rootless container) lacks it.
    if users != ["0", "0", "4294967295"]:
        return False
    held = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return held is not None and bool(int(held[1], 16) >> _CAP_IPC_LOCK & 1)


class Locked:
    """What a process has locked so far over verbs. Each addition is said, and refused before the device refuses it.

    **Arguments:**

    - `who`: "worker 0", for what is said.
    - `say`: prints one line.
    - `limit`: what this process may lock; read when it is made.
    - `devices`: how many devices lock it, each once.
    """

    def __init__(
        self,
        who: str,
        say: Callable[[str], None],
        limit: LockLimit | None = None,
        devices: int = 1,
    ) -> None:
        self._who = who
        self._say = say
        self._devices = devices
        self._limit = limit if limit is not None else read_lock_limit()
        self.bytes = 0

    def add(self, what: str, number: int) -> None:
        """`number` bytes more by each device, for `what`.

        **Raises:** `TransportError` with the need, the limit and the cure if that is more than may be locked.
        """
        need = self._devices * number
        total = self.bytes + need
        if not self._limit.allows(total):
            fewer = "" if self._devices == 1 else "; or name fewer devices by JAXRDMA_DEVICE"
            raise TransportError(
                f"{self._who} cannot lock the memory for {what}: it needs {need_text(number, self._devices)}, "
                f"{bytes_text(total)} in all; {self._limit.text}. Raise it: {CURE}{fewer}"
            )
        self.bytes = total
        in_all = "" if total == need else f", {bytes_text(total)} in all"
        self._say(
            f"{self._who} locks {need_text(number, self._devices)} for {what}{in_all}; {self._limit.text}"
        )


def need_text(number: int, devices: int) -> str:
    """`number` bytes by each of so many devices, for people."""
    each = "" if devices == 1 else f" ({bytes_text(number)} by each of {devices} devices)"
    return bytes_text(devices * number) + each


def bytes_text(number: int) -> str:
    """As people read it: "1.5 MiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number} bytes"
