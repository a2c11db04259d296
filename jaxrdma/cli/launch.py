"""`jaxrdma launch`: start a job on this machine."""

import argparse
import os
from pathlib import Path
from typing import Any

from jaxrdma.cli import EXIT_CODES
from jaxrdma.cluster import TRANSPORTS, jaxrdma_settings
from jaxrdma.errors import ConfigError
from jaxrdma.launch import LaunchPlan, launch

DESCRIPTION = "Start a coordinator, servers, and workers that run a script, on this machine, and wait for their end."
EPILOG = f"""examples:
  jaxrdma launch --servers 1 --workers 2 train.py --epochs 3
  jaxrdma launch --servers 2 --workers 2 --transport tcp --ordered -m my_package.train

Output lines carry the name of the process they come from. Standard input is empty for all. Ctrl-C reaches the workers
first; nothing is left 3 seconds later. If one process fails, the others have 5 seconds to tell their own side of it.
Of the environment, JAXRDMA_CONNECT_TIMEOUT, JAXRDMA_HEARTBEAT_TIMEOUT, JAXRDMA_PARTITION_BYTES, JAXRDMA_ORDERED,
JAXRDMA_TRANSPORT and JAXRDMA_SPIN_US reach every process. Servers never see a GPU.

{EXIT_CODES}
A process that fails first gives the launcher its own exit code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `jaxrdma launch`."""
    parser.add_argument("--servers", type=int, default=1, metavar="S", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=1, metavar="W", help="default: %(default)s")
    parser.add_argument("--transport", choices=TRANSPORTS, help="how tensors travel; default: auto")
    parser.add_argument(
        "--ordered",
        action="store_true",
        default=None,
        help="sum in the workers' order: the same bits on every run",
    )
    parser.add_argument(
        "--partition-bytes", type=int, metavar="N", help="upper bound of a partition"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="run a module"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="script.py ...", help="run a script"
    )


def run(args: argparse.Namespace) -> int:
    """Launch, and wait for the end."""
    if args.module:
        command = ["-m", *args.module]
    else:
        command = [a for i, a in enumerate(args.script) if i or a != "--"]
        if not command:
            raise ConfigError("which script? Give script.py, or -m module, after the options.")
        if not Path(command[0]).exists():
            raise ConfigError(f"there is no script {command[0]!r} in {Path.cwd()}")
    given: dict[str, Any] = {
        "transport": args.transport,
        "ordered": args.ordered,
        "partition_bytes": args.partition_bytes,
    }
    passed_on = (*given, "connect_timeout", "heartbeat_timeout", "spin_us")
    settings = {
        name: value for name, value in jaxrdma_settings(os.environ).items() if name in passed_on
    }
    settings |= {name: value for name, value in given.items() if value is not None}
    return launch(LaunchPlan(args.servers, args.workers, tuple(command), settings))
