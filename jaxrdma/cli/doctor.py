"""`jaxrdma doctor`: check what this machine needs for RDMA, or this one and another as a pair."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from jaxrdma import doctor
from jaxrdma.cli import make_console, read_secret
from jaxrdma.cli.devices import verbs_settings
from jaxrdma.cluster import TRANSPORTS, check_listen, is_loopback, jaxrdma_settings, parse_address
from jaxrdma.errors import ConfigError

_NEEDS = doctor.Needs()
_STYLES = {doctor.OK: "green", doctor.WARNING: "yellow", doctor.FAILED: "bold red"}

DESCRIPTION = "Check what this machine needs for RDMA, and say what to do about what is missing."
EPILOG = """examples:
  jaxrdma doctor
  jaxrdma doctor --workers 64 --servers 8 --parameter-bytes 28000000000
  jaxrdma doctor --json
  jaxrdma doctor --listen 7777                  # on one machine, and on the other:
  jaxrdma doctor --peer 10.0.0.2:7777           # the way there, both devices, latency and bandwidth
  jaxrdma doctor --peer 10.0.0.2:7777 --transport tcp

The sizes are of the job; what must be locked in memory follows from them:
  on a server   workers x (slots x (partition bytes + 64) + 256 KiB) + 2 x parameter bytes / servers
  on a worker   servers x (slots x (partition bytes + 64) + 256 KiB) + parameter bytes
Nothing is changed. The limit of locked memory is that of this process: run it as,
and from where, the job will be run.

A pair is checked with the secret of JAXRDMA_SECRET or --secret-file on both machines; loopback may go without. --listen
without a host means every address if there is a secret, else loopback. It ends after one visit, and shows its findings.
The probe runs over the transport itself, for a few seconds: as much as the link takes.

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
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--peer", metavar="HOST:PORT", help="check the pair, with --listen there")
    pair.add_argument("--listen", metavar="[HOST:]PORT", help="be the other half of the pair")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="of the probe to a peer; default: verbs if both can"
    )
    parser.add_argument("--secret-file", metavar="FILE", help="a file with the secret of the pair")


def run(args: argparse.Namespace) -> int:
    """Look, judge, show."""
    if args.peer or args.listen:
        return run_pair(args)
    if args.transport or args.secret_file:
        raise ConfigError("--transport and --secret-file belong to --peer or --listen")
    numbers = {name: getattr(args, name) for name in vars(_NEEDS)}
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number}: expected at least 1")
    checks = doctor.examine(doctor.gather(), doctor.Needs(**numbers), verbs_settings())
    return show(checks, "this machine, for RDMA", args.json)


def run_pair(args: argparse.Namespace) -> int:
    """One half of a check of two machines."""
    from jaxrdma import pair
    from jaxrdma.control import say_on_stderr

    settings = jaxrdma_settings(os.environ)
    secret = read_secret(args.secret_file) or settings.get("secret", "")
    if args.listen:
        if args.transport:
            raise ConfigError("--transport is for the other half, with --peer")
        address = args.listen
        if ":" not in address:
            address = f"{'0.0.0.0' if secret else '127.0.0.1'}:{address}"
        check_listen(address, secret)
        checks = pair.listen(address, secret, verbs_settings(), say_on_stderr)
        return show(checks, "this machine and its visitor, as that one found", args.json)
    host, _ = parse_address(args.peer, "peer")
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"--peer {args.peer} needs a secret: set JAXRDMA_SECRET, or --secret-file, alike on both"
        )
    transport = args.transport or settings.get("transport", "auto")
    checks = pair.visit(args.peer, transport, secret, verbs_settings())
    return show(checks, f"this machine and {args.peer}", args.json)


def show(checks: Sequence[doctor.Check], title: str, as_json: bool) -> int:
    """Print them; the exit code is 1 if one failed."""
    failed = any(check.outcome == doctor.FAILED for check in checks)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(c) for c in checks]}, indent=2))
        return int(failed)
    table = Table(title=title)
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
