"""A cluster on this machine whose worker 0 is the calling process: for notebooks, tests and trying things out."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from jaxrdma.cluster import ClusterSpec, jaxrdma_settings
from jaxrdma.errors import ConnectError
from jaxrdma.launch import coordinator_environment, server_environment, worker_environment

_START_SECONDS = 60.0  # for the coordinator to report its port
_END_SECONDS = 10.0  # for everybody to end by themselves, once the caller's session is closed


@contextlib.contextmanager
def local_cluster(
    servers: int = 1, workers: int = 1, command: Sequence[str] = (), **settings: Any
) -> Generator[dict[str, Any]]:
    """Start a coordinator, servers, and workers 1 to `workers - 1`; the caller is worker 0.

    ```python
    with jaxrdma.local_cluster(servers=1) as cluster, jaxrdma.connect(**cluster) as session:
        state = session.init(params, update=optax.adam(1e-3))
    ```

    **Arguments:**

    - `servers`, `workers`: how many of each.
    - `command`: what the other workers' interpreters are given: `["script.py", "arg"]`. Needed if `workers` > 1.
    - `settings`: other fields of `ClusterSpec`. Those of TLS come from the environment, as the caller's do.

    **Returns:** at entry, the arguments for `connect`. At exit everybody is waited for, and ended if need be.

    **Raises:** `ConnectError` if the coordinator does not start; `ConfigError` on impossible numbers.
    """
    if workers > 1 and not command:
        raise ConnectError(
            f"local_cluster(workers={workers}): what do workers 1 to {workers - 1} run? Give command="
        )
    shared: dict[str, Any] = {
        "num_workers": workers,
        "num_servers": servers,
        "secret": secrets.token_hex(16),
        "job": f"local-{secrets.token_hex(4)}",
        **{k: v for k, v in jaxrdma_settings(os.environ).items() if k.startswith("tls_")},
        **settings,
    }
    # Whatever cannot be is found before anything runs.
    ClusterSpec("127.0.0.1:1", "worker", 0, **shared)
    with _Processes() as processes:
        address = processes.coordinator(shared)

        def spec(role: str, index: int) -> ClusterSpec:
            return ClusterSpec(address, role, index, **shared)

        for index in range(servers):
            environment = server_environment(os.environ, spec("server", index))
            processes.start(f"server {index}", ["-m", "jaxrdma", "server"], environment)
        for index in range(1, workers):
            environment = worker_environment(os.environ, spec("worker", index))
            processes.start(f"worker {index}", list(command), environment)
        yield {"coordinator": address, "index": 0, **shared}
        processes.wait()


class _Processes:
    """Child processes with a log file each; none outlives the context."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jaxrdma-")
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self._folder.cleanup()

    def coordinator(self, shared: dict[str, Any]) -> str:
        """Start the coordinator; returns its address."""
        reading, writing = os.pipe()
        try:
            spec = ClusterSpec("127.0.0.1:1", "worker", 0, **shared)
            environment = coordinator_environment(os.environ, spec)
            command = [
                "-m",
                "jaxrdma",
                "coordinator",
                "--listen",
                "127.0.0.1:0",
                "--report-fd",
                str(writing),
            ]
            try:
                self.start("coordinator", command, environment, (writing,))
            finally:
                os.close(writing)
            ready, _, _ = select.select([reading], [], [], _START_SECONDS)
            line = os.read(reading, 4096).partition(b"\n")[0] if ready else b""
        finally:
            os.close(reading)
        if not line:
            raise ConnectError(f"the coordinator did not start:\n{self.output('coordinator')}")
        return str(json.loads(line)["address"])

    def start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        """Start a process of the interpreter that runs this one."""
        with self._log(name).open("wb") as log:
            self._children[name] = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C is for the caller; it tells the others
            )

    def wait(self) -> None:
        """Until everybody has ended.

        **Raises:** `ConnectError` with the output of the first that failed or did not end.
        """
        for name, child in self._children.items():
            try:
                code = child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                raise ConnectError(
                    f"{name} of the local cluster did not end:\n{self.output(name)}"
                ) from None
            if code != 0:
                raise ConnectError(
                    f"{name} of the local cluster failed with {code}:\n{self.output(name)}"
                )

    def output(self, name: str) -> str:
        """The last lines that a process printed."""
        lines = self._log(name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-20:])

    def _log(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.log"
