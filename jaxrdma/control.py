"""The control plane: its messages, and the client that a worker or a server keeps open to the coordinator.

One bidirectional gRPC stream per process, `/jaxrdma.Control/Attend`, carries msgpack-encoded structs both ways. The end
of a stream without a `Bye` means that the process is gone. Tensors never travel here.
"""

import asyncio
import atexit
import contextlib
import errno
import ipaddress
import os
import platform
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec

# gRPC reads these when it is imported. Its own log lines at fork and exit say nothing that our errors do not.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

from jaxrdma.clocks import Offset
from jaxrdma.cluster import ClusterSpec, Missed, TlsFiles, parse_address
from jaxrdma.dump import Dump
from jaxrdma.errors import (
    CancelledError,
    ConfigError,
    ConnectError,
    JaxRdmaError,
    MismatchError,
    PeerFailedError,
    PlanError,
    TransportError,
    UpdateError,
)
from jaxrdma.policy import Wire
from jaxrdma.tls import ALL_OR_NONE, Identity, TlsError, speaks_tls

T = TypeVar("T")

# So many followers may attend at a time: each may cost every server a copy of its part of each model.
MOST_FOLLOWERS = 64

# Equal in all processes of a job, or they refuse each other: the control messages, the data wire format and the plan's
# rules may change with any release.
VERSION = "0.1.0"

METHOD = "/jaxrdma.Control/Attend"
MAX_MESSAGE_BYTES = 256 << 20

# Of both sides: nothing is ever behind a proxy; a lost stream is a lost process and must not be retried away; two
# coordinators must not share a port; the pings only clear away the connections of hosts that vanished, which heartbeats
# have reported long before. They are rare, as each of them wakes half a dozen threads on either side.
GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A probe of the bandwidth with every message wakes as many, for streams of heartbeats.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", 600_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

# The job's secret goes ahead of a stream, in the metadata of its call: gRPC bounds those to some KiB, and nothing is
# read of a stream whose secret is wrong, so that a stranger cannot make the coordinator take in MAX_MESSAGE_BYTES.
SECRET_KEY = "jaxrdma-secret-bin"  # "-bin": any bytes

PROGRESS_SECONDS = 3.0  # between two texts on what is being waited for
_PROBE_SECONDS = 5.0  # for one attempt to connect
_ANSWER_SECONDS = 15.0  # for the coordinator to answer a hello, once its port is open
_RETRY_SECONDS = 0.1
_GRACE_SECONDS = 2.0  # for the coordinator's own, better explained deadline to arrive first
# Who rests looks so often whether it still does: whoever works again is heard soon.
_LOOK_SECONDS = 2.5
# What a firewall that refuses, or a missing route, makes of an attempt to connect.
_REJECTED = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM)
# A heartbeat this late, or a quarter of what others bear, means that this process itself was stopped.
_PAUSE_SECONDS = 2.0
_WAKING_SECONDS = 5.0  # so long after a sleep its consequences may still arrive


# Numbers off the wire that are reckoned with: beyond these they are refused where a message is read. -1: none.
Step = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
# And those that go on into the native module, which has no room for others.
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]  # of a worker or server
FollowerNumber = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 32) - (1 << 16))]
FlowNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
SequenceNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class LeafSpec(msgspec.Struct, frozen=True):
    """One array of a parameter tree: its path in the tree, its shape and its dtype's name."""

    path: str
    shape: tuple[Count, ...]
    dtype: str


class SaveRule(msgspec.Struct, frozen=True):
    """When a server saves: every `steps` steps, every `seconds` seconds; 0: not by this. And at the end."""

    steps: Count
    seconds: float


class ShardFile(msgspec.Struct, frozen=True):
    """One server's file of a checkpoint: its whole length, that of the index at its end, and the index's checksum."""

    name: str
    bytes: Count
    index_bytes: Count
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

    A `role` may also be "launcher": one attends for each machine of a job on several; `index` and `offer` say nothing,
    and `attempt` is the one that it waits for, while it takes part in any later one.
    Of a launcher, `spare`: all that it starts are workers in spare places, so that the job can do without it.
    Or "follower": takes parameters and gives nothing; `index`, `offer`, `settings` and `attempt` say nothing.
    Or "observer": is answered with one `JobStatus`, and that is all; nothing but `version` and `job` counts.
    Or "tracer": is answered with `Tracing`, and with a `Traced` of each process that it names, of the last `index`
    steps.
    """

    role: str
    index: Count
    incarnation: Incarnation
    version: str
    job: str
    host: str
    pid: int
    offer: Offer
    settings: dict[str, Count | bool]
    attempt: Count = 0
    spare: bool = False


IN_STEP = "in a step"  # the state of a worker that waits for servers
JOINS = "joining"  # of one that is not connected to all of them yet


class Wait(msgspec.Struct, frozen=True):
    """What a worker has waited for longest: the answer to a partition, which is at this stage of its way."""

    flow: FlowNumber
    step: Step
    server: Index
    partition: Count
    stage: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """I live, `step` is the last step done (-1: none), `state` a word or two on what I do.

    Once that has been so for two heartbeats, also where: `wait`, or `doing`, a line of the program. `sent`, `received`:
    bytes of gradients and parameters so far. `refused`: connections to its data port that it has turned away so far.
    """

    step: Step
    state: str
    wait: Wait | None = None
    doing: str = ""
    sent: Count = 0
    received: Count = 0
    refused: Count = 0


class FlowProposal(msgspec.Struct, frozen=True, tag="flow_proposal"):
    """A worker's model number `flow`.

    - `mode`: "update": the servers hold its parameters; "average": they form means; "ema": they hold the moving
      averages of the parameters of the model before this one, for which only followers ask; "table": single rows are
      looked up and trained, of a table that `update_fingerprint` describes (`embedding.TableSettings`).
    - `policy`: resolved, as `policy.to_wire` writes it.
    - `programs`: the chief's alone: one opaque update program per server.
    - `averaged`: the next model is this one's averages.
    """

    flow: FlowNumber
    leaves: list[LeafSpec]
    digest: str
    mode: str
    policy: Wire
    update_fingerprint: str
    programs: list[bytes] = []
    averaged: bool = False


class Admitting(msgspec.Struct, frozen=True, tag="admitting"):
    """A server has read its roster and lets the workers' data connections in, at `address` ("host:port").

    `mirror`: where it lets in the server whose part it keeps a copy of; empty without `replicate`.
    """

    address: str
    mirror: str = ""


class FlowReady(msgspec.Struct, frozen=True, tag="flow_ready"):
    """A server's landing memory and update for `flow` stand ready.

    - `holds`: whether any of its parameters lie there.
    - `rule`: of its checkpoints; `None`: it saves none.
    - `found`: steps of checkpoints that it could restore; `damaged`: a text on each that it could not.
    """

    flow: FlowNumber
    holds: bool = True
    rule: SaveRule | None = None
    found: list[Step] = []
    damaged: list[str] = []


class GradientName(msgspec.Struct, frozen=True, array_like=True):
    """One gradient: those of an incarnation of a worker are numbered from 0, in the order of their pushes."""

    worker: Index
    incarnation: Incarnation
    sequence: SequenceNumber


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """A server holds all that it gets of `gradient`, which was computed on the parameters of `step`."""

    flow: FlowNumber
    gradient: GradientName
    step: Step


class Restored(msgspec.Struct, frozen=True, tag="restored"):
    """A server has read its share of the checkpoint of `step`, or could not: `problem`."""

    flow: FlowNumber
    step: Step
    problem: str = ""


class ShardSaved(msgspec.Struct, frozen=True, tag="shard_saved"):
    """A server's file of `step` is on the disk. `last`: answers the `SaveAt` of the job's end."""

    flow: FlowNumber
    step: Step
    shard: ShardFile
    last: bool = False


class SaveMissed(msgspec.Struct, frozen=True, tag="save_missed"):
    """A server will have no file of `step`; it has `reached` that or a later one.

    `problem`: why, if people must know; `skipped`: that is only an earlier save that was not done. `last`: answers the
    `SaveAt` of the job's end.
    """

    flow: FlowNumber
    step: Step
    reached: Step
    problem: str = ""
    last: bool = False
    skipped: bool = False


class SaveCommitted(msgspec.Struct, frozen=True, tag="save_committed"):
    """The files of `step` are a checkpoint, or could not be made one: `problem`. `last`: as in `SaveCommit`."""

    flow: FlowNumber
    step: Step
    problem: str = ""
    last: bool = False


class HeldPart(msgspec.Struct, frozen=True):
    """The part of a model that lies on `server`, or the copy of it: of these steps the sender could save it."""

    flow: FlowNumber
    server: Index
    steps: list[Step]


class Held(msgspec.Struct, frozen=True, tag="held"):
    """The answer to `Rescue`: a server begins no other step, and holds this."""

    parts: list[HeldPart]


class RescueSaved(msgspec.Struct, frozen=True, tag="rescue_saved"):
    """The answer to `RescueSave`: a server's files of `step` are on the disk, or not: `problem`."""

    flow: FlowNumber
    step: Step
    shards: list[ShardFile]
    problem: str = ""


class RescueCommitted(msgspec.Struct, frozen=True, tag="rescue_committed"):
    """The answer to `RescueCommit`: `step` is a checkpoint, or could not be made one: `problem`."""

    flow: FlowNumber
    step: Step
    problem: str = ""


class LostWorker(msgspec.Struct, frozen=True, tag="lost_worker"):
    """A server has lost its data connection to this life of worker `index`, without a goodbye; `text` says how."""

    index: Index
    incarnation: Incarnation
    text: str


class WorkerAdmitted(msgspec.Struct, frozen=True, tag="worker_admitted"):
    """The answer to an `AdmitWorker`: a server lets it in, or cannot: `problem`."""

    index: Index
    incarnation: Incarnation
    problem: str = ""


class FollowerAdmitted(msgspec.Struct, frozen=True, tag="follower_admitted"):
    """A server lets follower `number` in; or will not, or not any longer: `problem`."""

    number: FollowerNumber
    problem: str = ""


class Traced(msgspec.Struct, frozen=True, tag="traced"):
    """What a worker or server recorded: the answer to the `SendTrace` of this number, which goes on to who asked."""

    number: Count
    dump: Dump


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The sender cannot go on. Of kind "connection", the cause may be another process that is just dying."""

    kind: str
    text: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A worker is done, after `step`."""

    step: Step


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Of a launcher: a server or worker that it started ended, `how` ("ended with exit code 5"), well or not."""

    role: str
    index: Index
    pid: int
    how: str
    well: bool


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The stream ends now, in good order."""


# --- coordinator to client ---


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The hello was accepted, to this attempt of the job. `time_ns`: as of `Alive`.

    `num_workers`, `num_servers`: with so many it begins.
    """

    num_workers: int
    num_servers: int
    attempt: int = 0
    time_ns: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hello was not accepted; the stream ends.

    Kinds: secret, job, version, attempt, early, role, index, settings, transport, duplicate, failed, ended, full,
    protocol.
    "early": the coordinator is of an older attempt than the sender, and another will take its place.
    """

    kind: str
    text: str
    attempt: int = 0


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Whom a start-up, a new model, or a step that takes long waits for, and since when."""

    text: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The coordinator lives: the answer to a heartbeat. `time_ns`: of its clock, since 1970, as this is sent."""

    time_ns: int = 0


class SendTrace(msgspec.Struct, frozen=True, tag="send_trace"):
    """To a worker or server: answer with what you recorded of the last `steps` steps of each model; 0: with all."""

    number: Count
    steps: Count


class ServerEntry(msgspec.Struct, frozen=True):
    """A server in the roster. `tokens`: by worker, what the worker shows to be let in.

    `address` is empty in what a server gets: none listens before it knows whom it may let in.
    """

    index: Index
    address: str
    incarnation: Incarnation
    tokens: dict[Count, bytes]


class WorkerEntry(msgspec.Struct, frozen=True):
    """A worker in the roster: one that has a part in the job."""

    index: Index
    host: str
    pid: int
    incarnation: Incarnation


class Keeps(msgspec.Struct, frozen=True):
    """Whose part a server keeps a copy of: another server, in this life of it, which will show `token`."""

    server: Index
    incarnation: Incarnation
    token: bytes


class Roster(msgspec.Struct, frozen=True, tag="roster"):
    """Everybody is here, and tensors move by `transport`, because of `why`.

    A worker is told its own tokens alone, a server the tokens for itself alone. `keeps`: for a server, with
    `replicate`.

    Workers get it when every server has answered it with `Admitting`, so that none knocks before it is expected.
    """

    servers: list[ServerEntry]
    workers: list[WorkerEntry]
    transport: str
    why: str
    keeps: Keeps | None = None


class MirrorAt(msgspec.Struct, frozen=True, tag="mirror_at"):
    """To a server: another one keeps a copy of its part, and expects it at `address`, with `token`."""

    server: Index
    address: str
    token: bytes


class AdmitWorker(msgspec.Struct, frozen=True, tag="admit_worker"):
    """To a server: the place of a lost worker, or a spare one, has this incarnation now, which will show `token`."""

    index: Index
    incarnation: Incarnation
    token: bytes


class AdmitFollower(msgspec.Struct, frozen=True, tag="admit_follower"):
    """To a server: a follower will show `token`. Numbers are given once in the life of a job."""

    number: FollowerNumber
    incarnation: Incarnation
    token: bytes


class DismissFollower(msgspec.Struct, frozen=True, tag="dismiss_follower"):
    """To a server: this follower is gone, or has to go; `why`, for the follower itself."""

    number: FollowerNumber
    why: str


class Follows(msgspec.Struct, frozen=True, tag="follows"):
    """To a follower: every server expects it, by the `tokens` that it finds under its own `number`.

    `settings`: those that all processes of the job share. What was agreed on models so far comes next.
    """

    number: FollowerNumber
    servers: list[ServerEntry]
    transport: str
    why: str
    settings: dict[str, Count | bool]


class FlowAgreed(msgspec.Struct, frozen=True, tag="flow_agreed"):
    """All workers proposed the same. `program`: for a server, the update for its shard, if there is one.

    `mirrored`: the update for the shard that it keeps a copy of.
    """

    flow: FlowNumber
    leaves: list[LeafSpec]
    digest: str
    mode: str
    policy: Wire
    update_fingerprint: str
    program: bytes | None = None
    averaged: bool = False
    mirrored: bytes | None = None


class FlowStart(msgspec.Struct, frozen=True, tag="flow_start"):
    """Every server is ready for `flow`. `restored`: the step of the checkpoint that it goes on from; `text` says so.

    `joined`: to a worker in the place of a lost one, or a spare one: from this step on it has a part in a flow that
    started before.
    """

    flow: FlowNumber
    restored: Step | None = None
    text: str = ""
    joined: Step | None = None


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """To a server: read your share of the checkpoint of `step`."""

    flow: FlowNumber
    step: Step


LAST = -1  # of SaveAt


class SaveAt(msgspec.Struct, frozen=True, tag="save_at"):
    """To a server: save `step`, if you have not passed it; `LAST`: the step that you are at, for the job is over."""

    flow: FlowNumber
    step: Step


class SaveCommit(msgspec.Struct, frozen=True, tag="save_commit"):
    """To one server: all files of `step` are on the disk. Write the manifest. `last`: as in their `ShardSaved`."""

    flow: FlowNumber
    step: Step
    shards: list[ShardFile]
    last: bool = False


class SaveEnded(msgspec.Struct, frozen=True, tag="save_ended"):
    """To a server: `step` is a checkpoint, or, not being `saved`, is none: remove what you have of it.

    `last`: speaks of the save of the job's end, which may be of a step that was skipped or failed before.
    """

    flow: FlowNumber
    step: Step
    saved: bool
    last: bool = False


class Rescue(msgspec.Struct, frozen=True, tag="rescue"):
    """To a server: the job has failed. Begin no other step, and say what could be saved."""


class RescueSave(msgspec.Struct, frozen=True, tag="rescue_save"):
    """To a server: write what `parts`, itself or the server whose copy it keeps, held of `step`."""

    flow: FlowNumber
    step: Step
    parts: list[Index]


class RescueCommit(msgspec.Struct, frozen=True, tag="rescue_commit"):
    """To one server: all files of `step` are on the disk. Write the manifest."""

    flow: FlowNumber
    step: Step
    shards: list[ShardFile]


class Rescuing(msgspec.Struct, frozen=True, tag="rescuing"):
    """To a launcher: the job has failed, and the servers save what they hold. That may take so many seconds."""

    seconds: float


class Mean(msgspec.Struct, frozen=True, tag="mean"):
    """These gradients, summed in this order, make the mean that leads from `step` to the next."""

    step: Step
    gradients: list[GradientName]


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """This gradient is in no mean."""

    gradient: GradientName


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The worker of this gradient gets the parameters of `step`, and is told whether its gradient counts."""

    gradient: GradientName
    step: Step
    accepted: bool


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """To every server that holds a part of `flow`, the same in the same order: what becomes of gradients."""

    flow: FlowNumber
    decisions: list[Mean | Dropped | Answered]


class FlowRejected(msgspec.Struct, frozen=True, tag="flow_rejected"):
    """The workers' models differ; the job has failed. Or that of one who came later: it is told alone."""

    flow: FlowNumber
    text: str


class MemberJoined(msgspec.Struct, frozen=True, tag="member_joined"):
    """A worker has come to a job that has begun: to a spare place, or to that of one that was lost."""

    role: str
    index: Index


class MemberLeft(msgspec.Struct, frozen=True, tag="member_left"):
    """A worker ended in good order, after `step`."""

    role: str
    index: Index
    step: Step


class MemberLost(msgspec.Struct, frozen=True, tag="member_lost"):
    """A worker died, fell silent or failed, and the job bears it. `text` says how, `kind` is as of `JobFailed`.

    It has no part in the job any more, whatever it does. `waits`: its place is kept, for another life of it.
    """

    role: str
    index: Index
    kind: str
    text: str
    waits: bool


class JobFailed(msgspec.Struct, frozen=True, tag="job_failed"):
    """The job cannot go on. `text` names the first cause, `role` and `index` whose it is.

    A worker that the others go on without is told one of kind "lost": it has no part in the job any more.

    Kinds: died, silent, left, timeout, connection, protocol, interrupted, terminated, mismatch, transport, checkpoint,
    coordinator_lost, and whatever kind a member gave in `Failed`: raised, or config, if the same settings and the same
    model would raise it again.
    """

    kind: str
    text: str
    role: str
    index: int


class ProcessStatus(msgspec.Struct, frozen=True):
    """A worker, server or launcher of a job, as the coordinator knows it.

    - `name`, `host`, `pid`, `incarnation`: who it is.
    - `state`: what it does, `doing`: where, if it has told, `wait`: what it waits for; for `seconds`, at least.
    - `step`: the last one that it has done, -1: none. `step_seconds`: of one step lately; 0: not known.
    - `sent`, `received`: bytes of gradients and parameters a second, lately.
    - `accepted`, `dropped`: what became of its gradients; -1: nobody decides about them.
    - `silent`: seconds since it was heard.
    - `refused`: connections to its data port that it has turned away.
    """

    name: str
    host: str
    pid: int
    incarnation: Incarnation
    state: str
    doing: str
    wait: Wait | None
    seconds: float
    step: Step
    step_seconds: float
    sent: float
    received: float
    accepted: int
    dropped: int
    silent: float
    refused: int = 0


class ModelStatus(msgspec.Struct, frozen=True):
    """A model of a job. `state`: "proposed", "agreed" or "started". `parameters`: how many numbers."""

    flow: FlowNumber
    state: str
    mode: str
    policy: str
    leaves: int
    parameters: int


class JobStatus(msgspec.Struct, frozen=True, tag="status"):
    """To an observer: a job as it is.

    - `phase`: "starting", "training", "ending" or "failed"; `text`: for whom it waits, or why it failed; may be empty.
    - `attempt`: from 0. `seconds`: since the coordinator's start.
    - `transport`, `why`: empty before everybody is there.
    - `followers`: how many.
    - `spare`: the places for workers that may come, and are not there yet, by index.
    - `refused`: streams to the coordinator that had not the secret, did not say who they are, or said more than they
      may.
    """

    job: str
    attempt: int
    phase: str
    text: str
    seconds: float
    transport: str
    why: str
    processes: list[ProcessStatus]
    models: list[ModelStatus]
    followers: int
    refused: int = 0
    spare: list[int] = []


class Tracing(msgspec.Struct, frozen=True, tag="tracing"):
    """To a tracer: these processes were asked, by name; a `Traced` of each follows, unless it ends before."""

    names: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """To a server or a follower: all workers are done. To a launcher: all servers are, too."""


ClientMessage = (
    Hello
    | Heartbeat
    | Admitting
    | WorkerAdmitted
    | FollowerAdmitted
    | FlowProposal
    | FlowReady
    | Landed
    | Restored
    | ShardSaved
    | SaveMissed
    | SaveCommitted
    | Held
    | RescueSaved
    | RescueCommitted
    | LostWorker
    | Traced
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
    | AdmitWorker
    | AdmitFollower
    | DismissFollower
    | Follows
    | FlowAgreed
    | FlowStart
    | Decided
    | Restore
    | SaveAt
    | SaveCommit
    | SaveEnded
    | MirrorAt
    | Rescue
    | RescueSave
    | RescueCommit
    | Rescuing
    | FlowRejected
    | MemberJoined
    | MemberLeft
    | MemberLost
    | JobFailed
    | JobStatus
    | SendTrace
    | Tracing
    | Traced
    | Shutdown
)
Message = CoordinatorMessage

encode = msgspec.msgpack.Encoder().encode
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_coordinator_decoder = msgspec.msgpack.Decoder(CoordinatorMessage)


def decode_client(data: bytes) -> ClientMessage:
    """The message of a member.

    **Raises:** `msgspec.MsgspecError`, whatever is wrong with `data`.
    """
    return _decode(_client_decoder, data)


def decode_coordinator(data: bytes) -> CoordinatorMessage:
    """The message of a coordinator.

    **Raises:** `msgspec.MsgspecError`, whatever is wrong with `data`.
    """
    return _decode(_coordinator_decoder, data)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        # Of text that is no UTF-8, keys that cannot be keys, nesting without end: msgspec lets Python's own errors out.
        raise msgspec.DecodeError(str(error)) from None


def job_error(message: JobFailed | FlowRejected) -> JaxRdmaError:
    """The exception that tells what `message` tells."""
    if isinstance(message, FlowRejected) or message.kind == "mismatch":
        return MismatchError(message.text)
    if message.kind == "timeout":
        return ConnectError(message.text)
    if message.kind == "transport":
        return TransportError(message.text)
    return PeerFailedError(message.text, kind=message.kind, role=message.role, index=message.index)


def raised(error: BaseException) -> Failed:
    """What a member tells of an error that ends it."""
    lasting = (ConfigError, MismatchError, PlanError, UpdateError)
    text = str(error).strip().split("\n")[0]
    return Failed(
        "config" if isinstance(error, lasting) else "raised", f"{type(error).__name__}: {text}"
    )


def say_on_stderr(text: str) -> None:
    """One plain line on standard error; or none, where nobody reads it any more, as of a terminal that was closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"jaxrdma: {text}", file=sys.stderr, flush=True)


def _ignore(message: Message) -> None:
    del message


def _no_progress() -> tuple[int, str]:
    return -1, "started"


def _no_details() -> tuple[Wait | None, str]:
    return None, ""


def _no_traffic() -> tuple[int, int, int]:
    return 0, 0, 0


def _tcp_alone() -> Offer:
    return Offer("tcp", verbs=False, why="asks for tcp")


def progress_pause(waited: float) -> float:
    """Seconds until it is said again for whom one has `waited` so long: soon at first, and never a flood of lines."""
    return max(PROGRESS_SECONDS, min(waited / 5, 60.0))


def heartbeat_pause(timeout: float, busy: bool) -> float:
    """Seconds between two signs of life of who counts as lost after `timeout` seconds of silence.

    `busy`: what is told with it changes. Who waits saves the processor time of both ends.
    """
    return min(1.0, timeout / 4) if busy else min(7.5, timeout / 2)


class ControlClient:
    """A process's place in its job: the open stream to the coordinator, and the two threads that serve it.

    `jaxrdma-control` reads; `jaxrdma-heartbeat` tells that this process lives, every second while that is news
    (`heartbeat_pause`), and notices a coordinator that fell silent. Methods may be called from any thread. A context
    manager.

    **Arguments:**

    - `spec`, `role`, `index`: the cluster, and who this is in it.
    - `incarnation`: a number that no other life of this process has.
    - `on_message`: called on the reading thread with every `JobFailed`, `MemberJoined`, `MemberLeft`, `MemberLost`,
      `SendTrace`, `Shutdown` and flow message, in their order. It must be quick, and may call any method here but
      `reach`, `join`, `wait` and `leave`. The loss of the coordinator arrives as `JobFailed(kind="coordinator_lost")`.
    - `say`: prints one line of progress.
    - `offer`: how this process can move tensors; asked for once the coordinator can be reached, so that there is a
      route to it. What it raises, `join` raises.
    - `progress`: the last step done (-1: none) and a word on what this process does, for the heartbeats.
    - `details`: what it waits for, and where in its program it is; asked for when there is no progress.
    - `traffic`: bytes of gradients and parameters that it has sent and received, and how many connections to its data
      port it has turned away.
    - `spare`: as of `Hello`.
    - `trouble`: which of its other connections do not work, for who reads that the coordinator is lost: it may be the
      same cable.

    **Attributes:** `clock`: how far the coordinator's is ahead, by its answers to heartbeats.

    **Raises:** `ConfigError` if it cannot speak TLS with the files that `spec` names.
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
        details: Callable[[], tuple[Wait | None, str]] = _no_details,
        traffic: Callable[[], tuple[int, int, int]] = _no_traffic,
        trouble: Callable[[], str] = str,
        offer: Callable[[], Offer] = _tcp_alone,
        spare: bool = False,
    ) -> None:
        self._spec = spec
        self._offer = offer
        self._on_message = on_message
        self._say = say
        self._progress = progress
        self._details = details
        self._traffic = traffic
        self._trouble = trouble
        self._hello = Hello(
            role=role,
            index=index,
            incarnation=incarnation,
            version=VERSION,
            job=spec.job,
            host=platform.node(),
            pid=os.getpid(),
            offer=_tcp_alone(),
            settings=spec.shared_settings(),
            attempt=spec.attempt,
            spare=spare,
        )
        self._identity = None if spec.tls is None else Identity(spec.tls, self._who())
        self._to_miss = spec.missed if role == spec.role else None
        # Guards everything below; notified whenever something arrived or the stream ended.
        self._condition = threading.Condition()
        self._stream: _Stream | None = None
        self._welcome: Welcome | None = None
        self._roster: Roster | None = None
        self._active: set[int] = set()
        self._refusal: Refused | None = None
        self._failure: JobFailed | FlowRejected | None = None
        self._inbox: list[Message] = []
        self._waiting_text = ""
        self._problem = ""  # the last that an attempt to connect was answered with
        self._asked: deque[int] = deque()  # when, what the coordinator will answer with its time
        self.clock = Offset()
        self._leaving = False
        self._heard = 0.0
        self._spoke = float("inf")  # when the last heartbeat was sent; none yet
        # When this process woke last from too long a sleep, and its silence till then.
        self._stood = -float("inf"), 0.0
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

    @property
    def active_workers(self) -> tuple[int, ...]:
        """The indices of the workers that have a part in the job, as this process was told last."""
        with self._condition:
            return tuple(sorted(self._active))

    @property
    def attempt(self) -> int:
        """Which attempt of the job the coordinator is at, from 0; once it has answered the hello."""
        with self._condition:
            answer = self._welcome or self._refusal
            assert answer is not None, "the coordinator says so when it is reached"
            return answer.attempt

    @property
    def refusal(self) -> str:
        """The kind of the coordinator's `Refused`, or "" if it has not refused."""
        with self._condition:
            return "" if self._refusal is None else self._refusal.kind

    def reach(self) -> float:
        """Reach the coordinator, in any order of starts, and be welcomed. One of an older attempt is waited out.

        **Returns:** the time at which `connect_timeout` will be over, as `time.monotonic` gives it.

        **Raises:** `ConnectError` after `connect_timeout` seconds, or if the coordinator refused, or the two cannot
        speak TLS; `MismatchError` if it refused for a version or setting.
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
            if now - said >= progress_pause(now - begin):
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
        if self._is_missed(message):
            return
        stream = self._stream
        if stream is not None and os.getpid() == self._hello.pid:
            stream.put(encode(message))

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
        """Say that this process is done after `step`, and wait until the coordinator has taken note. Then `close`.

        Who is interrupted in that is closed too.
        """
        try:
            with self._condition:
                stream = self._stream
                self._leaving = True
                if stream is not None and not self._over():
                    self.send(Left(step))
                    self.send(Bye())
                    stream.finish()
                    self._condition.wait_for(self._over, timeout)
        finally:
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
        return role if role in ("launcher", "follower") else f"{role} {self._hello.index}"

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
                self._spec.coordinator,
                min(_PROBE_SECONDS, max(0.1, deadline - time.monotonic())),
                self._identity,
            )
        except TlsError as error:
            raise self._cannot_speak(str(error)) from None
        except OSError as error:
            problem = _describe(error)
            if not isinstance(error, TimeoutError):
                self._problem = problem
            elif self._problem:
                # Who rejects may do so seldom, and not answer in between.
                problem = f"no answer; before that: {self._problem}"
            return problem
        self._hello = msgspec.structs.replace(self._hello, offer=self._offer())
        stream = _Stream(target, self._spec.secret, self._spec.coordinator, self._identity)
        with self._condition:
            self._stream = stream
            self._refusal = None
            self._asked.clear()
            self._asked.append(time.time_ns())
        stream.put(encode(self._hello))
        stream.start(self._receive, self._stream_ended)
        patience = min(_ANSWER_SECONDS, max(0.5, deadline - time.monotonic()))
        with self._condition:
            self._condition.wait_for(
                lambda: self._welcome is not None or self._refusal is not None or self._over(),
                patience,
            )
            refusal, welcome, ended = self._refusal, self._welcome, stream.ended
        if welcome is not None:
            self._heart = threading.Thread(target=self._beat, name="jaxrdma-heartbeat", daemon=True)
            self._heart.start()
            return None
        stream.close()
        if refusal is not None and refusal.kind == "early":
            return refusal.text
        if refusal is not None:
            text = (
                f"the coordinator at {self._spec.coordinator} refused {self._who()}: {refusal.text}"
            )
            raise (
                MismatchError(text)
                if refusal.kind in ("version", "settings")
                else ConnectError(text)
            )
        if ended and self._identity is None and _expects_tls(self._spec.coordinator):
            raise self._cannot_speak(f"it expects TLS, and {self._who()} has none. {ALL_OR_NONE}")
        if ended:
            return f"the connection ended before an answer ({stream.reason or 'no reason given'})"
        return "its port is open, but nothing answers like a coordinator of jaxrdma"

    def _cannot_speak(self, why: str) -> ConnectError:
        return ConnectError(
            f"{self._who()} cannot speak with the coordinator at {self._spec.coordinator}: {why}."
        )

    def _receive(self, stream: "_Stream", data: bytes) -> None:
        message = decode_coordinator(data)
        with self._condition:
            if stream is not self._stream:
                return  # of an attempt that was given up
            self._heard = time.monotonic()
            if self._is_missed(message):
                return
            match message:
                case Alive():
                    self._hear_time(message.time_ns)
                    return
                case Waiting():
                    self._waiting_text = message.text
                case Welcome():
                    self._hear_time(message.time_ns)
                    self._welcome = message
                case Refused():
                    self._refusal = message
                case Roster():
                    self._roster = message
                    self._active = {worker.index for worker in message.workers}
                case JobFailed() | FlowRejected():
                    if self._failure is not None:
                        return
                    self._failure = message
                case (
                    Decided()
                    | Restore()
                    | SaveAt()
                    | SaveCommit()
                    | SaveEnded()
                    | MirrorAt()
                    | Rescue()
                    | RescueSave()
                    | RescueCommit()
                    | Rescuing()
                    | AdmitWorker()
                    | AdmitFollower()
                    | DismissFollower()
                    | SendTrace()
                    | MemberJoined()
                ):
                    pass  # nobody waits for these, and a long job has many
                case _:
                    self._inbox.append(message)
            match message:
                case MemberJoined(role="worker", index=index):
                    self._active.add(index)
                case (
                    MemberLeft(role="worker", index=index) | MemberLost(role="worker", index=index)
                ):
                    self._active.discard(index)
                case _:
                    pass
            self._condition.notify_all()
        match message:
            case Waiting():
                self._say(message.text)
            case Welcome() | Refused() | Roster():
                pass
            case _:
                self._deliver(message)

    def _is_missed(self, message: Message | ClientMessage) -> bool:
        """For drills: whether this is the message that is to be lost. A stream by itself loses none and goes on."""
        missed = self._to_miss
        if missed is None or message.__struct_config__.tag != missed.kind:
            return False
        self._to_miss = Missed(missed.kind, missed.nth - 1) if missed.nth > 1 else None
        if self._to_miss is None:
            self._say(f"{self._who()}: here a drill loses a message of kind {missed.kind}")
        return self._to_miss is None

    def _hear_time(self, told: int) -> None:
        if self._asked:
            self.clock.heard(self._asked.popleft(), told, time.time_ns())

    def _stream_ended(self, stream: "_Stream", reason: str) -> None:
        with self._condition:
            stream.reason = reason
            stream.ended = True
            welcomed = self._welcome is not None
            lost = stream is self._stream and welcomed and not self._leaving
            silent = self._own_silence()
        if lost and silent:
            self._was_given_up(silent, reason)
        elif lost:
            self._coordinator_lost(reason or "its connection ended without a word")
        with self._condition:
            self._condition.notify_all()

    def _coordinator_lost(self, why: str) -> None:
        trouble = self._trouble()
        text = (
            f"the coordinator at {self._spec.coordinator} is lost: {why}{'; and ' if trouble else ''}{trouble}. "
            "Look at its output and its machine; the job must be started again."
        )
        self._fail(JobFailed("coordinator_lost", text, "coordinator", -1))

    def _own_silence(self) -> float:
        """For how many seconds this process told nothing, if that was too long and has hardly ended; else 0."""
        now = time.monotonic()
        timeout = self._spec.heartbeat_timeout
        if now - self._spoke > timeout:
            return now - self._spoke  # the heart is still to wake
        woke, silent = self._stood
        return silent if now - woke < min(timeout, _WAKING_SECONDS) else 0.0

    def _was_given_up(self, silent: float, reason: str) -> None:
        """The coordinator has ended the connection of a process that stood still.

        It says why before it does. But if it has gone meanwhile, what gRPC writes when this process wakes fails, and
        then gRPC throws away what it has not read yet.
        """
        text = (
            f"{self._who()} itself was silent for {silent:.0f} s, and JAXRDMA_HEARTBEAT_TIMEOUT is "
            f"{self._spec.heartbeat_timeout:g} s: it was stopped, or its machine was. Meanwhile the coordinator at "
            f"{self._spec.coordinator} ended its connection{f' ({reason})' if reason else ''}: look there for what "
            "became of the job."
        )
        self._fail(JobFailed("silent", text, self._hello.role, self._hello.index))

    def _fail(self, message: JobFailed) -> None:
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
        told: tuple[int, str] | None = None
        last = time.monotonic()
        self._spoke = last
        pause = heartbeat_pause(timeout, busy=True)
        silent = 0.0
        while not self._stop.wait(
            look := max(0.05, min(self._spoke + pause - last, _LOOK_SECONDS, timeout - silent))
        ):
            now = time.monotonic()
            with self._condition:
                if now - last > look + min(_PAUSE_SECONDS, timeout / 4):
                    self._heard = now  # it was us who stood still
                if now - self._spoke > timeout:
                    # Nothing is written before what came meanwhile has been read: see `_was_given_up`.
                    self._stood = now, now - self._spoke
                    self._spoke = now
                    pause = heartbeat_pause(timeout, busy=True)
                silent = max(0.0, now - self._heard)
                stream = self._stream
            last = now
            if stream is None or stream.ended:
                return
            if silent > timeout:
                self._coordinator_lost(f"silent for {silent:.0f} s")
                stream.close()
                return
            progress = self._progress()
            news = progress != told
            if now < self._spoke + (heartbeat_pause(timeout, busy=True) if news else pause):
                continue
            self._spoke = now
            told = progress
            pause = heartbeat_pause(timeout, busy=news)
            details = _no_details() if news else self._details()
            heartbeat = Heartbeat(*progress, *details, *self._traffic())
            with self._condition:
                self._asked.append(time.time_ns())
            self.send(heartbeat)

    def _forget_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.drop_in_child()


def observe(
    coordinator: str, secret: str, job: str, timeout: float, tls: TlsFiles | None = None
) -> JobStatus:
    """Ask a job how it is.

    **Arguments:**

    - `coordinator`: "host:port".
    - `secret`, `job`: as its processes have them.
    - `timeout`: seconds for the whole.
    - `tls`: the files to speak TLS with, if its processes do.

    **Raises:** `ConnectError` if nobody answers in time, or the coordinator refuses; `ConfigError` if the files of
    `tls` cannot be used.
    """
    with _asking("observer", 0, coordinator, secret, job, timeout, tls) as answers:
        answer = next(answers)
    if isinstance(answer, JobStatus):
        return answer
    raise _told_otherwise(coordinator, answer)


def collect_traces(
    coordinator: str,
    secret: str,
    job: str,
    timeout: float,
    steps: int,
    tls: TlsFiles | None = None,
) -> tuple[list[Dump], list[str]]:
    """Ask every worker and server of a job what it recorded of its last `steps` steps; 0: all that it has.

    **Arguments:** otherwise as of `observe`.

    **Returns:** what came in time, and the names of those of whom nothing did.

    **Raises:** as `observe`.
    """
    with _asking("tracer", steps, coordinator, secret, job, timeout, tls) as answers:
        begin = next(answers)
        if not isinstance(begin, Tracing):
            raise _told_otherwise(coordinator, begin)
        missing, dumps = list(begin.names), list[Dump]()
        with contextlib.suppress(ConnectError):  # what is there is shown
            while missing:
                answer = next(answers)
                if isinstance(answer, Traced) and answer.dump.name in missing:
                    missing.remove(answer.dump.name)
                    dumps.append(answer.dump)
    return dumps, missing


def _told_otherwise(coordinator: str, answer: CoordinatorMessage) -> ConnectError:
    text = answer.text if isinstance(answer, Refused) else f"it sent {type(answer).__name__}"
    return ConnectError(f"the coordinator at {coordinator} does not tell: {text}")


@contextlib.contextmanager
def _asking(
    role: str,
    index: int,
    coordinator: str,
    secret: str,
    job: str,
    timeout: float,
    tls: TlsFiles | None,
) -> "Generator[Iterator[CoordinatorMessage], None, None]":
    """The answers to a hello of somebody who has no part in the job. Each, or its lack, may raise `ConnectError`."""
    begin = time.monotonic()
    who = f"the coordinator at {coordinator}"
    identity = None if tls is None else Identity(tls, f"this {role}")
    try:
        target = _probe(coordinator, timeout, identity)
    except TlsError as error:
        raise ConnectError(f"this {role} cannot speak with {who}: {error}.") from None
    except OSError as error:
        raise ConnectError(
            f"{who} cannot be reached: {_describe(error)}. Has the job ended? Is that its address?"
        ) from None
    hello = Hello(
        role=role,
        index=index,
        incarnation=0,
        version=VERSION,
        job=job,
        host=platform.node(),
        pid=os.getpid(),
        offer=_tcp_alone(),
        settings={},
    )
    left = max(0.1, begin + timeout - time.monotonic())
    done = threading.Event()

    def ask() -> Iterator[bytes]:
        yield encode(hello)
        done.wait(timeout)  # the coordinator answers as long as it is asked

    def hear(call: Any) -> Iterator[CoordinatorMessage]:
        try:
            while True:
                yield decode_coordinator(next(call))
        except grpc.RpcError as error:
            if identity is None and _expects_tls(coordinator):
                raise ConnectError(
                    f"this {role} cannot speak with {who}: it expects TLS, and this {role} has none. "
                    f"{ALL_OR_NONE}."
                ) from None
            raise ConnectError(f"{who} did not answer: {cast(Any, error).details()}") from None
        except (StopIteration, msgspec.MsgspecError) as error:
            raise ConnectError(
                f"{who} answers like no coordinator of jaxrdma {VERSION}: {error}"
            ) from None

    with _channel(cast(Any, grpc), target, coordinator, identity) as channel:
        try:
            yield hear(
                channel.stream_stream(METHOD)(ask(), timeout=left, metadata=_metadata(secret))
            )
        finally:
            done.set()


class _Loops:
    """Event loops that are used again.

    From one loop gRPC speaks to another, a little after its last call has ended: were that closed by then, what gRPC
    has for the first would wait, and a traceback be printed.
    """

    def __init__(self) -> None:
        self._forget()
        atexit.register(self._close)
        os.register_at_fork(after_in_child=self._forget)  # they have the parent's descriptors

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[asyncio.Runner] = []

    @contextlib.contextmanager
    def one(self) -> Generator[asyncio.Runner, None, None]:
        """A loop that nobody else runs."""
        with self._lock:
            runner = self._spare.pop() if self._spare else asyncio.Runner()
        try:
            yield runner
        finally:
            with self._lock:
                self._spare.append(runner)

    def _close(self) -> None:
        with self._lock:
            for runner in self._spare:
                runner.close()
            self._spare.clear()


_LOOPS = _Loops()


class _Stream:
    """One attempt at the stream: a thread with an event loop of its own, which reads and writes.

    gRPC's blocking calls would do, but look ten times a second whether they have something to do.
    """

    def __init__(
        self, target: str, secret: str, coordinator: str, identity: Identity | None
    ) -> None:
        self.ended = False
        self.reason = ""
        self.reader: threading.Thread | None = None
        self._target = target
        self._secret = secret
        self._coordinator = coordinator
        self._identity = identity
        # Guards the next three: other threads hand over what they have before the loop runs and while it does.
        self._lock = threading.Lock()
        self._early: list[bytes | None] | None = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._call: Any = None  # gRPC's Python package has no type information

    def start(
        self,
        receive: "Callable[[_Stream, bytes], None]",
        ended: "Callable[[_Stream, str], None]",
    ) -> None:
        def read() -> None:
            reason = ""
            try:
                with _LOOPS.one() as loop:
                    loop.run(self._attend(receive))
            except grpc.RpcError as error:
                reason = str(cast(Any, error).details())
            except msgspec.MsgspecError as error:
                reason = f"it sent what no coordinator of version {VERSION} sends: {error}"
            except asyncio.CancelledError:
                pass  # closed by this side
            ended(self, reason)

        self.reader = threading.Thread(target=read, name="jaxrdma-control", daemon=True)
        self.reader.start()

    async def _attend(self, receive: "Callable[[_Stream, bytes], None]") -> None:
        async with _channel(
            cast(Any, grpc).aio, self._target, self._coordinator, self._identity
        ) as channel:
            self._call = channel.stream_stream(METHOD)(metadata=_metadata(self._secret))
            with self._lock:
                self._loop = asyncio.get_running_loop()
                early, self._early = self._early, None
                closed = self._closed
            for data in early or ():
                self._outgoing.put_nowait(data)
            if closed:
                self._call.cancel()
            writing = asyncio.ensure_future(self._write())
            try:
                async for data in self._call:
                    receive(self, data)
            finally:
                with self._lock:
                    self._loop = None
                writing.cancel()
                await asyncio.wait([writing])

    async def _write(self) -> None:
        # Reading tells why a stream ended.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while (data := await self._outgoing.get()) is not None:
                await self._call.write(data)
            await self._call.done_writing()

    def put(self, data: bytes | None) -> None:
        """Queue a message; None: half-close, after what is queued."""
        with self._lock:
            if self._early is not None:
                self._early.append(data)
            elif self._loop is not None:
                self._loop.call_soon_threadsafe(self._outgoing.put_nowait, data)

    def finish(self) -> None:
        """Half-close: what is queued still goes out."""
        self.put(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._call.cancel)
        if self.reader is not None and threading.current_thread() is not self.reader:
            self.reader.join(2.0)

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


def _metadata(secret: str) -> tuple[tuple[str, bytes], ...]:
    return ((SECRET_KEY, secret.encode()),)


def _channel(maker: Any, target: str, coordinator: str, identity: Identity | None) -> Any:
    """A channel to `target`, of gRPC or its part aio: `maker`. Neither has type information."""
    if identity is None:
        return maker.insecure_channel(target, options=GRPC_OPTIONS)
    credentials = cast(Any, grpc).ssl_channel_credentials(identity.ca, identity.key, identity.cert)
    # The certificate is for who the coordinator is known as, not for what that resolves to.
    name = ("grpc.ssl_target_name_override", _host(coordinator))
    return maker.secure_channel(target, credentials, options=(*GRPC_OPTIONS, name))


def _probe(address: str, timeout: float, identity: Identity | None) -> str:
    """The address that a connection to `address` really reaches, as gRPC writes it. OSError says why it cannot.

    A plain socket first, because its errors name the errno; and gRPC is then given no name to resolve. Then a handshake
    of TLS, with `identity`, because `TlsError` says why there can be none.
    """
    with socket.create_connection(parse_address(address, "coordinator"), timeout) as sock:
        host, port = sock.getpeername()[:2]
        family = sock.family
    if identity is not None:
        identity.greet(lambda: socket.create_connection((host, port), timeout), _host(address))
    return f"ipv6:[{host}]:{port}" if family == socket.AF_INET6 else f"ipv4:{host}:{port}"


def _expects_tls(address: str) -> bool:
    """Whether the coordinator speaks TLS, asked for the reason why it does not speak otherwise."""
    where = parse_address(address, "coordinator")
    try:
        return speaks_tls(lambda: socket.create_connection(where, _PROBE_SECONDS))
    except OSError:
        return False


def _host(address: str) -> str:
    """As certificates name it, and gRPC compares: without the brackets, and the link, of an IPv6 address."""
    return parse_address(address, "coordinator")[0].partition("%")[0]


def _describe(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"its host name does not resolve ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "no answer; does a firewall drop what is sent there?"
    if error.errno is None:
        return str(error) or "no answer"
    text = os.strerror(error.errno).lower()
    if error.errno == errno.ECONNREFUSED:
        return text
    if error.errno in _REJECTED:
        return f"{text} (errno {error.errno}); is the address right, and does a firewall reject it?"
    return f"{text} (errno {error.errno})"


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
