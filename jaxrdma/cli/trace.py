"""`jaxrdma trace`: what the last steps of a job waited for."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrdma.cli import job_asked, make_console
from jaxrdma.control import collect_traces
from jaxrdma.critical import Step, critical_paths
from jaxrdma.dump import Dump, latest, newest, read_folder
from jaxrdma.errors import ConfigError
from jaxrdma.timeline import PARTS, merge, slices

if TYPE_CHECKING:
    from rich.table import Table

_TIMEOUT_SECONDS = 10.0
_STEPS = 20

DESCRIPTION = "Show what the last steps of a job waited for: which worker, server, partition and part made each late."
EPILOG = """examples:
  jaxrdma trace --coordinator 127.0.0.1:7000                          # of a job that runs
  jaxrdma trace --coordinator 127.0.0.1:7000 --steps 5 --out trace.json
  jaxrdma trace runs/traces                                           # of files that its processes left
  jaxrdma trace runs/traces --picture stall.png
  jaxrdma trace runs/traces --json | jq '.steps[] | .late'

Every process remembers the last few thousand things that happened to partitions. Of a job that runs they are asked for
from any machine that reaches the coordinator, with the job's secret (JAXRDMA_SECRET or --secret-file) and name
(JAXRDMA_JOB), and, where it speaks TLS, with JAXRDMA_TLS_CERT, JAXRDMA_TLS_KEY and JAXRDMA_TLS_CA; no step waits for
it. With JAXRDMA_TRACE_DIR set, workers and servers write them to files in that folder on SIGUSR1, and when they or the
job fail.

--out writes Chrome trace events: open the file at https://ui.perfetto.dev, which keeps it on your machine. Times of
different machines are brought onto the coordinator's clock.

exit codes:
  0      there is a table
  1      the job cannot be reached, or refuses; or nothing is recorded of any whole step; the reason is printed
  2      the arguments, the environment or the files are wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `jaxrdma trace`."""
    parser.add_argument("folder", nargs="?", metavar="DIR", help="a folder of JAXRDMA_TRACE_DIR")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the coordinator listens")
    parser.add_argument("--job", help="the job's name")
    parser.add_argument("--secret-file", metavar="FILE", help="a file with the job's secret")
    parser.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N", help="the last N; default: %(default)s"
    )
    parser.add_argument("--out", metavar="FILE", help="write Chrome trace events, for Perfetto")
    parser.add_argument("--picture", metavar="FILE", help="write a picture, as .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="for programs, instead of the table")


def run(args: argparse.Namespace) -> int:
    """Collect, put on one clock, explain, show."""
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: expected at least 1")
    dumps, missing = _collect(args)
    timeline = merge(dumps)
    steps = timeline.steps(args.steps)
    paths = critical_paths(timeline, steps)
    if args.out is not None or args.picture is not None:
        found = slices(timeline, steps)
        if args.out is not None:
            from jaxrdma.perfetto import trace_events

            _write(args.out, json.dumps(trace_events(dumps, found, paths)))
        if args.picture is not None:
            from jaxrdma.picture import draw

            draw(found, paths, args.picture)
    for name in missing:
        print(f"jaxrdma trace: {name} did not answer in {_TIMEOUT_SECONDS:g} s", file=sys.stderr)
    if args.json:
        print(json.dumps(as_json(dumps, missing, paths, len(steps)), indent=2))
    else:
        console = make_console()
        console.print(render(paths))
        if len(paths) < len(steps):
            console.print(
                f"Of {len(steps) - len(paths)} more steps not all was recorded, or not any more."
            )
    if not paths:
        print("jaxrdma trace: nothing is recorded of any whole step", file=sys.stderr)
    return 0 if paths else 1


def _collect(args: argparse.Namespace) -> tuple[list[Dump], list[str]]:
    if args.folder is not None:
        if args.coordinator is not None:
            raise ConfigError("a folder or --coordinator, not both: which job is meant?")
        # One more, of which only the end is needed.
        dumps = [
            _cut(dump, newest(dump.records, args.steps + 1))
            for dump in read_folder(Path(args.folder))
        ]
        return dumps, []
    job, tls = job_asked(args, "a folder with its files, or --coordinator")
    dumps, missing = collect_traces(*job, _TIMEOUT_SECONDS, args.steps + 1, tls)
    return latest(dumps), missing


def _cut(dump: Dump, records: bytes) -> Dump:
    import msgspec

    return msgspec.structs.replace(dump, records=records)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from None


def as_json(dumps: list[Dump], missing: list[str], paths: list[Step], steps: int) -> dict[str, Any]:
    """What `--json` prints; times in seconds."""
    processes = [
        {
            "name": dump.name,
            "host": dump.host,
            "pid": dump.pid,
            "reason": dump.reason,
            "clock_offset": dump.offset_ns / 1e9,
            "clock_error": dump.error_ns / 1e9 if dump.error_ns >= 0 else None,
            "records_added": dump.added,
            "records_lost": dump.lost,
        }
        for dump in dumps
    ]
    return {
        "processes": processes,
        "missing": missing,
        "steps": [asdict(path) for path in paths],
        "incomplete": steps - len(paths),
    }


def render(paths: list[Step]) -> "Table":
    """A row for each step: how long, what made it late, and how long its path was in each part; in ms."""
    from rich.table import Table

    table = Table(caption="ms of each step's critical path", caption_justify="left")
    several = len({path.flow for path in paths}) > 1
    numbers = (*(["model"] if several else []), "step", "ms")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("made late by", overflow="fold")
    for name in ("for", *PARTS):
        table.add_column(name, justify="right", no_wrap=True)
    for path in paths:
        model = [str(path.flow)] if several else []
        lengths = [_ms(path.parts[part]) if part in path.parts else "-" for part in PARTS]
        row = [str(path.step), _ms(path.seconds), path.text, _ms(path.late_seconds), *lengths]
        table.add_row(*model, *row)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
