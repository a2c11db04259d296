"""A virtual machine with Soft-RoCE devices, on the files of this one: `Guest`, and two of them on a `Wire`.

```
with Guest() as guest:
    guest.devices(2)
    assert guest.run("ibv_devinfo -d rxe1") == 0

with Wire() as wire:
    server = wire.b.start(["ib_write_bw", "-d", "rxe0"])
    wire.pull("b")
```

QEMU boots Debian's kernel on the root file system of this machine: read-only, below a layer that is thrown away. A
command in the guest finds everything at its usual place; what shall stay goes to `/out`. QEMU needs neither KVM nor
root, and reaches no network. It dies with the thread that started it.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
QEMU = "qemu-system-x86_64"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrdma-guest"
# Limits, for machines that have other work too: an idle one takes a tenth of either.
BOOT_S = 120.0
SET_UP_S = 100.0
TAIL = 30  # lines of the console that an error shows


class GuestError(Exception):
    """A guest did not do what it was told: it died, or a command of its set-up failed."""


def missing() -> list[str]:
    """What keeps this machine from running guests, one sentence each; empty if nothing does."""
    found = [
        f"{tool} is not installed"
        for tool in (QEMU, "setpriv", "rdma", "ib_write_bw", "ibv_devinfo")
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None
    ]
    for name in ("vmlinuz", "modules", "initramfs.gz"):
        if not (CACHE / name).exists():
            found.append(f"{CACHE / name} is missing")
    if not found:
        oldest = (CACHE / "initramfs.gz").stat().st_mtime
        if any((HERE / source).stat().st_mtime > oldest for source in ("init", "make-initramfs")):
            found.append(f"{CACHE / 'initramfs.gz'} is older than its sources")
    return found


class Command:
    """A process in a guest. Its output is read all the time, standard error with it."""

    def __init__(self, guest: "Guest", identity: int, name: str, echo: bool) -> None:
        self.guest = guest
        self.name = name
        self.exit_status: int | None = None  # negative: the signal that ended it
        self.identity = identity
        self._echo = echo
        self._output = bytearray()

    @property
    def output(self) -> str:
        with self.guest.changed:
            return self._output.decode(errors="replace")

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit status."""
        self.guest.wait_until(lambda: self.exit_status is not None, timeout, f"{self.name} to end")
        assert self.exit_status is not None
        return self.exit_status

    def wait_for(self, pattern: str, timeout: float = 60.0) -> re.Match[str]:
        """The first place in its output that `pattern` matches; fails at once if it ends without."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.output, re.MULTILINE)

        self.guest.wait_until(
            lambda: found() or self.exit_status is not None,
            timeout,
            f"{self.name} to say {pattern!r}",
        )
        match = found()
        if match is None:
            raise GuestError(
                f"{self.name} ended with {self.exit_status} and did not say {pattern!r}, but:\n{self.output}"
            )
        return match

    def write(self, text: str) -> None:
        """To its standard input; it must have been started with `input=True`."""
        self.guest.tell({"write": self.identity, "text": text.encode().decode("latin-1")})

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to it and to what it started."""
        self.guest.tell({"kill": self.identity, "signal": int(number)})

    def take(self, message: dict[str, Any]) -> None:
        """From the agent; only the guest's reader calls this."""
        if "output" in message:
            data = message["output"].encode("latin-1")
            self._output += data
            if self._echo:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        else:
            self.exit_status = message["exit"]


class Monitor:
    """QEMU's own control channel, QMP."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(30.0)
        self._connection = connection
        self._file = connection.makefile()
        self._read()  # the greeting
        self.execute("qmp_capabilities")

    def execute(self, command: str, **arguments: Any) -> Any:
        """One command; returns what QEMU returns."""
        request = {"execute": command, "arguments": arguments}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        while True:
            answer = self._read()
            if "error" in answer:
                raise GuestError(f"QEMU refused {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def close(self) -> None:
        self._file.close()

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise GuestError("QEMU closed its monitor")
        return json.loads(line)


class Guest:
    """One virtual machine. `with` waits until it takes commands, and ends it on every path.

    **Arguments:**

    - `out`: its `/out`, written through at once from both sides, and where `console.log` and `qemu.log` go. A folder
      that is removed at the end, if not given.
    - `name`: its host name.
    - `cable`: a datagram socket that carries the frames of its `eth0`; without, it has no network device.
    - `hardware_address`: of `eth0`.
    - `processors`, `memory`: what it has.
    - `time_limit`: seconds from its start after which every wait for it fails.
    """

    def __init__(
        self,
        out: Path | None = None,
        *,
        name: str = "guest",
        cable: socket.socket | None = None,
        hardware_address: str = "52:54:00:00:00:01",
        processors: int = 2,
        memory: str = "3G",
        time_limit: float = 600.0,
    ) -> None:
        reasons = missing()
        if reasons:
            raise GuestError("; ".join([*reasons, "try: python -m tests.guest setup"]))
        self.name = name
        self.changed = (
            threading.Condition()
        )  # guards what the reader changes: commands, their state
        self._commands: dict[int, Command] = {}
        self._dead = False
        self._deadline = time.monotonic() + time_limit
        self._scratch = None if out else tempfile.TemporaryDirectory(prefix="jaxrdma-guest-")
        self.out = Path(self._scratch.name if self._scratch else out or "").resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.boot_seconds: float | None = None

        self._agent, far_agent = socket.socketpair()
        self._qmp, far_qmp = socket.socketpair()
        descriptors = [far_agent.fileno(), far_qmp.fileno()]
        arguments = [
            *(
                "-name",
                name,
                "-machine",
                "q35",
                # Where the processor says that it copies bytes fast, libc and the kernel let it; an emulated one copies
                # them one after the other.
                "-cpu",
                "max,-erms,-fsrm",
                "-smp",
                str(processors),
                "-m",
                memory,
            ),
            # Emulated even where there is KVM, whose nested kind may hang; so it is alike everywhere.
            *(
                "-accel",
                "tcg,thread=multi",
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-no-reboot",
            ),
            *("-kernel", str(CACHE / "vmlinuz"), "-initrd", str(CACHE / "initramfs.gz")),
            *("-append", self._kernel_arguments()),
            *(
                "-chardev",
                f"file,id=console,path={self.out}/console.log",
                "-serial",
                "chardev:console",
            ),
            *self._share("root", Path("/"), "readonly=on,multidevs=remap"),
            *self._share("out", self.out, "multidevs=remap"),
            *("-device", "virtio-rng-pci", "-device", "virtio-serial-pci"),
            *("-chardev", f"socket,id=agent,fd={far_agent.fileno()}"),
            *("-device", "virtserialport,chardev=agent,name=agent"),
            *(
                "-chardev",
                f"socket,id=qmp,fd={far_qmp.fileno()}",
                "-mon",
                "chardev=qmp,mode=control",
            ),
        ]
        if cable is not None:
            descriptors.append(cable.fileno())
            arguments += ["-netdev", f"dgram,id=cable,local.type=fd,local.str={cable.fileno()}"]
            nic = f"virtio-net-pci,netdev=cable,id=eth0,mac={hardware_address},romfile="
            arguments += ["-device", nic]
        try:
            with (self.out / "qemu.log").open("wb") as complaints:
                self._process = subprocess.Popen(
                    # Even SIGKILL of this process leaves no QEMU behind.
                    ["setpriv", "--pdeathsig", "KILL", QEMU, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C is for us: the context ends it
                )
        except BaseException:
            self._agent.close()
            self._qmp.close()
            raise
        finally:
            far_agent.close()
            far_qmp.close()
        self._reader = threading.Thread(
            target=self._read, name=f"jaxrdma-guest-{name}", daemon=True
        )
        self._reader.start()
        self._monitor: Monitor | None = None

    def __enter__(self) -> "Guest":
        try:
            self.wait_until(lambda: self.boot_seconds is not None, BOOT_S, "its kernel to boot")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it at once, as if its power failed. What was written to `/out` is there."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._monitor is not None:
            self._monitor.close()
        self._agent.close()
        self._qmp.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def monitor(self) -> Monitor:
        if self._monitor is None:
            self._monitor = Monitor(self._qmp)
        return self._monitor

    def start(
        self,
        command: str | Sequence[str],
        *,
        folder: str | Path = "/",
        environment: Mapping[str, str] | None = None,
        input: bool = False,
        echo: bool = False,
    ) -> Command:
        """Starts a program as root, or a bash script if `command` is one string; it ends with its first failure.

        `echo` passes its output on to ours as it comes; with `input` it can be written to.
        """
        script = isinstance(command, str)
        argv = ["bash", "-euo", "pipefail", "-c", command] if script else list(command)
        name = f"{self.name}: {' '.join(argv[4:] if script else argv)[:80]}"
        with self.changed:
            started = Command(self, len(self._commands), name, echo)
            self._commands[len(self._commands)] = started
        request = {"run": started.identity, "argv": argv, "cwd": str(folder)}
        self.tell({**request, "env": dict(environment or {}), "input": input})
        return started

    def run(self, command: str | Sequence[str], timeout: float = 60.0, **options: Any) -> int:
        """`start`, and its exit status."""
        return self.start(command, **options).wait(timeout)

    def devices(self, count: int, mtu: int = 9000) -> None:
        """Makes `rxe0`, `rxe1` ..., two each on one cable, both ends in this guest."""
        self._set_up(f"rxe_pairs {count} {mtu}")

    def device_on(self, network_device: str, address: str, mtu: int = 9000) -> None:
        """Makes `rxe0` on a network device, which gets `address` (with `/length`)."""
        self._set_up(f"rxe_on {network_device} {address} {mtu}")

    def console(self) -> str:
        """The end of what its kernel said."""
        try:
            lines = (self.out / "console.log").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-TAIL:])

    def tell(self, message: dict[str, Any]) -> None:
        """To the agent."""
        try:
            self._agent.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise GuestError(self._obituary()) from error

    def wait_until(self, condition: Callable[[], Any], timeout: float, what: str) -> None:
        """Until `condition` is true, which is looked at whenever something came from the guest."""
        deadline = min(time.monotonic() + timeout, self._deadline)
        with self.changed:
            while not condition():
                if self._dead:
                    raise GuestError(self._obituary())
                left = deadline - time.monotonic()
                if left <= 0:
                    limit = " (the guest's time limit)" if deadline == self._deadline else ""
                    raise TimeoutError(
                        f"waited{limit} for {what}; {self.name}'s console ends with:\n{self.console()}"
                    )
                self.changed.wait(left)

    def _set_up(self, call: str) -> None:
        command = self.start(f". {HERE}/devices.sh\n{call}")
        if command.wait(SET_UP_S) != 0:
            raise GuestError(f"{call} failed in {self.name}:\n{command.output}\n{self.console()}")

    def _obituary(self) -> str:
        status = self._process.wait()
        said = (self.out / "qemu.log").read_text(errors="replace")
        return (
            f"{self.name} died, QEMU ended with {status}: {said.strip()}\n"
            f"its console ends with:\n{self.console()}"
        )

    def _kernel_arguments(self) -> str:
        ours = {
            "name": self.name,
            "modules": (CACHE / "modules").resolve(),
            "python": sys.executable,
            "agent": HERE / "agent.py",
        }
        for value in ours.values():
            if set(str(value)) & set(" \t\n\"'$,"):
                raise GuestError(f"a guest cannot be told of a path with such a character: {value}")
        words = ["console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on"]
        return " ".join(words + [f"guest_{name}={value}" for name, value in ours.items()])

    def _share(self, tag: str, folder: Path, options: str) -> list[str]:
        return [
            *("-fsdev", f"local,id={tag},path={folder},security_model=none,{options}"),
            *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
        ]

    def _read(self) -> None:
        """Takes what the agent says, until QEMU is gone."""
        received = b""
        while True:
            try:
                data = self._agent.recv(1 << 16)
            except OSError:
                data = b""
            with self.changed:
                if not data:
                    self._dead = True
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "ready" in message:
                        self.boot_seconds = message["ready"]
                    else:
                        self._commands[message["id"]].take(message)
                self.changed.notify_all()
            if not data:
                return


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a wire: what the guest there is called, and where it is reached."""

    name: str
    address: str
    hardware_address: str


ENDS = {
    "a": End("a", "10.77.0.1", "52:54:00:00:00:0a"),
    "b": End("b", "10.77.0.2", "52:54:00:00:00:0b"),
}


class Wire:
    """Two guests, `a` (10.77.0.1) and `b` (10.77.0.2), each with `rxe0` on its `eth0`, and a cable between them."""

    def __init__(self, *, mtu: int = 9000, memory: str = "3G", time_limit: float = 600.0) -> None:
        self._mtu = mtu
        self._memory = memory
        self._time_limit = time_limit
        self._guests: dict[str, Guest] = {}

    def __enter__(self) -> "Wire":
        # Each QEMU alone holds its end: when it is gone, what the other sends is lost, as on a real cable.
        cables = dict(zip(ENDS, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM), strict=True))
        try:
            for name, end in ENDS.items():
                self._guests[name] = Guest(
                    name=name,
                    cable=cables[name],
                    hardware_address=end.hardware_address,
                    processors=1,  # two guests on two cores are fastest so
                    memory=self._memory,
                    time_limit=self._time_limit,
                )
            for cable in cables.values():
                cable.close()
            for name, guest in self._guests.items():
                guest.__enter__()
                guest.device_on("eth0", f"{ENDS[name].address}/24", self._mtu)
        except BaseException:
            self.close()
            raise
        finally:
            for cable in cables.values():
                cable.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for guest in self._guests.values():
            guest.close()

    @property
    def a(self) -> Guest:
        return self._guests["a"]

    @property
    def b(self) -> Guest:
        return self._guests["b"]

    def pull(self, name: str) -> None:
        """Pulls the cable out of one guest, which sees its carrier go; the other only sees that nobody answers."""
        self._guests[name].monitor.execute("set_link", name="eth0", up=False)

    def plug(self, name: str) -> None:
        self._guests[name].monitor.execute("set_link", name="eth0", up=True)

    def power_off(self, name: str) -> None:
        """One machine is gone, without a word."""
        try:
            self._guests[name].monitor.execute("quit")
        except GuestError:
            pass  # it closed the monitor before it answered


def meet(point: str, *commands: Command, timeout: float = 60.0) -> None:
    """Lets the jobs go on together: each says `meet POINT` on a line of its own, and then waits for a line.

    In bash: `echo meet POINT; read -r`. They must have been started with `input=True`.
    """
    for command in commands:
        command.wait_for(f"^meet {re.escape(point)}$", timeout)
    for command in commands:
        command.write("\n")
