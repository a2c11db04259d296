"""One leaf of gigabytes trains to the numbers of float64 NumPy, compared in the script, in the memory that is foretold.

Here it is a few MiB. The long form has 5 GiB, past the end of 32 bits in bytes, and as bfloat16 in elements of 31 too.
"""

import re
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.cluster.job import Job
from tests.cluster.scripts.large import AFTER

SHORT_BYTES = 24 << 20

# Most that a process has ever resident, as measured with 0.1 to 2.2 GiB: so many times what it holds of the leaf, and
# beside. A worker has parameters and gradients; a server parameters, sums, and what the update makes. Of 16 bits, sums
# take twice as much, and are rounded before the update.
WORKER_COPIES = 2.1
SERVER_COPIES = {"float32": 3.1, "bfloat16": 5.1, "float16": 5.1}
BESIDE_BYTES = 1 << 29


def needed(size: int, dtype: str, servers: int) -> dict[str, int]:
    """By role, the memory of all its processes together, in bytes, for a leaf of `size` bytes."""
    return {
        "worker": int(WORKER_COPIES * size) + BESIDE_BYTES,
        "servers": int(SERVER_COPIES[dtype] * size) + servers * BESIDE_BYTES,
    }


def check_room(size: int, dtype: str, servers: int) -> None:
    """Say how much memory a leaf of `size` bytes needs; refuse one that finds less, or is too long for the script."""
    most = (2**32 - AFTER) * (4 if dtype == "float32" else 2)
    assert size <= most, f"{size} bytes: at most {most}, so that an index of {dtype} is a uint32"
    need = needed(size, dtype, servers)
    room = available()
    texts = [f"{role} {text(number)}" for role, number in need.items()]
    said = f"a leaf of {text(size)} needs {text(sum(need.values()))} of memory: {', '.join(texts)}"
    print(f"{said}; available: {text(room)}", flush=True)
    assert sum(need.values()) <= room, f"{said}, and {text(room)} are available. Give fewer --gib"


def available() -> int:
    """Bytes that processes of this machine can have now without swapping; its control group may allow less."""
    room = psutil.virtual_memory().available
    groups = Path("/proc/self/cgroup").read_text()
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        found = re.search(rf"^\d+:{controller}:/(.*)$", groups, re.MULTILINE)
        root = Path("/sys/fs/cgroup", controller)
        for folder in (root, root / found[1] if found else root):  # a container has its own as root
            file = folder / name
            if file.exists() and (limit := file.read_text().strip()) != "max":
                room = min(room, int(limit))
    return room


def text(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def train_large(job: Job, size: int, dtype: str, limit_s: float) -> dict[str, int]:
    """Train a leaf of `size` bytes on one worker, within `limit_s` seconds. Most that each process had resident."""
    stop = job.folder / "stop"
    job.start("large.py", size, dtype, stop)
    job.wait_for_output("worker 0", " elements compared", limit_s)
    peaks = {name: peak(process.pid) for name, process in job.processes.items()}
    stop.touch()
    job.succeed(60)
    return peaks


def peak(pid: int) -> int:
    """Most that the process has had resident, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) << 10


def test_each_element_of_a_large_leaf_is_that_of_float64(make_job: Callable[..., Job]) -> None:
    servers = 2
    peaks = train_large(make_job(servers, 1), SHORT_BYTES, "float32", 100)
    foretold = needed(SHORT_BYTES, "float32", servers)
    assert peaks["worker 0"] < foretold["worker"], peaks
    assert peaks["server 0"] + peaks["server 1"] < foretold["servers"], peaks
