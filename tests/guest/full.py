"""A job of two machines, with JAX, through `jaxrdma launch` on both. Minutes long, so not a test; run from any folder:

python tests/guest/full.py trains   trains over verbs; the cable is pulled for 3 s in the middle; same bits as alone
python tests/guest/full.py cut      the cable is pulled for 120 s: both launchers name the link in time
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.guest.guest import ENDS, Command, Wire

ROOT = Path(__file__).resolve().parents[2]
STEPS = 80
SHARES = {"a": "coordinator,server:0,worker:0", "b": "worker:1"}
# For three processes with JAX to be imported and compile, on one emulated processor of a busy machine.
START_S = 500.0
# The heartbeat timeout, after which the link must have been named; and for the launchers to end everybody.
NAMED_S, END_S = 12.0, 20.0
CUT_S = 120.0


def launch(wire: Wire, steps: int) -> dict[str, Command]:
    """Both launchers; all workers have begun."""
    environment = {
        "JAXRDMA_SECRET": "of two",
        "JAXRDMA_CONNECT_TIMEOUT": f"{START_S:.0f}",
        "PATH": os.environ["PATH"],
        "HOME": "/root",
    }
    totals = ["--servers", "1", "--workers", "2", "--transport", "verbs", "--ordered"]
    address = ["--coordinator", f"{ENDS['a'].address}:7000"]
    command = [sys.executable, "-m", "jaxrdma", "launch", *totals, *address, "--here"]
    script = ["tests/guest/train.py", str(steps), "0.05"]
    launchers = {
        name: guest.start(
            [*command, SHARES[name], *script], folder=ROOT, environment=environment, echo=True
        )
        for name, guest in (("b", wire.b), ("a", wire.a))
    }
    for launcher in launchers.values():
        launcher.wait_for(r"worker \d +\| step 20$", START_S)
    return launchers


def trains(wire: Wire) -> None:
    launchers = launch(wire, STEPS)
    wire.pull("b")
    time.sleep(3)
    wire.plug("b")
    for launcher in launchers.values():
        assert launcher.wait(200) == 0
    output = launchers["a"].output + launchers["b"].output
    digests = re.findall(r"(?:parameters|reference) (\w+)", output)
    assert len(digests) == 3 and len(set(digests)) == 1, digests
    assert len(re.findall(r"transport .*'verbs, rxe0 port 1", output)) == 2
    print("same bits on both workers and in one process alone")


def cut(wire: Wire) -> None:
    launchers = launch(wire, 1_000_000)
    begin = time.monotonic()
    wire.pull("b")
    for name, launcher in launchers.items():
        peer = ENDS["a" if name == "b" else "b"].address
        launcher.wait_for(
            rf"the link between rxe0 port 1 here and {re.escape(peer)}", NAMED_S + END_S
        )
        print(f"{name} named the link after {time.monotonic() - begin:.1f} s")
    for name, launcher in launchers.items():
        assert launcher.wait(END_S) == 1
        print(f"{name} ended after {time.monotonic() - begin:.1f} s")
    time.sleep(max(0.0, begin + CUT_S - time.monotonic()))
    wire.plug("b")
    for guest in (wire.a, wire.b):
        left = guest.start(
            ["pgrep", "-af", "jaxrdma|train[.]py"], environment={"PATH": os.environ["PATH"]}
        )
        assert left.wait(END_S) == 1, left.output
    print(f"the cable was back after {CUT_S:.0f} s, and nothing of the job was left")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["trains", "cut"])
    what = parser.parse_args().what
    with Wire(memory="4G", time_limit=900) as wire:
        (trains if what == "trains" else cut)(wire)


if __name__ == "__main__":
    main()
