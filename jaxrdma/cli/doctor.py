"""`jaxrdma doctor`: check what this machine needs for RDMA."""

import argparse
import json
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from jaxrdma import doctor
from jaxrdma.cli import make_console
from jaxrdma.cli.devices import verbs_settings
from jaxrdma.errors import ConfigError

_NEEDS = doctor.Needs()
_STYLES = {doctor.OK: "green", doctor.WARNING: "yellow", doctor.FAILED: "bold red"}

DESCRIPTION = "Check what this machine needs for RDMA, and say what to do about what is missing."
EPILOG = """examples:
  jaxrdma doctor
  jaxrdma doctor --workers 64 --servers 8 --parameter-bytes 28000000000
  jaxrdma doctor --json

The sizes are of the job; what must be locked in memory follows from them:
  on a server   workers x (slots x (partition bytes + 64) + 256 KiB) + 2 x parameter bytes / servers
  on a worker   servers x (slots x (partition bytes + 64) + 256 KiB) + parameter bytes
Only this machine is looked at, and nothing is changed. The limit of locked memory is that of this process: run it as,
and from where, the job will be run.

exit codes:
  0      nothing failed; there may be warnings
  1      something failed
  2      the arguments or the environment are wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `jaxrdma doctor`."""
    for name, metavar, text in (
        ("workers", "W", "of the job"),
        ("servers", "S", "of the job"),
        ("slots", "N", "landing slots of a worker on each server"),
        ("partition_bytes", "N", "upper bound of a partition"),
        ("parameter_bytes", "N", "all parameters of the model together"),
    ):
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=int,
            default=getattr(_NEEDS, name),
            metavar=metavar,
            help=f"{text}; default: %(default)s",
        )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Look, judge, show."""
    numbers = {name: getattr(args, name) for name in vars(_NEEDS)}
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number}: expected at least 1")
    checks = doctor.examine(doctor.gather(), doctor.Needs(**numbers), verbs_settings())
    failed = any(check.outcome == doctor.FAILED for check in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(c) for c in checks]}, indent=2))
        return int(failed)
    table = Table(title="this machine, for RDMA")
    table.add_column("check", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    # A path is broken rather than cut.
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for check in checks:
        table.add_row(
            check.name, Text(check.outcome, _STYLES[check.outcome]), check.found, check.advice
        )
    make_console().print(table)
    return int(failed)
