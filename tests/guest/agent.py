"""The guest's end of the bench: runs commands for the host, over one virtio-serial port, until the host closes it.

One JSON object a line. From the host: `{"run": ID, "argv", "cwd", "env", "input"}`, `{"write": ID, "text"}` and
`{"kill": ID, "signal"}`. To the host: `{"ready": SECONDS}` once, then `{"id": ID, "output": TEXT}` as it comes and
`{"id": ID, "exit": STATUS}` after all of it. TEXT is Latin-1, one character a byte, so that nothing is lost.

Runs on a bare interpreter (`python -I -S`), and imports little: on an emulated processor each module counts.
"""

import json
import os
import selectors
import signal
import subprocess
import time
from typing import Any

# What the only port is called, up to the number of its device; udev, which would give it a better name, is not here.
PORT = "vport"
PORT_S = 20.0
READS_AFTER_THE_END = (
    32  # more than a pipe holds: all that was written before the end comes before it
)


class Command:
    """A process of the host's wish, the leader of a session of its own, and what is to be read of it."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.id = request["run"]
        reading, writing = os.pipe()
        try:
            self.process = subprocess.Popen(
                request["argv"],
                cwd=request["cwd"],
                env={**os.environ, **request["env"]},
                stdin=subprocess.PIPE if request["input"] else subprocess.DEVNULL,
                bufsize=0,
                stdout=writing,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        os.set_blocking(reading, False)
        self.output: int | None = reading  # None once it was read to its end
        self.end = os.pidfd_open(self.process.pid)

    def write(self, text: str) -> None:
        if self.process.stdin is None:
            return
        try:
            self.process.stdin.write(text.encode("latin-1"))
        except BrokenPipeError:
            pass  # it ended, or closed its input; the host sees that by itself

    def kill(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # ended meanwhile


class Agent:
    def __init__(self, port: int) -> None:
        self.port = port
        self.commands: dict[int, Command] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(port, selectors.EVENT_READ, None)

    def tell(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.port, data) :]

    def serve(self) -> None:
        self.tell({"ready": time.clock_gettime(time.CLOCK_BOOTTIME)})
        received = b""
        while True:
            for key, _ in self.selector.select():
                if key.data is not None:
                    react, command = key.data
                    react(command)
                    continue
                data = os.read(self.port, 1 << 16)
                if not data:
                    return
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))

    def obey(self, request: dict[str, Any]) -> None:
        if "run" in request:
            self.start(request)
        elif "write" in request and request["write"] in self.commands:
            self.commands[request["write"]].write(request["text"])
        elif "kill" in request and request["kill"] in self.commands:
            self.commands[request["kill"]].kill(request["signal"])

    def start(self, request: dict[str, Any]) -> None:
        try:
            command = Command(request)
        except OSError as error:
            self.tell({"id": request["run"], "output": f"{error}\n".encode().decode("latin-1")})
            self.tell({"id": request["run"], "exit": 127})
            return
        self.commands[command.id] = command
        assert command.output is not None
        self.selector.register(command.output, selectors.EVENT_READ, (self.forward, command))
        self.selector.register(command.end, selectors.EVENT_READ, (self.finish, command))

    def forward(self, command: Command) -> bool:
        """Passes on what was written; whether there was anything."""
        if command.output is None:
            return False
        try:
            data = os.read(command.output, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self.tell({"id": command.id, "output": data.decode("latin-1")})
            return True
        self.forget(command.output)
        command.output = None
        return False

    def finish(self, command: Command) -> None:
        """It ended. A process that it left behind may still hold its output, and is heard on."""
        for _ in range(READS_AFTER_THE_END):
            if not self.forward(command):
                break
        self.forget(command.end)
        del self.commands[command.id]
        if command.process.stdin is not None:
            command.process.stdin.close()
        self.tell({"id": command.id, "exit": command.process.wait()})

    def forget(self, descriptor: int) -> None:
        self.selector.unregister(descriptor)
        os.close(descriptor)


def open_port() -> int:
    """The driver makes the port when the host told it of one, which may be later than now."""
    deadline = time.monotonic() + PORT_S
    while True:
        for name in os.listdir("/dev"):
            if name.startswith(PORT):
                return os.open(f"/dev/{name}", os.O_RDWR)
        if time.monotonic() > deadline:
            raise FileNotFoundError(f"/dev/{PORT}*")
        time.sleep(0.02)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Agent(open_port()).serve()
