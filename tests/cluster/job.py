"""`Job`: a real cluster of processes on this machine, started one by one as a user would by hand."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"

# As the native tests have it: which transport, and between which devices: the workers' and the servers'.
TRANSPORT = os.environ.get("TEST_TRANSPORT", "tcp")
DEVICES = os.environ.get("TEST_RDMA_DEVICES", "rxe0,rxe1").split(",")
# Every time limit is so many times as long; for an emulated machine.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))


def free_address() -> str:
    """An address that nobody listens at, for a coordinator that comes later."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def ask(
    command: str, address: str, *options: str, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Runs `jaxrdma COMMAND` about the job whose coordinator is at `address`, with no other settings than `env`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
    return subprocess.run(
        [sys.executable, "-m", "jaxrdma", command, "--coordinator", address, *options],
        env=environment | env,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )


class Job:
    """The processes of one job, by name: "coordinator", "server 0", "worker 1". Ends them all at its end."""

    def __init__(self, folder: Path, servers: int, workers: int, **settings: Any) -> None:
        self.folder = folder
        self.servers = servers
        self.workers = workers
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._settings = {f"JAXRDMA_{name.upper()}": str(value) for name, value in settings.items()}
        self._address = ""
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, script: str | Path, *args: Any) -> "Job":
        """Everybody: the coordinator, the servers, and workers that run `script` of the folder scripts/."""
        self.start_coordinator()
        for index in range(self.servers):
            self.start_server(index)
        for index in range(self.workers):
            self.start_worker(index, script, *args)
        return self

    def start_coordinator(self, port: int = 0, host: str = "127.0.0.1", **env: str) -> str:
        """The coordinator; returns its address."""
        reading, writing = os.pipe()
        try:
            self.spawn(
                "coordinator",
                [
                    "-m",
                    "jaxrdma",
                    "coordinator",
                    "--listen",
                    f"{host}:{port}",
                    "--report-fd",
                    str(writing),
                ],
                self._environment(None) | env,
                pass_fds=(writing,),
            )
            os.close(writing)
            ready, _, _ = select.select([reading], [], [], 30 * PATIENCE)
            assert ready, "the coordinator did not report its address"
            self._address = json.loads(os.read(reading, 4096).split(b"\n")[0])["address"]
        finally:
            os.close(reading)
        return self._address

    def at(self, address: str) -> None:
        """Where the processes started from now on look for the coordinator."""
        self._address = address

    def start_server(
        self, index: int, *args: str, name: str = "", within: tuple[str, ...] = (), **env: str
    ) -> None:
        """`name`: how it is called here, if not "server INDEX"; `within`: what its command begins with."""
        self.spawn(
            name or f"server {index}",
            ["-m", "jaxrdma", "server", *args],
            self._environment(("server", index)) | {"JAX_PLATFORMS": "cpu"} | env,
            within=within,
        )

    def start_worker(
        self, index: int, script: str | Path, *args: Any, name: str = "", **env: str
    ) -> None:
        """`name`: how the process is called here, if not "worker INDEX"."""
        path = script if isinstance(script, Path) else SCRIPTS / script
        environment = self._environment(("worker", index)) | {"PJRT_NPROC": "8"} | env
        self.spawn(name or f"worker {index}", [str(path), *map(str, args)], environment)

    def start_follower(self, script: str | Path, *args: Any, name: str = "follower") -> None:
        """A process that is no part of the job. All that it knows is where the job is."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
        environment |= {"JAXRDMA_COORDINATOR": self._address, "PYTHONUNBUFFERED": "1"}
        if TRANSPORT == "verbs":
            environment["JAXRDMA_DEVICE"] = DEVICES[0]
        path = script if isinstance(script, Path) else SCRIPTS / script
        self.spawn(name, [str(path), *map(str, args)], environment)

    @property
    def address(self) -> str:
        """The coordinator's."""
        return self._address

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    def output(self, name: str) -> str:
        """What the process has printed so far, both streams."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def outputs(self) -> str:
        """Everything printed so far, for the report of a failed test."""
        return "\n".join(
            f"--- {name} ({p.returncode})\n{self.output(name)}"
            for name, p in self.processes.items()
        )

    def wait(self, timeout: float = 60, names: list[str] | None = None) -> dict[str, int]:
        """Exit codes, once everybody named (default: all) has ended; fails the test if somebody has not in time."""
        deadline = time.monotonic() + timeout * PATIENCE
        codes: dict[str, int] = {}
        for name in names or list(self.processes):
            try:
                codes[name] = self.processes[name].wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} has not ended within {timeout} s\n{self.outputs()}")
        return codes

    def succeed(self, timeout: float = 60) -> None:
        """Waits for the end; every exit code must be 0."""
        codes = self.wait(timeout)
        assert set(codes.values()) == {0}, self.outputs()

    def wait_for_output(self, name: str, text: str, timeout: float = 60) -> str:
        """Until `name` has printed `text`; returns its output."""
        deadline = time.monotonic() + timeout * PATIENCE
        while text not in (output := self.output(name)):
            ended = self.processes[name].poll() is not None
            if (ended and text not in self.output(name)) or time.monotonic() > deadline:
                pytest.fail(f"{name} did not print {text!r}\n{self.outputs()}")
            # A file has no completion to wait for.
            time.sleep(0.02)
        return output

    def _environment(self, who: tuple[str, int] | None) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
        environment |= {
            "JAXRDMA_NUM_SERVERS": str(self.servers),
            "JAXRDMA_NUM_WORKERS": str(self.workers),
            "JAXRDMA_CONNECT_TIMEOUT": str(60 * PATIENCE),
            "JAXRDMA_TRANSPORT": TRANSPORT,
            "PYTHONUNBUFFERED": "1",
        } | self._settings
        if who is not None:
            if environment["JAXRDMA_TRANSPORT"] == "verbs":
                environment.setdefault("JAXRDMA_DEVICE", DEVICES[who[0] == "server"])
            environment |= {
                "JAXRDMA_COORDINATOR": self._address,
                "JAXRDMA_ROLE": who[0],
                "JAXRDMA_INDEX": str(who[1]),
            }
        return environment

    def spawn(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        pass_fds: tuple[int, ...] = (),
        within: tuple[str, ...] = (),
    ) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*within, sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=pass_fds,
                start_new_session=True,
            )
