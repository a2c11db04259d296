"""A timeline as Chrome trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxrdma.critical import Step
from jaxrdma.dump import Dump
from jaxrdma.timeline import PARTS, Slice

# Numbers of processes in the file: the real ones of two machines may be alike.
_FIRST = {"worker": 1, "server": 100_001}
_PATHS = 0  # of the track that shows what made each step late


def trace_events(
    dumps: Iterable[Dump], slices: Sequence[Slice], paths: Sequence[Step]
) -> dict[str, Any]:
    """The whole file, for `json.dump`: a process for each process, a track for each part and partition of it.

    And one track of the steps themselves, each named by what made it late.
    """
    begin = min((s.begin for s in slices), default=0)
    events: list[dict[str, Any]] = [_name("process", _PATHS, 0, "critical path")]
    for dump in dumps:
        name = f"{dump.name} ({dump.host}, pid {dump.pid})"
        events.append(_name("process", _FIRST[dump.role] + dump.index, 0, name))
    # Their numbers are 32 bits, unlike in all of the file, and in the order in which they are shown.
    tracks = {key: number for number, key in enumerate(sorted({_track(s) for s in slices}), 1)}
    for each in slices:
        process, *_ = key = _track(each)
        track = tracks[key]
        args: dict[str, Any] = {"model": each.flow, "step": each.step}
        if each.partition >= 0:
            args["partition"] = each.partition
        if each.peer >= 0:
            args["server" if each.role == "worker" else "last worker"] = each.peer
        events.append(
            _complete(f"{each.part} {each.step}", each.part, process, track, each, begin, args)
        )
    for (process, part, flow, partition), number in tracks.items():
        name = PARTS[part] if partition < 0 else f"{PARTS[part]} of partition {partition}"
        name = f"{name}, model {flow}" if flow else name
        events.append(_name("thread", process, number, name))
    for path in paths:
        length = max(path.seconds, 0.0) * 1e6
        events.append(
            {
                "name": f"step {path.step}: {path.text}",
                "cat": "step",
                "ph": "X",
                "ts": (path.end_ns - begin) / 1e3 - length,
                "dur": length,
                "pid": _PATHS,
                "tid": len(tracks) + 1 + path.flow,
                "args": {name: f"{seconds * 1e3:.3f} ms" for name, seconds in path.parts.items()},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track(each: Slice) -> tuple[int, int, int, int]:
    """The process, and of its tracks the parts one after the other, each in the order of its partitions."""
    return _FIRST[each.role] + each.index, PARTS.index(each.part), each.flow, each.partition


def _complete(
    name: str, kind: str, process: int, track: int, each: Slice, begin: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": (each.begin - begin) / 1e3,  # microseconds
        "dur": (each.end - each.begin) / 1e3,
        "pid": process,
        "tid": track,
        "args": args,
    }


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {
        "name": f"{what}_name",
        "ph": "M",
        "pid": process,
        "tid": track,
        "args": {"name": name},
    }
