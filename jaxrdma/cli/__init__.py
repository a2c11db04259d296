"""The command `jaxrdma`: one small module per subcommand, imported only when it is asked for.

A module of a subcommand has `DESCRIPTION`, `EPILOG`, `add_arguments(parser)` and `run(args) -> int`.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrdma.errors import ConfigError, JaxRdmaError

if TYPE_CHECKING:
    from rich.console import Console

    from jaxrdma.cluster import TlsFiles

# name: (module, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "launch": ("jaxrdma.cli.launch", "start servers and workers of a script on this machine"),
    "coordinator": ("jaxrdma.cli.coordinator", "run the coordinator of a job by hand"),
    "server": ("jaxrdma.cli.server", "run one server of a job by hand"),
    "status": ("jaxrdma.cli.status", "show how a job is, process by process"),
    "trace": ("jaxrdma.cli.trace", "show what the last steps waited for, and for whom"),
    "devices": ("jaxrdma.cli.devices", "show this machine's RDMA devices, and which is used"),
    "doctor": ("jaxrdma.cli.doctor", "check what this machine needs for RDMA, and say what to do"),
}

EXIT_CODES = """exit codes:
  0      the job ended in good order
  1      it failed; the last line of output says who failed first, and why
  2      the arguments or the environment are wrong
  128+n  ended by signal n, e.g. 130 on Ctrl-C"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand named first in `argv`, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Only the module that is needed is imported: a launcher must not wait for what a server needs.
    wanted = next((a for a in arguments if not a.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="jaxrdma",
        description="Parameter-server training for JAX.",
        epilog=f"`jaxrdma COMMAND --help` shows examples.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module: Any = None
    for name, (path, text) in COMMANDS.items():
        if name != wanted:
            commands.add_parser(name, help=text)
            continue
        module = importlib.import_module(path)
        chosen = commands.add_parser(
            name,
            help=text,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(chosen)
    args = parser.parse_args(arguments)
    try:
        return module.run(args)
    except ConfigError as error:
        print(f"jaxrdma {args.command}: error: {error}", file=sys.stderr)
        return 2
    except JaxRdmaError as error:
        print(f"jaxrdma {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough, e.g. `head`; at exit Python would try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def make_console() -> "Console":
    """Where tables go. Text is shown as it is: an IPv6 address is neither markup nor an emoji."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a file or a pipe has no width of its own
    return console


def read_secret(path: str | None) -> str | None:
    """The secret in the file `path`, without the white space around it; None without a path.

    **Raises:** `ConfigError` if it cannot be read or is empty.
    """
    if path is None:
        return None
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secret file {path}: {error}") from None
    if not secret:
        raise ConfigError(f"secret file {path} is empty")
    return secret


def job_asked(
    args: argparse.Namespace, which: str
) -> "tuple[tuple[str, str, str], TlsFiles | None]":
    """The job that a command is to ask, by option or environment: the coordinator's address, the secret, the name; and
    the files to speak TLS with.

    **Raises:** `ConfigError`, with `which` to do, if no coordinator is named; as `read_secret`.
    """
    from jaxrdma.cluster import jaxrdma_settings, parse_address, tls_files

    given = {
        "coordinator": args.coordinator,
        "job": args.job,
        "secret": read_secret(args.secret_file),
    }
    values = jaxrdma_settings(os.environ) | {k: v for k, v in given.items() if v is not None}
    coordinator = values.get("coordinator")
    if not coordinator:
        raise ConfigError(f"which job? Give {which}, or JAXRDMA_COORDINATOR.")
    parse_address(coordinator, "coordinator")
    job = (coordinator, values.get("secret", ""), values.get("job", "jaxrdma"))
    return job, tls_files(values)
