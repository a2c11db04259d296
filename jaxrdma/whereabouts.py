"""Where the main thread of this process is: for others who wait for it."""

import os
import sys
import sysconfig
import threading
from types import FrameType

# What JAX does in these files takes long, and is no fault.
_ACTIVITIES = (
    (os.path.join("jax", "_src", "compiler.py"), "compiling"),
    (os.path.join("jax", "_src", "interpreters", "mlir.py"), "lowering"),
    (os.path.join("jax", "_src", "interpreters", "partial_eval.py"), "tracing"),
)
_LIBRARIES = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
_OWN = tuple(os.path.join(p, "") for p in (sysconfig.get_path("stdlib"), os.path.dirname(__file__)))


def whereabouts() -> str:
    """`train.py:41 in load`: the line of the user's program at which its main thread is, or is in a call from.

    With the activity before it where JAX compiles, lowers or traces: `compiling for train.py:52 in main`. Empty if no
    Python is left in the main thread.
    """
    # The documented way to see another thread's stack, also of one that is in native code.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
    return "" if frame is None else describe(frame)


def describe(frame: FrameType) -> str:
    """As `whereabouts`, of the thread that is in `frame`."""
    activity, here = "", None
    innermost: FrameType | None = frame
    while innermost is not None and here is None:
        name = innermost.f_code.co_filename
        activity = next((what for end, what in _ACTIVITIES if name.endswith(end)), activity)
        if _is_the_users(name):
            here = innermost
        innermost = innermost.f_back
    here = here or frame
    where = f"{os.path.basename(here.f_code.co_filename)}:{here.f_lineno} in {here.f_code.co_name}"
    return f"{activity} for {where}" if activity else where


def _is_the_users(file: str) -> bool:
    return not file.startswith(("<frozen", *_OWN)) and not any(part in file for part in _LIBRARIES)
