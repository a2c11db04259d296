"""What one process knows of its cluster: `ClusterSpec`, and the environments it is read from."""

import contextlib
import difflib
import errno
import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from jaxrdma.errors import ConfigError

ROLES = ("worker", "server")  # those that a job is made of; beside them, followers come and go
TRANSPORTS = ("auto", "tcp", "verbs")
RESTORES = ("auto", "never", "new-update")

# As native/fabric has it: tensors are striped over at most so many RDMA devices.
MOST_DEVICES = 4

_PREFIX = "JAXRDMA_"
# Messages between a process and the coordinator, by their tags in jaxrdma/control.py, that a drill may lose: those on
# models, on who belongs to the job, and on gradients.
MISSABLE = (
    *("flow_proposal", "flow_agreed", "flow_ready", "flow_start", "landed", "decided"),
    *("admit_worker", "worker_admitted", "member_left", "member_lost"),
)
_FAULT = rf"(worker|server) \d+: ((?!missed)[a-z]+ [1-9]\d*( \d+)?|missed ({'|'.join(MISSABLE)}) [1-9]\d*)"


@dataclass(frozen=True)
class Missed:
    """For drills: the message of this kind between this process and the coordinator, the `nth` from 1, is lost."""

    kind: str
    nth: int


@dataclass(frozen=True)
class VerbsSettings:
    """How this process uses its RDMA devices. `None`: the best that is there, or the transport's default.

    **Arguments:**

    - `device`: of the process's own machine, ("mlx5_0",). Tensors are striped over several, at most `MOST_DEVICES`; the
      first is the first rail, and what follows here is said of each.
    - `port`: of the device, 1.
    - `gid_index`: the port's source address, as an index of its GID table.
    - `pkey_index`, `service_level`: for InfiniBand: partition and virtual lane.
    - `traffic_class`: of RoCE's packets, 0 to 255.
    - `timeout`: an answer of the peer's device is awaited for 4.096 us * 2^timeout, 1 to 31, before it is asked for
      again.
    - `retry_count`: how often, 0 to 7; on some devices 7 is without end.
    - `link_timeout`: seconds that a broken link may take to come back.
    """

    device: tuple[str, ...] | None = None
    port: int | None = None
    gid_index: int | None = None
    pkey_index: int | None = None
    service_level: int | None = None
    traffic_class: int | None = None
    timeout: int | None = None
    retry_count: int | None = None
    link_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.device is not None:
            _check_device_names(self.device)
        for name, (least, most) in _VERBS_BOUNDS.items():
            value: float | None = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"JAXRDMA_{name.upper()} is {value}: expected {least} to {most}")


def _check_device_names(names: tuple[str, ...]) -> None:
    said = f"JAXRDMA_DEVICE={','.join(names)}"
    if not names or not all(names):
        raise ConfigError(
            f"{said}: a name is empty. Expected one device, or several with a comma between two: mlx5_0,mlx5_1"
        )
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ConfigError(f"{said}: {twice} is there twice. Name each device once")
    if len(names) > MOST_DEVICES:
        raise ConfigError(
            f"{said}: {len(names)} devices. Name the best {MOST_DEVICES} of them: that is the most of a process"
        )


_VERBS_BOUNDS: dict[str, tuple[float, float]] = {
    "port": (1, 255),
    "gid_index": (0, 65535),
    "pkey_index": (0, 65535),
    "service_level": (0, 15),
    "traffic_class": (0, 255),
    "timeout": (1, 31),
    "retry_count": (0, 7),
    "link_timeout": (0, 86400),
}


@dataclass(frozen=True)
class TlsFiles:
    """PEM files with which a process speaks TLS: its certificate, that one's key, and the CA of everybody's."""

    cert: str
    key: str
    ca: str


def tls_files(settings: Mapping[str, Any]) -> TlsFiles | None:
    """What `tls_cert`, `tls_key` and `tls_ca` in `settings` name; `None` if nothing.

    **Raises:** `ConfigError` if only some of them are there.
    """
    files = {name: settings.get(f"tls_{name}") for name in ("cert", "key", "ca")}
    missing = [f"JAXRDMA_TLS_{name.upper()}" for name, path in files.items() if not path]
    if len(missing) == len(files):
        return None
    if missing:
        given = [f"JAXRDMA_TLS_{name.upper()}={path}" for name, path in files.items() if path]
        raise ConfigError(
            f"{' and '.join(given)} without {' and '.join(missing)}: expected all three, to speak TLS, or none"
        )
    return TlsFiles(**cast(dict[str, str], files))


# Signs of life of who rests are half of it apart, and cost the more the shorter it is.
HEARTBEAT_TIMEOUT = 15.0
# Nobody looks at a warning sooner. And who evaluates for longer than the deadline while others wait may raise it.
STALL_WARNING = 30.0
STEP_TIMEOUT = 1800.0


@dataclass(frozen=True)
class ClusterSpec:
    """The cluster as one of its processes sees it. Checked when made; every field has an environment variable.

    **Arguments:**

    - `coordinator`: "host:port" at which the coordinator listens.
    - `role`, `index`: who this process is; indices count from 0 within a role.
    - `num_workers`, `num_servers`: the size with which the job begins. A follower is told all of these when it comes.
    - `most_workers`: how many places for workers the job has. Those beyond the first `num_workers` are spare: whoever
      takes one has a part in the job from then on. `None`: as many as `num_workers`.
    - `secret`: shared by the processes of a job. May be empty on loopback only.
    - `tls_cert`, `tls_key`, `tls_ca`: PEM files: this process's certificate, its key, and the CA that all certificates
      of the job are of. With them the control plane speaks TLS, and both sides ask for the other's certificate. All
      three or none.
    - `job`: the job's name, so that two jobs never mix.
    - `attempt`: which start of the job this is, from 0; processes of two attempts never mix.
    - `transport`: "tcp", "verbs", or "auto": verbs if every process of the job can, else tcp.
    - `connect_timeout`: seconds until a start-up that is not complete is an error.
    - `heartbeat_timeout`: seconds of silence after which a process counts as lost.
    - `stall_warning`: seconds in one step after which it is said who waits for whom. Of the coordinator.
    - `step_timeout`: seconds in one step after which the job fails, with the same text. Of the coordinator.
    - `partition_bytes`: upper bound of a partition.
    - `ordered`: sum gradients in the order of the workers, for the same bits on every run.
    - `show_plan`: worker 0 prints where each leaf of a model lies.
    - `trace_dir`: the folder for what this process recorded last, written on SIGUSR1 and when it or the job fails.
      `None`: nothing is written.
    - `metrics`: "port", on loopback, or "host:port", at which the coordinator answers Prometheus; server i does at a
      port that is higher by i + 1. `None`: nobody does.
    - `spin_us`: how long a progress thread polls at most before it sleeps, in microseconds; less where the last waits
      were shorter, and not at all where they were longer. `None`: the engine's own choice. 0: it never polls.
    - `fault`: for drills, what shall go wrong with one process. In its transport: "worker 1: lost 40" loses the 40th
      write of data by worker 1. Between it and the coordinator: "server 0: missed decided 9" loses the 9th message of
      that kind, one of `MISSABLE`. `None`: nothing.
    - `checkpoint`: the folder of the job's checkpoints; all servers reach it by this path. `None`: there are none.
    - `checkpoint_steps`, `checkpoint_seconds`: save every so many steps, every so many seconds; and at the job's end.
    - `checkpoint_keep`: so many are kept of each model.
    - `checkpoint_restore`: "auto": go on from the newest in the folder; "never": set them aside and begin anew;
      "new-update": as auto, but the update may be another if its state has the same arrays (another learning rate).
    - `replicate`: 1: each server's part of a model is kept by another server too, so that the loss of one costs no step
      of a job that is started again; 0: what came after the last checkpoint is lost.
    - `verbs`: how this process uses its RDMA devices; each of its settings has a variable of its own.
    """

    coordinator: str
    role: str
    index: int
    num_workers: int
    num_servers: int
    secret: str = field(default="", repr=False)
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    job: str = "jaxrdma"
    attempt: int = 0
    transport: str = "auto"
    connect_timeout: float = 300.0
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    stall_warning: float = STALL_WARNING
    step_timeout: float = STEP_TIMEOUT
    partition_bytes: int = 1 << 20
    ordered: bool = False
    show_plan: bool = False
    trace_dir: str | None = None
    metrics: str | None = None
    spin_us: int | None = None
    fault: str | None = None
    checkpoint: str | None = None
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = None
    checkpoint_keep: int = 3
    checkpoint_restore: str = "auto"
    replicate: int = 0
    most_workers: int | None = None
    verbs: VerbsSettings = VerbsSettings()

    def __post_init__(self) -> None:
        _, port = parse_address(self.coordinator, "coordinator")
        if port == 0:
            raise ConfigError(f"coordinator {self.coordinator!r}: port 0 is nobody's address")
        if self.role not in (*ROLES, "follower"):
            raise ConfigError(
                f"role {self.role!r} is neither of {', '.join(ROLES)}{_nearest(self.role, ROLES)}"
            )
        _at_least("num_workers", self.num_workers, 1)
        _at_least("num_servers", self.num_servers, 1)
        if self.places < self.num_workers:
            raise ConfigError(
                f"most_workers is {self.most_workers}: expected at least num_workers, {self.num_workers}, with which "
                "the job begins. Set JAXRDMA_MOST_WORKERS or JAXRDMA_NUM_WORKERS."
            )
        self._check_index()
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"transport {self.transport!r} is not there: expected one of {', '.join(TRANSPORTS)}"
                f"{_nearest(self.transport, TRANSPORTS)}"
            )
        if not self.job or len(self.job.encode()) > 64:
            raise ConfigError(f"job {self.job!r}: expected a name of 1 to 64 bytes")
        _at_least("attempt", self.attempt, 0)
        for name in ("connect_timeout", "heartbeat_timeout", "stall_warning", "step_timeout"):
            value: float = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}: expected a number of seconds above 0")
        _at_least("partition_bytes", self.partition_bytes, 64)
        if self.spin_us is not None:
            _at_least("spin_us", self.spin_us, 0)
        if self.fault is not None and not re.fullmatch(_FAULT, self.fault):
            raise ConfigError(
                f"fault {self.fault!r}: expected whose and what, as in 'worker 1: lost 40', 'server 0: delayed 3 500' "
                f"or 'server 0: missed decided 9'; missed may be {', '.join(MISSABLE)}"
            )
        if self.metrics is not None:
            metrics_address(self.metrics)
        tls_files(vars(self))
        self._check_checkpoint()
        self._check_replicate()

    @property
    def places(self) -> int:
        """How many workers the job has when nobody is missing any more: their indices are below this."""
        return self.num_workers if self.most_workers is None else self.most_workers

    @property
    def grows(self) -> bool:
        """Whether workers may be added to the job while it runs."""
        return self.places > self.num_workers

    def _check_index(self) -> None:
        if self.role not in ROLES:
            return
        count = self.places if self.role == "worker" else self.num_servers
        many, setting = f"{count} {self.role}s", f"NUM_{self.role.upper()}S"
        if self.role == "worker" and self.grows:
            many, setting = f"at most {many}", "MOST_WORKERS"
        if not 0 <= self.index < count:
            raise ConfigError(
                f"index {self.index} of a {self.role} in a job of {many}: "
                f"expected 0 to {count - 1}. Set JAXRDMA_INDEX or JAXRDMA_{setting}."
            )

    @property
    def tls(self) -> TlsFiles | None:
        """The files to speak TLS with; `None`: the control plane does not."""
        return tls_files(vars(self))

    @property
    def own_fault(self) -> str:
        """What shall go wrong in the transport here, as the native module reads it; empty: nothing."""
        return "" if self._ordered.startswith("missed") else self._ordered

    @property
    def missed(self) -> Missed | None:
        """Which message of the control plane shall be lost here; `None`: none."""
        if not self._ordered.startswith("missed"):
            return None
        _, kind, nth = self._ordered.split()
        return Missed(kind, int(nth))

    @property
    def _ordered(self) -> str:
        whose, _, what = (self.fault or "").partition(": ")
        return what if whose == f"{self.role} {self.index}" else ""

    def _check_checkpoint(self) -> None:
        for name, least in (("checkpoint_steps", 1), ("checkpoint_seconds", 0.1)):
            value: float | None = getattr(self, name)
            if value is None:
                continue
            if self.checkpoint is None:
                raise ConfigError(
                    f"{name} is {value}, and there is no folder to save in: set JAXRDMA_CHECKPOINT too"
                )
            if not least <= value < float("inf"):
                raise ConfigError(f"{name} is {value}: expected at least {least}")
        _at_least("checkpoint_keep", self.checkpoint_keep, 1)
        if self.checkpoint_restore not in RESTORES:
            raise ConfigError(
                f"checkpoint_restore {self.checkpoint_restore!r} is not there: expected one of {', '.join(RESTORES)}"
                f"{_nearest(self.checkpoint_restore, RESTORES)}"
            )

    def _check_replicate(self) -> None:
        if self.replicate not in (0, 1):
            raise ConfigError(
                f"replicate is {self.replicate}: expected 0, or 1 for one copy of each server's part"
            )
        if not self.replicate or self.role == "follower":
            return
        if self.num_servers < 2:
            raise ConfigError(
                "replicate=1 needs at least 2 servers, for each server's part to be kept by another one; there is "
                f"{self.num_servers}. Give --servers 2, or save often: --checkpoint-steps"
            )
        if self.grows:
            raise ConfigError(
                f"replicate=1 in a job to which workers may be added, up to {self.places}: what the servers hold is of "
                "no common step then. Leave JAXRDMA_MOST_WORKERS out, or set JAXRDMA_REPLICATE=0 and save often: "
                "--checkpoint-steps"
            )
        if self.role != "server":
            return  # only servers save
        if self.checkpoint is None:
            raise ConfigError(
                "replicate=1 needs a folder in which the servers that are left save what they hold: set "
                "JAXRDMA_CHECKPOINT too"
            )
        if self.checkpoint_restore == "never":
            raise ConfigError(
                "replicate=1 with checkpoint_restore never: what was saved would be set aside, not gone on from"
            )

    @classmethod
    def from_environment(
        cls, env: Mapping[str, str] | None = None, **overrides: Any
    ) -> "ClusterSpec":
        """The cluster as the environment describes it.

        `JAXRDMA_*` goes before `TF_CONFIG`, and `overrides` (fields by name; `None` means not given) before both.

        **Raises:** `ConfigError`, naming every field that nobody gave, a variable that does not exist with the name
        that was probably meant, or a value that cannot be.
        """
        env = os.environ if env is None else env
        names = [f.name for f in fields(cls)]
        for name in overrides:
            if name not in names:
                raise ConfigError(f"a cluster has no {name!r}{_nearest(name, names)}")
        values = tf_config_settings(env) | jaxrdma_settings(env)
        values |= {name: value for name, value in overrides.items() if value is not None}
        values.setdefault("role", "worker")
        verbs = {f.name: values.pop(f.name) for f in fields(VerbsSettings) if f.name in values}
        values.setdefault("verbs", VerbsSettings(**verbs))
        required = ("coordinator", "index", "num_workers", "num_servers")
        if values["role"] == "follower":
            required = ("coordinator",)
            values |= {"index": 0, "num_workers": 1, "num_servers": 1}
        missing = [name for name in required if name not in values]
        if missing:
            variables = ", ".join(_PREFIX + name.upper() for name in missing)
            if values["role"] == "follower":
                raise ConfigError(
                    f"no job to follow: coordinator not given. Give coordinator=, or set {variables}"
                )
            raise ConfigError(
                f"no cluster to join: {', '.join(missing)} not given. Start the script with `jaxrdma launch`, "
                f"or set {variables}, or TF_CONFIG."
            )
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """The `JAXRDMA_*` variables from which `from_environment` makes this spec again."""
        texts: dict[str, str] = {}
        values = {f.name: getattr(self, f.name) for f in fields(self)} | vars(self.verbs)
        del values["verbs"]
        for name, value in values.items():
            if value is None or (name == "secret" and not value):
                continue
            texts[_PREFIX + name.upper()] = setting_text(value)
        return texts

    def shared_settings(self) -> dict[str, int | bool]:
        """The settings that must be equal in every process of a job; compared by the coordinator."""
        if self.role == "follower":
            return {}
        return {
            "num_workers": self.num_workers,
            "num_servers": self.num_servers,
            "most_workers": self.places,
            "partition_bytes": self.partition_bytes,
            "ordered": self.ordered,
            "replicate": self.replicate,
        }


def jaxrdma_settings(env: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a `ClusterSpec` given as `JAXRDMA_*`. An empty value means not given.

    **Raises:** `ConfigError` on a name that does not exist or a value that cannot be read.
    """
    settings: dict[str, Any] = {}
    for variable in sorted(env):
        if not variable.startswith(_PREFIX) or variable in NATIVE_VARIABLES:
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if name not in _PARSERS or variable != _PREFIX + name.upper():
            known = [_PREFIX + n.upper() for n in _PARSERS] + list(NATIVE_VARIABLES)
            raise ConfigError(
                f"environment variable {variable} does not exist{_nearest(variable.upper(), known)}"
            )
        text = env[variable].strip()
        if not text:
            continue
        parse, expected = _PARSERS[name]
        try:
            settings[name] = parse(text)
        except ValueError:
            shown = "..." if name == "secret" else repr(text)
            raise ConfigError(f"{variable}={shown}: expected {expected}") from None
    return settings


def setting_text(value: Any) -> str:
    """The text of a variable that `jaxrdma_settings` reads `value` from."""
    if isinstance(value, tuple):
        return ",".join(cast(tuple[str, ...], value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def tf_config_settings(env: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a `ClusterSpec` that TensorFlow's `TF_CONFIG` gives.

    `ps` tasks are servers; a `chief` (or `master`) is worker 0 and the `worker` tasks follow it. Only the number of
    `ps` and `worker` addresses counts: workers do not listen, and servers report their data address themselves. The
    coordinator is at the address of the `coordinator` entry if there is one, else at the first `ps` address.

    **Raises:** `ConfigError` if it cannot be read, an index is beyond its list, or an address stands there twice.
    """
    text = env.get("TF_CONFIG", "").strip()
    if not text:
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"TF_CONFIG is not JSON: {error}") from None
    cluster = cast(Any, config).get("cluster") if isinstance(config, dict) else None
    if not isinstance(cluster, dict):
        raise ConfigError(
            'TF_CONFIG has no "cluster": expected {"cluster": {"ps": [...], "worker": [...]}, ...}'
        )
    addresses: dict[str, list[str]] = {}
    claimants: dict[str, str] = {}
    for kind, listed in cast(dict[str, Any], cluster).items():
        if kind not in ("ps", "worker", "chief", "master", "evaluator", "coordinator"):
            kinds = ("ps", "worker", "chief", "coordinator")
            raise ConfigError(f"TF_CONFIG names tasks of type {kind!r}{_nearest(kind, kinds)}")
        if not isinstance(listed, list):
            raise ConfigError(
                f"TF_CONFIG, cluster.{kind}: expected a list of addresses, not {listed!r}"
            )
        addresses[kind] = [str(a) for a in cast(list[Any], listed)]
        for i, address in enumerate(addresses[kind]):
            parse_address(address, f"TF_CONFIG, {kind} {i}")
            claimant = f"{kind} {i}"
            if address in claimants:
                raise ConfigError(
                    f"TF_CONFIG gives {address} to both {claimants[address]} and {claimant}"
                )
            claimants[address] = claimant
    chiefs = addresses.get("chief", []) + addresses.get("master", [])
    servers = addresses.get("ps", [])
    if not servers:
        raise ConfigError('TF_CONFIG has no "ps": expected the address of at least one server')
    settings: dict[str, Any] = {
        "coordinator": (addresses.get("coordinator") or servers)[0],
        "num_workers": len(chiefs) + len(addresses.get("worker", [])),
        "num_servers": len(servers),
    }
    task: Any = cast(dict[str, Any], config).get("task")
    if task is None:
        return settings
    kind = cast(Any, task).get("type") if isinstance(task, dict) else None
    index = cast(Any, task).get("index") if isinstance(task, dict) else None
    if kind not in ("ps", "worker", "chief", "master") or not isinstance(index, int):
        raise ConfigError(
            f'TF_CONFIG, task: expected {{"type": "worker" or "ps" or "chief", "index": number}}, not {task!r}'
        )
    listed = addresses.get(kind, [])
    if not 0 <= index < len(listed):
        raise ConfigError(
            f"TF_CONFIG, task: there is no {kind} {index} among the {len(listed)} addresses of {kind}"
        )
    settings["role"] = "server" if kind == "ps" else "worker"
    settings["index"] = index + (len(chiefs) if kind == "worker" else 0)
    return settings


def parse_address(address: str, what: str = "address") -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port".

    **Raises:** `ConfigError`, beginning with `what`.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(f"{what} {address!r}: expected host:port, or [host]:port for IPv6")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"{what} {address!r}: expected a port of 0 to 65535, not {port!r}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The text `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost is not trusted to be loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def metrics_address(setting: str, offset: int = 0) -> tuple[str, int]:
    """Where to listen by "PORT", on loopback, or "HOST:PORT". `offset` is added to a port that is not 0.

    **Raises:** `ConfigError` if it is neither.
    """
    address = setting if ":" in setting else f"127.0.0.1:{setting}"
    host, port = parse_address(address, "metrics address")
    if port and port + offset > 65535:
        raise ConfigError(f"metrics address {setting!r}: port {port} + {offset} is beyond 65535")
    return host, port + offset if port else 0


def check_listen(listen: str, secret: str) -> None:
    """Refuse an address that others can reach while there is no secret to keep them out.

    **Raises:** `ConfigError`.
    """
    host, _ = parse_address(listen, "listen address")
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"listening at {listen} lets other machines in, and there is no secret to keep strangers out: "
            "set JAXRDMA_SECRET, or --secret-file, alike on every process."
        )


def bind(listen: str, who: str) -> socket.socket:
    """A TCP socket that has the address `listen` ("host:port"; port 0: any), to be used or closed.

    **Raises:** `ConfigError` with `who` and the errno's text if it cannot be had.
    """
    host, port = parse_address(listen, "listen address")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        why = why_not_to_listen(error, host, port)
        raise ConfigError(f"{who} cannot listen at {listen}: {why}") from None
    return sock


def why_not_to_listen(error: OSError, host: str, port: int) -> str:
    """Why an address cannot be listened at, and what to do."""
    if isinstance(error, socket.gaierror):
        return f"its host name does not resolve ({error.strerror})"
    text = f"{error.strerror or error} (errno {error.errno})"
    if error.errno == errno.EADDRINUSE:
        return f"{text}{listener(port)}. Give every job, and every server, a port of its own"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{text}: {host} is not an address of this machine. Give one that `ip address` shows here"
    return text


def listener(port: int) -> str:
    """Who listens at a port of this machine, as in "Address already in use, by process 12 (...)"; empty if unknown."""
    sockets: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir() if sockets else ():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours to look at
            for descriptor in (process / "fd").iterdir():
                if os.readlink(descriptor) in sockets:
                    command = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                    shown = " ".join(part.decode(errors="replace") for part in command[:6])
                    return f", by process {process.name} ({shown})"
    return ""


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise ValueError(text)
    return text.lower() in ("1", "true")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


_WHOLE = "a whole number"
_SECONDS = "a number of seconds"
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "coordinator": (str, "host:port"),
    "role": (str, "worker or server"),
    "index": (int, _WHOLE),
    "num_workers": (int, _WHOLE),
    "num_servers": (int, _WHOLE),
    "most_workers": (int, _WHOLE),
    "secret": (str, "a text"),
    "tls_cert": (str, "a file"),
    "tls_key": (str, "a file"),
    "tls_ca": (str, "a file"),
    "job": (str, "a name"),
    "attempt": (int, _WHOLE),
    "transport": (str, "auto, tcp or verbs"),
    "connect_timeout": (float, _SECONDS),
    "heartbeat_timeout": (float, _SECONDS),
    "stall_warning": (float, _SECONDS),
    "step_timeout": (float, _SECONDS),
    "partition_bytes": (int, _WHOLE),
    "ordered": (_flag, "0 or 1"),
    "show_plan": (_flag, "0 or 1"),
    "trace_dir": (str, "a folder"),
    "metrics": (str, "a port, or host:port"),
    "spin_us": (int, _WHOLE),
    "fault": (str, "whose and what"),
    "checkpoint": (str, "a folder"),
    "checkpoint_steps": (int, _WHOLE),
    "checkpoint_seconds": (float, _SECONDS),
    "checkpoint_keep": (int, _WHOLE),
    "checkpoint_restore": (str, "auto, never or new-update"),
    "replicate": (int, "0 or 1"),
    "device": (_names, "names of RDMA devices"),
    "port": (int, _WHOLE),
    "gid_index": (int, _WHOLE),
    "pkey_index": (int, _WHOLE),
    "service_level": (int, _WHOLE),
    "traffic_class": (int, _WHOLE),
    "timeout": (int, _WHOLE),
    "retry_count": (int, _WHOLE),
    "link_timeout": (float, _SECONDS),
}
# Read by the native module itself.
NATIVE_VARIABLES = ("JAXRDMA_IBVERBS_LIB",)


def _nearest(name: str, known: "tuple[str, ...] | list[str]") -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else f"; there are {', '.join(known)}"


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}: expected at least {least}")
