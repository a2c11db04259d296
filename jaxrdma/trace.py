"""The flight recorder as Python sees it: the last few thousand things that happened to partitions.

The native engines write it (native/base/recorder.h); this module reads it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# native/base/recorder.h, Record
RECORD_DTYPE = np.dtype(
    [
        ("time_ns", "<i8"),
        ("step", "<i8"),
        ("partition", "<u4"),
        ("flow", "<u2"),
        ("peer", "<u2"),
        ("stage", "u1"),
        ("reserved", "u1", (7,)),
    ]
)

# native/base/recorder.h, Stage; a test holds the two together.
STAGES = (
    "queued",
    "posted",
    "completed",
    "consumed",
    "landed",
    "reduced",
    "published",
    "dropped",
    "updating",
    "answered",
)


def decode(records: bytes) -> NDArray[Any]:
    """Structured array of `RECORD_DTYPE`, oldest first.

    - `time_ns`: nanoseconds since 1970, of this host's clock.
    - `peer`: index of the server (on a worker) or of the worker (on a server).
    - `stage`: index into `STAGES`.
    """
    return np.frombuffer(records, RECORD_DTYPE)
