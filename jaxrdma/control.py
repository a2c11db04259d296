"""The control plane: its messages, and the client that a worker or a server keeps open to the coordinator.

One bidirectional gRPC stream per process, `/jaxrdma.Control/Attend`, carries msgpack-encoded structs both ways. The end
of a stream without a `Bye` means that the process is gone. Tensors never travel here.
"""

import atexit
import errno
import ipaddress
import os
import platform
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

# gRPC reads these when it is imported. Its own log lines at fork and exit say nothing that our errors do not.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

from jaxrdma.cluster import ClusterSpec, parse_address
from jaxrdma.errors import (
    CancelledError,
    ConnectError,
    JaxRdmaError,
    MismatchError,
    PeerFailedError,
    TransportError,
)
from jaxrdma.policy import Wire

# Equal in all processes of a job, or they refuse each other: the control messages, the data wire format and the plan's
# rules may change with any release.
VERSION = "0.1.0"

METHOD = "/jaxrdma.Control/Attend"
MAX_MESSAGE_BYTES = 256 << 20

# Of both sides: nothing is ever behind a proxy; a lost stream is a lost process and must not be retried away; two
# coordinators must not share a port; the pings only clear away the connections of hosts that vanished, which heartbeats
# have reported long before.
GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

PROGRESS_SECONDS = 3.0  # between two texts on what is being waited for
_PROBE_SECONDS = 5.0  # for one attempt to connect
_ANSWER_SECONDS = 15.0  # for the coordinator to answer a hello, once its port is open
_RETRY_SECONDS = 0.1
_GRACE_SECONDS = 2.0  # for the coordinator's own, better explained deadline to arrive first
_PAUSE_SECONDS = 2.0  # a heartbeat this late means that this process itself was stopped


class LeafSpec(msgspec.Struct, frozen=True):
    """One array of a parameter tree: its path in the tree, its shape and its dtype's name."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class SaveRule(msgspec.Struct, frozen=True):
    """When a server saves: every `steps` steps, every `seconds` seconds; 0: not by this. And at the end."""

    steps: int
    seconds: float


class ShardFile(msgspec.Struct, frozen=True):
    """One server's file of a checkpoint: its whole length, that of the index at its end, and the index's checksum."""

    name: str
    bytes: int
    index_bytes: int
    checksum: int


# --- client to coordinator ---


class Offer(msgspec.Struct, frozen=True):
    """How a process can move tensors.

    `wanted`: "auto", "tcp" or "verbs"; `verbs`: whether verbs will do for it; `why`: if not, as in "worker 1 `why`".
    """

    wanted: str
    verbs: bool
    why: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a stream: who I am, what I can do, and what I take for granted.

    A `role` may also be "launcher": one attends for each machine of a job on several; `index` and `offer` say nothing.
    """

    role: str
    index: int
    incarnation: int
    version: str
    job: str
    secret: str
    host: str
    pid: int
    offer: Offer
    settings: dict[str, int | bool]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """I live, `step` is the last step done (-1: none), `state` a word or two on what I do."""

    step: int
    state: str


class FlowProposal(msgspec.Struct, frozen=True, tag="flow_proposal"):
    """A worker's model number `flow`.

    `policy`: resolved, as `policy.to_wire` writes it. `programs` is the chief's alone: one opaque update program per
    server.
    """

    flow: int
    leaves: list[LeafSpec]
    digest: str
    mode: str
    policy: Wire
    update_fingerprint: str
    programs: list[bytes] = []


class Admitting(msgspec.Struct, frozen=True, tag="admitting"):
    """A server has read its roster and lets the workers' data connections in, at `address` ("host:port")."""

    address: str


class FlowReady(msgspec.Struct, frozen=True, tag="flow_ready"):
    """A server's landing memory and update for `flow` stand ready.

    - `holds`: whether any of its parameters lie there.
    - `rule`: of its checkpoints; `None`: it saves none.
    - `found`: steps of checkpoints that it could restore; `damaged`: a text on each that it could not.
    """

    flow: int
    holds: bool = True
    rule: SaveRule | None = None
    found: list[int] = []
    damaged: list[str] = []


class GradientName(msgspec.Struct, frozen=True, array_like=True):
    """One gradient: those of an incarnation of a worker are numbered from 0, in the order of their pushes."""

    worker: int
    incarnation: int
    sequence: int


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """A server holds all that it gets of `gradient`, which was computed on the parameters of `step`."""

    flow: int
    gradient: GradientName
    step: int


class Restored(msgspec.Struct, frozen=True, tag="restored"):
    """A server has read its share of the checkpoint of `step`, or could not: `problem`."""

    flow: int
    step: int
    problem: str = ""


class ShardSaved(msgspec.Struct, frozen=True, tag="shard_saved"):
    """A server's file of `step` is on the disk. `last`: answers the `SaveAt` of the job's end."""

    flow: int
    step: int
    shard: ShardFile
    last: bool = False


class SaveMissed(msgspec.Struct, frozen=True, tag="save_missed"):
    """A server will have no file of `step`; it has `reached` that or a later one.

    `problem`: why, if people must know; `skipped`: that is only an earlier save that was not done. `last`: answers the
    `SaveAt` of the job's end.
    """

    flow: int
    step: int
    reached: int
    problem: str = ""
    last: bool = False
    skipped: bool = False


class SaveCommitted(msgspec.Struct, frozen=True, tag="save_committed"):
    """The files of `step` are a checkpoint, or could not be made one: `problem`. `last`: as in `SaveCommit`."""

    flow: int
    step: int
    problem: str = ""
    last: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The sender cannot go on. Of kind "connection", the cause may be another process that is just dying."""

    kind: str
    text: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A worker is done, after `step`."""

    step: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Of a launcher: a server or worker that it started ended, `how` ("ended with exit code 5"), well or not."""

    role: str
    index: int
    pid: int
    how: str
    well: bool


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The stream ends now, in good order."""


# --- coordinator to client ---


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The hello was accepted."""

    num_workers: int
    num_servers: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hello was not accepted; the stream ends.

    Kinds: secret, job, version, role, index, settings, duplicate, failed, protocol.
    """

    kind: str
    text: str


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Whom a start-up or a new model waits for, and since when."""

    text: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The coordinator lives."""


class ServerEntry(msgspec.Struct, frozen=True):
    """A server in the roster. `tokens`: by worker, what the worker shows to be let in.

    `address` is empty in what a server gets: none listens before it knows whom it may let in.
    """

    index: int
    address: str
    incarnation: int
    tokens: dict[int, bytes]


class WorkerEntry(msgspec.Struct, frozen=True):
    """A worker in the roster."""

    index: int
    host: str
    pid: int
    incarnation: int


class Roster(msgspec.Struct, frozen=True, tag="roster"):
    """Everybody is here, and tensors move by `transport`, because of `why`.

    A worker is told its own tokens alone, a server the tokens for itself alone.

    Workers get it when every server has answered it with `Admitting`, so that none knocks before it is expected.
    """

    servers: list[ServerEntry]
    workers: list[WorkerEntry]
    transport: str
    why: str


class FlowAgreed(msgspec.Struct, frozen=True, tag="flow_agreed"):
    """All workers proposed the same. `program`: for a server, the update for its shard, if there is one."""

    flow: int
    leaves: list[LeafSpec]
    digest: str
    mode: str
    policy: Wire
    update_fingerprint: str
    program: bytes | None = None


class FlowStart(msgspec.Struct, frozen=True, tag="flow_start"):
    """Every server is ready for `flow`. `restored`: the step of the checkpoint that it goes on from; `text` says so."""

    flow: int
    restored: int | None = None
    text: str = ""


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """To a server: read your share of the checkpoint of `step`."""

    flow: int
    step: int


LAST = -1  # of SaveAt


class SaveAt(msgspec.Struct, frozen=True, tag="save_at"):
    """To a server: save `step`, if you have not passed it; `LAST`: the step that you are at, for the job is over."""

    flow: int
    step: int


class SaveCommit(msgspec.Struct, frozen=True, tag="save_commit"):
    """To one server: all files of `step` are on the disk. Write the manifest. `last`: as in their `ShardSaved`."""

    flow: int
    step: int
    shards: list[ShardFile]
    last: bool = False


class SaveEnded(msgspec.Struct, frozen=True, tag="save_ended"):
    """To a server: `step` is a checkpoint, or, not being `saved`, is none: remove what you have of it.

    `last`: speaks of the save of the job's end, which may be of a step that was skipped or failed before.
    """

    flow: int
    step: int
    saved: bool
    last: bool = False


class Mean(msgspec.Struct, frozen=True, tag="mean"):
    """These gradients, summed in this order, make the mean that leads from `step` to the next."""

    step: int
    gradients: list[GradientName]


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """This gradient is in no mean."""

    gradient: GradientName


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The worker of this gradient gets the parameters of `step`, and is told whether its gradient counts."""

    gradient: GradientName
    step: int
    accepted: bool


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """To every server that holds a part of `flow`, the same in the same order: what becomes of gradients."""

    flow: int
    decisions: list[Mean | Dropped | Answered]


class FlowRejected(msgspec.Struct, frozen=True, tag="flow_rejected"):
    """The workers' models differ; the job has failed."""

    flow: int
    text: str


class MemberLeft(msgspec.Struct, frozen=True, tag="member_left"):
    """A worker ended in good order, after `step`."""

    role: str
    index: int
    step: int


class JobFailed(msgspec.Struct, frozen=True, tag="job_failed"):
    """The job cannot go on. `text` names the first cause, `role` and `index` whose it is.

    Kinds: died, silent, left, timeout, connection, protocol, interrupted, mismatch, transport, checkpoint,
    coordinator_lost, and whatever kind a member gave in `Failed`.
    """

    kind: str
    text: str
    role: str
    index: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """To a server: all workers are done. To a launcher: all servers are, too."""


ClientMessage = (
    Hello
    | Heartbeat
    | Admitting
    | FlowProposal
    | FlowReady
    | Landed
    | Restored
    | ShardSaved
    | SaveMissed
    | SaveCommitted
    | Failed
    | Left
    | Ended
    | Bye
)
CoordinatorMessage = (
    Welcome
    | Refused
    | Waiting
    | Alive
    | Roster
    | FlowAgreed
    | FlowStart
    | Decided
    | Restore
    | SaveAt
    | SaveCommit
    | SaveEnded
    | FlowRejected
    | MemberLeft
    | JobFailed
    | Shutdown
)
Message = CoordinatorMessage

encode = msgspec.msgpack.Encoder().encode
decode_client = msgspec.msgpack.Decoder(ClientMessage).decode
decode_coordinator = msgspec.msgpack.Decoder(CoordinatorMessage).decode


def job_error(message: JobFailed | FlowRejected) -> JaxRdmaError:
    """The exception that tells what `message` tells."""
    if isinstance(message, FlowRejected) or message.kind == "mismatch":
        return MismatchError(message.text)
    if message.kind == "timeout":
        return ConnectError(message.text)
    if message.kind == "transport":
        return TransportError(message.text)
    return PeerFailedError(message.text, kind=message.kind, role=message.role, index=message.index)


def say_on_stderr(text: str) -> None:
    """One plain line on standard error."""
    print(f"jaxrdma: {text}", file=sys.stderr, flush=True)


def _ignore(message: Message) -> None:
    del message


def _no_progress() -> tuple[int, str]:
    return -1, "started"


def _tcp_alone() -> Offer:
    return Offer("tcp", verbs=False, why="asks for tcp")


class ControlClient:
    """A process's place in its job: the open stream to the coordinator, and the two threads that serve it.

    `jaxrdma-control` reads; `jaxrdma-heartbeat` tells every second that this process lives, and notices a coordinator
    that fell silent. Methods may be called from any thread. A context manager.

    **Arguments:**

    - `spec`, `role`, `index`: the cluster, and who this is in it.
    - `incarnation`: a number that no other life of this process has.
    - `on_message`: called on the reading thread with every `JobFailed`, `MemberLeft`, `Shutdown` and flow message, in
      their order. It must be quick, and may call any method here but `reach`, `join`, `wait` and `leave`. The loss of
      the coordinator arrives as `JobFailed(kind="coordinator_lost")`.
    - `say`: prints one line of progress.
    - `offer`: how this process can move tensors; asked for once the coordinator can be reached, so that there is a
      route to it. What it raises, `join` raises.
    - `progress`: the last step done (-1: none) and a word on what this process does, for the heartbeats.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        role: str,
        index: int,
        incarnation: int,
        on_message: Callable[[Message], None] = _ignore,
        say: Callable[[str], None] = say_on_stderr,
        progress: Callable[[], tuple[int, str]] = _no_progress,
        offer: Callable[[], Offer] = _tcp_alone,
    ) -> None:
        self._spec = spec
        self._offer = offer
        self._on_message = on_message
        self._say = say
        self._progress = progress
        self._hello = Hello(
            role=role,
            index=index,
            incarnation=incarnation,
            version=VERSION,
            job=spec.job,
            secret=spec.secret,
            host=platform.node(),
            pid=os.getpid(),
            offer=_tcp_alone(),
            settings=spec.shared_settings(),
        )
        # Guards everything below; notified whenever something arrived or the stream ended.
        self._condition = threading.Condition()
        self._stream: _Stream | None = None
        self._welcomed = False
        self._roster: Roster | None = None
        self._refusal: Refused | None = None
        self._failure: JobFailed | FlowRejected | None = None
        self._inbox: list[Message] = []
        self._waiting_text = ""
        self._leaving = False
        self._heard = 0.0
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None
        # Closing needs the threads and gRPC, so it must come before the interpreter takes them down; and a forked child
        # must let go of the stream, or the death of this process would go unseen as long as the child lives.
        reference: weakref.ref[ControlClient] = weakref.ref(self)
        self._at_exit = lambda: _if_alive(reference, ControlClient.close)
        atexit.register(self._at_exit)
        os.register_at_fork(
            after_in_child=lambda: _if_alive(reference, ControlClient._forget_stream)
        )

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> JaxRdmaError | None:
        """Why the job cannot go on, or None."""
        with self._condition:
            return None if self._failure is None else job_error(self._failure)

    def reach(self) -> float:
        """Reach the coordinator, in any order of starts, and be welcomed.

        **Returns:** the time at which `connect_timeout` will be over, as `time.monotonic` gives it.

        **Raises:** `ConnectError` after `connect_timeout` seconds, or if the coordinator refused; `MismatchError` if it
        refused for a version or setting.
        """
        begin = time.monotonic()
        deadline = begin + self._spec.connect_timeout
        said = begin
        while (problem := self._try_hello(deadline)) is not None:
            now = time.monotonic()
            text = f"the coordinator at {self._spec.coordinator}: {problem}, {now - begin:.0f} s"
            if now >= deadline:
                raise ConnectError(
                    f"{self._who()} gave up on {text}. Is it started, and is JAXRDMA_COORDINATOR its address?"
                )
            if now - said >= PROGRESS_SECONDS:
                self._say(f"waiting for {text}")
                said = now
            if self._stop.wait(_RETRY_SECONDS):
                raise CancelledError(
                    f"{self._who()} was closed while it waited for the coordinator"
                )
        return deadline

    def join(self) -> Roster:
        """`reach`, and wait until the job is complete.

        **Raises:** as `reach`; `ConnectError` also if that takes longer, naming who is missing; `PeerFailedError` if
        another process failed meanwhile.
        """
        deadline = self.reach()
        with self._condition:
            self._condition.wait_for(
                lambda: self._roster is not None or self._over(),
                deadline + _GRACE_SECONDS - time.monotonic(),
            )
            if self._roster is not None:
                return self._roster
            if self._failure is not None:
                raise job_error(self._failure)
            if self._stop.is_set():
                raise CancelledError(f"{self._who()} was closed while it waited for the others")
            raise ConnectError(
                f"{self._who()} gave up after {self._spec.connect_timeout:.0f} s: "
                f"{self._waiting_text or 'the coordinator did not say for whom it waits'}"
            )

    def send(self, message: ClientMessage) -> None:
        """Queue `message`. Dropped if the stream has ended: `on_message` has told why."""
        stream = self._stream
        if stream is not None and os.getpid() == self._hello.pid:
            stream.outgoing.put(encode(message))

    def wait(self, predicate: Callable[[Message], bool], timeout: float | None = None) -> Message:
        """The first message of which `predicate` holds, each given once: flow messages, departures and `Shutdown`.

        **Raises:** the job's failure, if it comes first; `ConnectError` after `timeout` seconds; `CancelledError` if
        this client is closed.
        """
        found: list[Message] = []

        def look() -> bool:
            for i, message in enumerate(self._inbox):
                if predicate(message):
                    found.append(self._inbox.pop(i))
                    return True
            return self._over()

        with self._condition:
            ended = self._condition.wait_for(look, timeout)
            if found:
                return found[0]
            if self._failure is not None:
                raise job_error(self._failure)
            if ended:
                raise CancelledError(
                    f"{self._who()} was closed while it waited for the coordinator's answer"
                )
            raise ConnectError(
                f"{self._who()} had no answer from the coordinator at {self._spec.coordinator} for {timeout:.0f} s; "
                f"last heard: {self._waiting_text or 'nothing'}"
            )

    def leave(self, step: int, timeout: float = 5.0) -> None:
        """Say that this process is done after `step`, and wait until the coordinator has taken note. Then `close`."""
        with self._condition:
            stream = self._stream
            self._leaving = True
            if stream is not None and not self._over():
                self.send(Left(step))
                self.send(Bye())
                stream.finish()
                self._condition.wait_for(self._over, timeout)
        self.close()

    def close(self) -> None:
        """End the stream and the threads, within about a second. What was sent before still arrives. Idempotent.

        Without `leave`, the others take it for the death of this process, unless a `Failed` was sent.
        """
        if os.getpid() != self._hello.pid:
            return
        self._stop.set()
        with self._condition:
            self._leaving = True
            stream = self._stream
            self._condition.notify_all()
            if stream is not None:
                stream.finish()
                if threading.current_thread() is not stream.reader:
                    self._condition.wait_for(lambda: stream.ended, 1.0)
        if stream is not None:
            stream.close()
        if self._heart is not None and threading.current_thread() is not self._heart:
            self._heart.join(2.0)
        atexit.unregister(self._at_exit)

    def _who(self) -> str:
        role = self._hello.role
        return role if role == "launcher" else f"{role} {self._hello.index}"

    def _over(self) -> bool:
        return (
            self._failure is not None
            or self._stop.is_set()
            or self._stream is None
            or self._stream.ended
        )

    def _try_hello(self, deadline: float) -> str | None:
        """One attempt. None once welcomed, else what was wrong. Raises if refused: trying again would not help."""
        try:
            target = _probe(
                self._spec.coordinator, min(_PROBE_SECONDS, max(0.1, deadline - time.monotonic()))
            )
        except OSError as error:
            return _describe(error)
        self._hello = msgspec.structs.replace(self._hello, offer=self._offer())
        stream = _Stream(target)
        with self._condition:
            self._stream = stream
        stream.outgoing.put(encode(self._hello))
        stream.start(self._receive, self._stream_ended)
        patience = min(_ANSWER_SECONDS, max(0.5, deadline - time.monotonic()))
        with self._condition:
            self._condition.wait_for(
                lambda: self._welcomed or self._refusal is not None or self._over(), patience
            )
            refusal, welcomed, ended = self._refusal, self._welcomed, stream.ended
        if welcomed:
            self._heart = threading.Thread(target=self._beat, name="jaxrdma-heartbeat", daemon=True)
            self._heart.start()
            return None
        stream.close()
        if refusal is not None:
            text = (
                f"the coordinator at {self._spec.coordinator} refused {self._who()}: {refusal.text}"
            )
            raise (
                MismatchError(text)
                if refusal.kind in ("version", "settings")
                else ConnectError(text)
            )
        if ended:
            return f"the connection ended before an answer ({stream.reason or 'no reason given'})"
        return "its port is open, but nothing answers like a coordinator of jaxrdma"

    def _receive(self, stream: "_Stream", data: bytes) -> None:
        message = decode_coordinator(data)
        with self._condition:
            if stream is not self._stream:
                return  # of an attempt that was given up
            self._heard = time.monotonic()
            match message:
                case Alive():
                    return
                case Waiting():
                    self._waiting_text = message.text
                case Welcome():
                    self._welcomed = True
                case Refused():
                    self._refusal = message
                case Roster():
                    self._roster = message
                case JobFailed() | FlowRejected():
                    if self._failure is not None:
                        return
                    self._failure = message
                case Restore() | SaveAt() | SaveCommit() | SaveEnded():
                    pass  # nobody waits for these, and a long job has many
                case _:
                    self._inbox.append(message)
            self._condition.notify_all()
        match message:
            case Waiting():
                self._say(message.text)
            case Welcome() | Refused() | Roster():
                pass
            case _:
                self._deliver(message)

    def _stream_ended(self, stream: "_Stream", reason: str) -> None:
        with self._condition:
            stream.reason = reason
            stream.ended = True
            lost = stream is self._stream and self._welcomed and not self._leaving
        if lost:
            self._coordinator_lost(reason or "its connection ended without a word")
        with self._condition:
            self._condition.notify_all()

    def _coordinator_lost(self, why: str) -> None:
        text = (
            f"the coordinator at {self._spec.coordinator} is lost: {why}. "
            "Look at its output and its machine; the job must be started again."
        )
        message = JobFailed("coordinator_lost", text, "coordinator", -1)
        with self._condition:
            if self._failure is not None or self._leaving:
                return
            self._failure = message
            self._condition.notify_all()
        self._deliver(message)

    def _deliver(self, message: Message) -> None:
        with self._condition:
            self._heard = float("inf")  # while the callback runs, silence is our own
        try:
            self._on_message(message)
        except Exception as error:  # the stream must go on being read
            self._say(f"{self._who()}: error while handling {type(message).__name__}: {error!r}")
        with self._condition:
            self._heard = time.monotonic()

    def _beat(self) -> None:
        timeout = self._spec.heartbeat_timeout
        interval = min(1.0, timeout / 4)
        last = time.monotonic()
        while not self._stop.wait(interval):
            now = time.monotonic()
            with self._condition:
                if now - last > interval + _PAUSE_SECONDS:
                    self._heard = now  # it was us who stood still
                silent = now - self._heard
                stream = self._stream
            last = now
            if stream is None or stream.ended:
                return
            if silent > timeout:
                self._coordinator_lost(f"silent for {silent:.0f} s")
                stream.close()
                return
            step, state = self._progress()
            self.send(Heartbeat(step, state))

    def _forget_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.drop_in_child()


class _Stream:
    """One attempt at the stream: its channel, its queue of outgoing messages, its reading thread."""

    def __init__(self, target: str) -> None:
        self.outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.ended = False
        self.reason = ""
        self.reader: threading.Thread | None = None
        self._target = target
        # gRPC's Python package has no type information.
        self._channel: Any = cast(Any, grpc).insecure_channel(target, options=GRPC_OPTIONS)
        # gRPC's own two threads of this call. They are daemons; one that the end of the interpreter catches while it
        # holds the call's lock would let the call's destructor wait for ever. So `close` joins them.
        self._threads: list[threading.Thread] = []
        self._done = threading.Event()
        self._call: Any = self._channel.stream_stream(METHOD)(self._requests())
        self._call.add_done_callback(self._finished)

    def _requests(self) -> Iterator[bytes]:
        self._threads.append(threading.current_thread())
        yield from iter(self.outgoing.get, None)

    def _finished(self, call: object) -> None:
        del call
        self._threads.append(threading.current_thread())
        self._done.set()

    def start(
        self,
        receive: "Callable[[_Stream, bytes], None]",
        ended: "Callable[[_Stream, str], None]",
    ) -> None:
        def read() -> None:
            reason = ""
            try:
                for data in cast(Iterator[bytes], self._call):
                    receive(self, data)
            except grpc.RpcError as error:
                reason = str(cast(Any, error).details())
            except msgspec.MsgspecError as error:
                reason = f"it sent what no coordinator of version {VERSION} sends: {error}"
            ended(self, reason)

        self.reader = threading.Thread(target=read, name="jaxrdma-control", daemon=True)
        self.reader.start()

    def finish(self) -> None:
        """Half-close: what is queued still goes out."""
        self.outgoing.put(None)

    def close(self) -> None:
        self.outgoing.put(None)
        self._call.cancel()
        if self.reader is not None and threading.current_thread() is not self.reader:
            self.reader.join(2.0)
        self._channel.close()
        self._done.wait(1.0)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(1.0)

    def drop_in_child(self) -> None:
        """In a forked child: put /dev/null in the place of the sockets that lead to the coordinator."""
        host, port = parse_address(self._target.partition(":")[2])
        for entry in list(Path("/proc/self/fd").iterdir()):
            try:
                fd = int(entry.name)
                with socket.socket(fileno=os.dup(fd)) as copy:
                    peer = copy.getpeername()
            except OSError:
                continue  # no socket, or not connected
            if (
                not isinstance(peer, tuple)
                or len(cast(tuple[Any, ...], peer)) < 2
                or peer[1] != port
            ):
                continue
            if _plain_ip(str(cast(Any, peer)[0])) == _plain_ip(host):
                null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(null, fd, inheritable=False)
                os.close(null)


def _probe(address: str, timeout: float) -> str:
    """The address that a connection to `address` really reaches, as gRPC writes it. OSError says why it cannot.

    A plain socket first, because its errors name the errno; and gRPC is then given no name to resolve.
    """
    with socket.create_connection(parse_address(address, "coordinator"), timeout) as sock:
        host, port = sock.getpeername()[:2]
        return f"ipv6:[{host}]:{port}" if sock.family == socket.AF_INET6 else f"ipv4:{host}:{port}"


def _describe(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"its host name does not resolve ({error.strerror})"
    if isinstance(error, TimeoutError) or error.errno is None:
        return str(error) or "no answer"
    return os.strerror(error.errno).lower() + (
        "" if error.errno == errno.ECONNREFUSED else f" (errno {error.errno})"
    )


def _plain_ip(host: str) -> str:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def _if_alive(
    reference: "weakref.ref[ControlClient]", method: Callable[[ControlClient], None]
) -> None:
    client = reference()
    if client is not None:
        method(client)
