"""The bench by hand: `python -m tests.guest --help`."""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tests.guest.guest import CACHE, HERE, Command, Guest, GuestError, missing

ROOT = HERE.parents[1]
NATIVE_TESTS = ROOT / "build" / "native" / "release" / "jaxrdma_native_tests"
RESULTS = ROOT / "build" / "verbs"
TIMED_OUT, DIED = 124, 125  # as timeout(1) has it, and the next one
NATIVE_S, PYTEST_S = 900.0, 900.0

DESCRIPTION = """\
Runs commands in a virtual machine that has Soft-RoCE devices (rdma_rxe): real verbs, without hardware. It boots
Debian's kernel on the files of this machine. It sees them at their places and cannot change them: all that it writes
is thrown away, but for what goes to /out. The processor is emulated: expect a tenth of the speed."""

RUN = """\
Runs COMMAND in this folder, as root, in one guest with rxe0, rxe1 ..., two each on one cable (tests/guest/devices.sh
tells more), and passes its output on. The exit status is the command's; 124: it took too long; 125: the guest died.

    python -m tests.guest run -- .venv/bin/pytest tests/verbs -k perftest
    python -m tests.guest run --out /tmp/out -- bash -c 'rdma link; ibv_devinfo >/out/devices'"""


def set_up() -> str:
    """Makes what is missing; what is missing still."""
    process = subprocess.run(
        [str(HERE / "setup"), str(CACHE)], stderr=subprocess.PIPE, text=True, check=False
    )
    if process.returncode != 0:
        return " ".join(process.stderr.split())
    return "; ".join(missing())


def status_of(command: Command) -> int:
    """As a shell gives it."""
    status = command.exit_status
    assert status is not None
    return 128 - status if status < 0 else status


def environment(wanted: Sequence[str] = ()) -> dict[str, str]:
    """Where programs are found, as here, and what the user names."""
    passed = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    passed["HOME"] = "/root"
    for one in wanted:
        name, equals, value = one.partition("=")
        passed[name] = value if equals else os.environ.get(name, "")
    return passed


def run(options: argparse.Namespace) -> int:
    with Guest(options.out, memory=options.memory, time_limit=options.time_limit) as guest:
        guest.devices(options.devices, options.mtu)
        command = guest.start(
            options.command, folder=Path.cwd(), environment=environment(options.env), echo=True
        )
        command.wait(options.time_limit)
        return status_of(command)


def suite() -> int:
    """`make test-verbs`: what needs devices, in one guest."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for old in RESULTS.glob("*.xml"):
        old.unlink()
    reason = set_up()
    if reason:
        print(f"verbs tests NOT RUN: {reason}")
        return 0

    # Plugins that are not used here take half a minute to import.
    plugins = ("no:cacheprovider", "no:hypothesispytest", "no:jaxtyping")
    pytest = [sys.executable, "-m", "pytest", *(f"-p{name}" for name in plugins), "tests/verbs"]
    jobs = {"Python tests": ([*pytest, "--junitxml=/out/pytest.xml"], PYTEST_S)}
    if NATIVE_TESTS.exists():
        # What concerns the bytes of tcp alone was tested without a guest. Over several devices nothing is promised
        # about the order of writes.
        native = [str(NATIVE_TESTS), "--test-case-exclude=tcp:*"]
        # The server's engine by itself sees one connection, whatever that is made of.
        of_transport = (
            "--source-file=*/test_fabric.cc,*/test_verbs.cc,*/test_held.cc,*/test_worker_engine.cc"
        )
        striped = [
            "env",
            "TEST_STRIPED=1",
            native[0],
            of_transport,
            f"{native[1]},writes arrive in the order*",
        ]
        jobs = {
            "native tests": (native, NATIVE_S),
            "native tests over two devices at once": (striped, NATIVE_S),
            **jobs,
        }
    else:
        print(f"verbs: no native tests, {NATIVE_TESTS.relative_to(ROOT)} is not built")

    failed: list[str] = []
    with Guest(RESULTS, time_limit=60 + 2 * NATIVE_S + PYTEST_S) as guest:
        guest.devices(2)
        for name, (argv, limit) in jobs.items():
            print(f"verbs: {name}, in a guest", flush=True)
            command = guest.start(
                argv,
                folder=ROOT,
                environment=environment(["TEST_TRANSPORT=verbs", "TEST_RDMA_DEVICES=rxe0,rxe1"]),
                echo=True,
            )
            try:
                command.wait(limit)
            except TimeoutError as error:
                command.kill()
                failed.append(f"{name}: {error}")
                continue
            if status_of(command) != 0:
                failed.append(f"{name}: exit status {status_of(command)}")
    for failure in failed:
        print(f"verbs: FAILED: {failure}")
    return 1 if failed else 0


def check() -> int:
    reasons = missing()
    if not reasons:
        kernel = (CACHE / "modules").resolve().name
        print(
            f"this machine can run guests, with Linux {kernel} and {shutil.which('qemu-system-x86_64')}"
        )
        return 0
    for reason in reasons:
        print(reason)
    print(f"python -m tests.guest setup makes what is missing, as root on Debian, in {CACHE}")
    return 1


def terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.guest", description=DESCRIPTION, formatter_class=layout
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="setup|check|run|suite")
    commands.add_parser("setup", help="install packages and fetch a kernel, where that is missing")
    commands.add_parser("check", help="whether this machine can run guests, and what is missing")
    commands.add_parser("suite", help="what make test-verbs runs; results in build/verbs/")
    run_parser = commands.add_parser(
        "run", help="run one command in a guest", description=RUN, formatter_class=layout
    )
    run_parser.add_argument(
        "--time-limit", type=float, default=600.0, metavar="S", help="seconds in all (600)"
    )
    run_parser.add_argument(
        "--devices", type=int, default=2, metavar="N", help="how many rxe devices (2)"
    )
    run_parser.add_argument(
        "--mtu", type=int, default=9000, metavar="M", help="of their network devices (9000)"
    )
    run_parser.add_argument(
        "--out", type=Path, metavar="DIR", help="its /out; its console.log stays there too"
    )
    run_parser.add_argument(
        *("-e", "--env"),
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="an environment variable; of ours, PATH and LANG are passed alone",
    )
    run_parser.add_argument("--memory", default="3G", help="of the guest; default: %(default)s")
    run_parser.add_argument("command", nargs="+", metavar="command", help="after --")
    options = parser.parse_args()

    # So that every context is left. A shell starts what runs in its background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)
    try:
        match options.what:
            case "setup":
                reason = set_up()
                if reason:
                    print(reason, file=sys.stderr)
                return 1 if reason else 0
            case "check":
                return check()
            case "suite":
                return suite()
            case _:
                return run(options)
    except TimeoutError as error:
        print(f"{shlex.join(sys.argv[1:])}: {error}", file=sys.stderr)
        return TIMED_OUT
    except GuestError as error:
        print(error, file=sys.stderr)
        return DIED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
