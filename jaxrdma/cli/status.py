"""`jaxrdma status`: how a job is, process by process."""

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

import msgspec
from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from jaxrdma.cli import job_asked, make_console
from jaxrdma.control import JobStatus, ProcessStatus, observe
from jaxrdma.errors import ConfigError, ConnectError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_TIMEOUT_SECONDS = 10.0
_STYLES = {"failed": "bold red", "training": "green"}
_NUMBERS = ("step", "s/step", "in MB/s", "out MB/s", "heard", "accepted", "dropped")
_COLUMNS = ("process", "host", "pid", "state", "at", "for", *_NUMBERS)
# What all of them need, without the last two and with them.
_WIDE, _WIDEST = 100, 130

DESCRIPTION = "Show how a job is: every process, what it does, how fast, and who waits for whom."
EPILOG = """examples:
  jaxrdma status --coordinator 127.0.0.1:7000
  JAXRDMA_SECRET=... jaxrdma status --coordinator 10.0.0.1:7000 --watch        # until the job ends
  JAXRDMA_SECRET=... jaxrdma status --coordinator 10.0.0.1:7000 --json | jq '.processes[].step'

From any machine that reaches the coordinator, with the job's secret (JAXRDMA_SECRET or --secret-file) and name
(JAXRDMA_JOB), and, where it speaks TLS, with JAXRDMA_TLS_CERT, JAXRDMA_TLS_KEY and JAXRDMA_TLS_CA. The coordinator
alone is asked, and no step waits for it. Of a job that `jaxrdma launch` started without --coordinator, only its own
processes know the address and the secret.

Times and rates are those of the last heartbeats, which are 1 s apart while something changes and else 7.5.

exit codes:
  0      the job starts, trains, or ends well
  1      it has failed, cannot be reached, or refuses; the reason is printed
  2      the arguments or the environment are wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `jaxrdma status`."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the coordinator listens")
    parser.add_argument("--job", help="the job's name")
    parser.add_argument("--secret-file", metavar="FILE", help="a file with the job's secret")
    parser.add_argument(
        "--json", action="store_true", help="for programs; with --watch a line each"
    )
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=1.0,
        metavar="S",
        help="again every S seconds, until the job ends; default: 1",
    )


def run(args: argparse.Namespace) -> int:
    """Ask, show, and perhaps again."""
    job, tls = job_asked(args, "--coordinator")
    if args.watch is not None and not 0 < args.watch < float("inf"):
        raise ConfigError(f"--watch {args.watch:g}: expected a number of seconds above 0")

    def ask() -> JobStatus:
        return observe(*job, _TIMEOUT_SECONDS, tls)

    status = ask()
    if args.watch is not None:
        return _watch(status, ask, args.watch, args.json)
    if args.json:
        print(json.dumps(as_json(status), indent=2))
    else:
        console = make_console()
        console.print(*render(status, console.width), sep="\n")
    return 1 if status.phase == "failed" else 0


def as_json(status: JobStatus) -> dict[str, Any]:
    """What `--json` prints."""
    return msgspec.to_builtins(status)


def _watch(status: JobStatus, ask: Any, seconds: float, as_lines: bool) -> int:
    from rich.console import Group
    from rich.live import Live

    console = make_console()
    # Elsewhere than on a terminal there is nothing to be overwritten.
    live = (
        Live(console=console, auto_refresh=False) if console.is_terminal and not as_lines else None
    )
    with live or console:
        while True:
            if as_lines:
                print(json.dumps(as_json(status)), flush=True)
            elif live is not None:
                live.update(Group(*render(status, console.width)), refresh=True)
            else:
                console.print(*render(status, console.width), sep="\n")
            if status.phase == "failed":
                return 1
            time.sleep(seconds)
            try:
                status = ask()
            except ConnectError:
                if not as_lines:
                    _say(console, live, "the job has ended")
                return 0


def _say(console: "Console", live: Any, text: str) -> None:
    (live.console if live is not None else console).print(text)


def render(status: JobStatus, width: int = _WIDE) -> "list[RenderableType]":
    """A head line, a table of the processes, the models, and for whom the job waits.

    Where `width` has not the columns for all of the table, what tells most is kept.
    """
    head = Text(f"job {status.job}: ")
    head.append(status.phase, _STYLES.get(status.phase, "yellow"))
    head.append(f" for {_time(status.seconds)}")
    if status.attempt:
        head.append(f", attempt {status.attempt + 1}")
    if status.transport:
        head.append(f", transport {status.transport}: {status.why}")
    if status.followers:
        head.append(f", {status.followers} follow")
    if refused := status.refused + sum(process.refused for process in status.processes):
        head.append(f", {refused} strangers turned away")
    counted = any(each.accepted >= 0 for each in status.processes)
    left_out = set() if counted else {"accepted", "dropped"}
    if width < _WIDE:
        left_out |= {"host", "pid", "heard"} | ({"in MB/s", "out MB/s"} if counted else set())
    elif counted and width < _WIDEST:
        left_out |= {"host", "pid"}
    table = Table(box=HEAVY_HEAD if width >= _WIDE else SIMPLE_HEAD)
    names = [name for name in _COLUMNS if name not in left_out]
    for name in names:
        number = name in _NUMBERS
        table.add_column(
            name,
            justify="right" if number else "left",
            no_wrap=number or name == "process",
            overflow="fold",
        )
    for cells in map(_cells, status.processes):
        table.add_row(*(cells[name] for name in names))
    kinds = {
        "average": ", gradients averaged only",
        "ema": ", moving averages",
        "table": ", of a table",
    }
    models = [
        f"model {m.flow}: {m.state}, {m.policy}, {m.parameters:,} parameters in {m.leaves} leaves"
        + kinds.get(m.mode, "")
        for m in status.models
    ]
    spare = (
        [f"not there yet: {', '.join(f'worker {i}' for i in status.spare)}"] if status.spare else []
    )
    return [head, table, *models, *spare, *([status.text] if status.text else [])]


def _cells(process: ProcessStatus) -> dict[str, str]:
    wait = process.wait
    return {
        "process": process.name,
        "host": process.host,
        "pid": str(process.pid),
        "state": process.state or "there",
        "at": process.doing if wait is None else f"server {wait.server} ({wait.stage})",
        "for": _time(process.seconds),
        "step": str(process.step) if process.step >= 0 else "-",
        "s/step": f"{process.step_seconds:.3g}" if process.step_seconds else "-",
        "in MB/s": f"{process.received / 1e6:.1f}",
        "out MB/s": f"{process.sent / 1e6:.1f}",
        "heard": f"{process.silent:.0f} s ago",
        "accepted": str(process.accepted) if process.accepted >= 0 else "-",
        "dropped": str(process.dropped) if process.dropped >= 0 else "-",
    }


def _time(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
