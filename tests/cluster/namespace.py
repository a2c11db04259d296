"""`Namespace`: another network namespace, as another machine on one cable with this one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

# Of documentation; machines may have 192.0.2.0/24. What is BEYOND is reached through the other machine.
HERE, THERE = "198.51.100.1", "198.51.100.2"
BEYOND = "203.0.113.0/24"
LOSSY = Path(__file__).parent / "lossy.py"


class Namespace:
    """The other machine, at THERE; this one is HERE to it. `within`: how a command begins that runs there."""

    def __init__(self, ip: str, name: str, near: str, cable: str) -> None:
        self._ip = ip
        self._name = name
        self._near = near
        self._cable = cable
        self.within = (ip, "netns", "exec", name)

    def ip(self, command: str) -> None:
        """The command `ip`, over there."""
        subprocess.run([self._ip, "-n", self._name, *command.split()], check=True)

    def pull_the_cable(self) -> None:
        self.ip(f"link set {self._cable} down")

    def plug_the_cable(self) -> None:
        self.ip(f"link set {self._cable} up")

    @contextmanager
    def lossy(self, per_mille: int) -> Iterator[None]:
        """The cable loses so many of a thousand packets, in either direction. Skips the test where it cannot."""
        with ExitStack() as stack:
            for within, device in (((), self._near), (self.within, self._cable)):
                process = stack.enter_context(
                    subprocess.Popen(
                        [*within, sys.executable, str(LOSSY), device, str(per_mille)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                stack.callback(process.communicate, "")  # the end of its input
                assert process.stdout is not None
                said = process.stdout.readline().strip()
                if said != "lossy":
                    pytest.skip(f"not run: no packets can be lost here: {said}")
            yield


@contextmanager
def make_namespace() -> Iterator[Namespace]:
    """Skips the test where there can be none."""
    ip = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if os.geteuid() != 0 or ip is None:
        pytest.skip("not run: another network namespace needs root, and the command ip")
    name = f"jaxrdma-{os.getpid()}"
    near, far = f"jr{os.getpid()}a", f"jr{os.getpid()}b"
    try:
        for command in (
            f"netns add {name}",
            f"link add {near} type veth peer name {far} netns {name}",
            f"address add {HERE}/30 dev {near}",
            f"link set {near} up",
            f"-n {name} address add {THERE}/30 dev {far}",
            f"-n {name} link set {far} up",
            f"-n {name} link set lo up",
            f"route add {BEYOND} via {THERE}",
            f"netns exec {name} sh -c echo\t1\t>/proc/sys/net/ipv4/ip_forward",
        ):
            words = [word.replace("\t", " ") for word in command.split(" ")]
            made = subprocess.run([ip, *words], capture_output=True, text=True)
            if made.returncode != 0:
                pytest.skip(f"not run: no network namespaces here: {made.stderr.strip()}")
        yield Namespace(ip, name, near, far)
    finally:
        for command in (f"link del {near}", f"netns del {name}"):
            subprocess.run([ip, *command.split()], capture_output=True)
