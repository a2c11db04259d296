"""The bench itself: peers that know nothing of ours move bytes between two devices."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.verbs.network import bytes_sent

PEER = Path(__file__).parent / "peers" / "pyverbs_rc.py"
# The system's interpreter, for which Debian packages pyverbs; ours must not tell it where to look for modules.
SYSTEM_PYTHON = ["/usr/bin/python3", "-I"]


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], seconds: float) -> str:
    """Its output, once it ended well; it is gone in any case."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    return output


def wait_for_line(process: subprocess.Popen[str], text: str, seconds: float) -> None:
    """Reads its output up to a line with `text`; it is killed if that does not come."""
    assert process.stdout is not None
    ended = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    ended.start()
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if text in line:
                return
        pytest.fail(f"did not say {text!r}, but: {''.join(seen)}")
    finally:
        ended.cancel()
        ended.join()


def ipv4_gid(device: str) -> str:
    """The index of the entry that carries an IPv4 address, which is RoCE v2 on rdma_rxe."""
    gids = Path(f"/sys/class/infiniband/{device}/ports/1/gids")
    for index in range(16):
        if (gids / str(index)).read_text().startswith("0000:0000:0000:0000:0000:ffff:"):
            return str(index)
    pytest.fail(f"{device} has no address")


@pytest.mark.timeout(120)
def test_pyverbs_writes_and_reads_between_two_devices() -> None:
    before = bytes_sent("v0")
    output = finish(start(*SYSTEM_PYTHON, str(PEER), "loop", "rxe0", "rxe1"), 100)
    assert output.splitlines()[-1] == "verified", output
    assert bytes_sent("v0") - before > 8 * 65536, "the bytes took another way than the cable"


@pytest.mark.timeout(150)
def test_perftest_writes_between_two_devices() -> None:
    # An emulated processor does not tell its clock rate.
    common = ["--size", "65536", "--iters", "200", "--CPU-freq"]
    before = bytes_sent("v0")
    server = start("stdbuf", "-oL", "ib_write_bw", "-d", "rxe1", "-x", ipv4_gid("rxe1"), *common)
    try:
        wait_for_line(server, "Waiting for client to connect", 60)
        client = start("ib_write_bw", "-d", "rxe0", "-x", ipv4_gid("rxe0"), *common, "127.0.0.1")
        finish(client, 70)
    finally:
        finish(server, 10)
    assert bytes_sent("v0") - before > 200 * 65536, "the bytes took another way than the cable"
