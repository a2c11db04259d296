"""Read-only clients of a job: `follow`, `Follower`, `Snapshot`.

A follower is no worker. It is not counted, gives no gradients, may come and go at any time, and no step waits for it.
"""

import atexit
import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrdma import _native, control, transport
from jaxrdma.arrays import as_bytes, place_like
from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import ControlClient, FlowAgreed, FlowStart, Follows, Message, Shutdown
from jaxrdma.errors import (
    CancelledError,
    ConfigError,
    JaxRdmaError,
    JobEndedError,
    MismatchError,
    TransportError,
)
from jaxrdma.memory import Locked, copy_bytes
from jaxrdma.native import flow_spec, native_error, raise_for
from jaxrdma.plan import Plan, agreed_average_plan, agreed_plan, compare_leaves, describe_leaves
from jaxrdma.policy import from_wire
from jaxrdma.signals import SignalWatch, end_by_interrupt

if TYPE_CHECKING:
    from jaxrdma.native import TransportArguments

# A lost data connection is nearly always the echo of an end, of which the coordinator knows more.
_VERDICT_SECONDS = 3.0
_LONGEST_WAIT = 86400.0  # of a lock; what is longer is waited for again


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One version of a model's parameters.

    - `params`: a tree like the one that was given to `pull`, in arrays of its own.
    - `step`: how many updates made it.
    """

    params: Any
    step: int


def follow(
    *,
    coordinator: str | None = None,
    transport: str | None = None,
    connect_timeout: float | None = None,
    **settings: Any,
) -> "Follower":
    """Follow a job: take its newest parameters, for evaluation or serving, without being part of it.

    Returns as soon as the coordinator has answered; the job may start later. What is not given comes from the
    environment (`JAXRDMA_*`, `TF_CONFIG`), of which a follower needs the coordinator's address, and the secret and the
    name of the job if it has them. Everything else it is told.

    **Arguments:**

    - `coordinator`: "host:port".
    - `transport`: "tcp", "verbs", or "auto". The job has decided; any other than that is an error.
    - `connect_timeout`: seconds to wait for the coordinator, and later for the servers' connections.
    - `settings`: any other field of `ClusterSpec`.

    **Returns:** the follower, also a context manager that closes it at its end.

    **Raises:** `ConfigError`; `ConnectError` if the coordinator cannot be reached or refuses, because the job is over
    or has 64 followers already; `MismatchError` for another version of jaxrdma.
    """
    spec = ClusterSpec.from_environment(
        role="follower",
        coordinator=coordinator,
        transport=transport,
        connect_timeout=connect_timeout,
        **settings,
    )
    return Follower(spec)


class Follower:
    """A process's view of a job. Made by `follow`; closed by `close`, or the end of the program.

    Methods may be called from any thread; one pull runs at a time.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._incarnation = secrets.randbits(63)
        self._pull_lock = threading.Lock()
        # Guards what the control plane tells, and is notified of it.
        self._changed = threading.Condition()
        self._follows: Follows | None = None
        self._agreed: dict[int, FlowAgreed] = {}
        self._started: set[int] = set()
        self._ended = False
        self._failure: JaxRdmaError | None = None
        self._closed = False
        self._plans: list[tuple[Plan, _native.FlowSpec]] = []  # of the models the engine knows
        self._copied: set[int] = set()  # models that have memory to land in, over verbs
        self._locked: Locked | None = None
        self._made: _native.WorkerEngine | None = None
        self._connecting = False  # what was made
        self._step = -1
        if spec.transport == "verbs":
            transport.check_verbs(spec)
        self._client = ControlClient(
            spec,
            "follower",
            0,
            self._incarnation,
            on_message=self._on_message,
            progress=lambda: (self._step, "following"),
        )
        self._signals = SignalWatch(self._on_signal).start()
        try:
            self._client.reach()
        except BaseException:
            self._client.close()
            self._signals.stop()
            raise
        atexit.register(self._at_exit)

    def pull(
        self,
        like: Any,
        model: int = 0,
        newer_than: int | None = None,
        timeout: float | None = None,
        ema: bool = False,
    ) -> Snapshot:
        """The newest version of a model's parameters: all leaves, of all servers, of one step.

        Waits until the model has started and there is a version that is new enough. A version that is neither the
        first nor the last of its job may never be seen: what is pulled is the newest at that moment.

        **Arguments:**

        - `like`: a tree with the structure, shapes and dtypes of the parameters, of arrays or `jax.ShapeDtypeStruct`:
          the result is placed as its arrays are. Nothing is changed in it.
        - `model`: which of the job's models, in the order in which workers started them.
        - `newer_than`: the step of the last snapshot; a later one is waited for. `None`: any step will do.
        - `timeout`: seconds to wait for such a version; 0: only if the servers have it now. The time that the servers
          take to answer, and the parameters to come here, is not reckoned. `None`: as long as the job lives.
        - `ema`: pull the moving averages of the parameters, of the model's `init(..., ema=...)`; those of 16-bit
          parameters are rounded to the parameters' type here.

        **Raises:** `JobEndedError` when the job has ended in good order: the last version before that may not have been
        seen, for no job waits for its followers; it is in the job's last checkpoint. `PeerFailedError` when the job
        has failed, with the first cause, or when this follower was dismissed because it was silent. `MismatchError` if
        `like` is not like the model. `TimeoutError`. `ConfigError` for a model whose gradients are only averaged, or
        that has no moving averages.
        `TransportError` if a connection breaks, or what comes is not what the servers keep. `CancelledError` if the
        follower is closed.
        """
        leaves, treedef, likes = describe_leaves(like)
        deadline = None if timeout is None else time.monotonic() + timeout
        least = 0 if newer_than is None else newer_than + 1
        with self._pull_lock:
            flow = self._await_flow(model, deadline, leaves, ema)
            engine = self._engine(flow)
            plan, spec = self._plans[flow]
            values = [np.empty(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in plan.leaves]
            left = -1 if deadline is None else _milliseconds(deadline)
            found = engine.follow(flow, least, [as_bytes(each) for each in values], spec, left)
            if not isinstance(found, int):
                raise self._first_cause(found, model, least, timeout)
            self._step = max(self._step, found)
        placed = [
            place_like(value.astype(like.dtype, copy=False), like)
            for value, like in zip(values, likes, strict=True)
        ]
        return Snapshot(jax.tree.unflatten(treedef, placed), found)

    def snapshots(
        self, like: Any, model: int = 0, newer_than: int | None = None, ema: bool = False
    ) -> Iterator[Snapshot]:
        """The newest version, again and again as soon as there is a newer one, until the job ends in good order.

        **Arguments:** as of `pull`.

        **Raises:** as `pull`, but for `JobEndedError`.
        """
        while True:
            try:
                snapshot = self.pull(like, model, newer_than, ema=ema)
            except JobEndedError:
                return
            newer_than = snapshot.step
            yield snapshot

    def close(self) -> None:
        """Leave. A pull in another thread ends with `CancelledError`. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        # All of it, wherever it is interrupted. The last is done first.
        with contextlib.ExitStack() as rest:
            rest.callback(atexit.unregister, self._at_exit)
            rest.callback(self._signals.stop)
            rest.callback(self._client.leave, self._step)
            # Its connections may end in any order with its goodbye: nobody minds.
            if self._made is not None:
                self._made.close()

    def _at_exit(self) -> None:
        try:
            self.close()
        except KeyboardInterrupt:
            end_by_interrupt()

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # --- before something is pulled ---

    def _await_flow(
        self, model: int, deadline: float | None, leaves: list[control.LeafSpec], ema: bool
    ) -> int:
        """The number among all that were agreed, averages too, of what is asked for, once it has started."""

        def find() -> int | None:
            # Agreements come in their order.
            models = [
                f for f, agreed in self._agreed.items() if agreed.mode not in ("ema", "table")
            ]
            if self._follows is None or len(models) <= model:
                return None
            flow = models[model]
            if flow not in self._started:
                return None
            self._check_model(model, self._agreed[flow], leaves, ema)
            flow += ema
            return flow if flow in self._started else None

        with self._changed:
            while True:
                if (cause := self._cause()) is not None:
                    raise cause
                if (flow := find()) is not None:
                    return flow
                left = _LONGEST_WAIT if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"model {model} has not started in time")
                self._changed.wait(left)

    def _check_model(
        self, model: int, agreed: FlowAgreed, leaves: list[control.LeafSpec], ema: bool
    ) -> None:
        if agreed.mode != "update":
            raise ConfigError(
                f"pull of model {model}, whose gradients are only averaged: its servers hold no parameters, each "
                "worker has its own"
            )
        difference = compare_leaves(leaves, agreed.leaves, "`like` of this follower", "the job")
        if difference is not None:
            raise MismatchError(f"pull of model {model}: {difference}")
        if ema and not agreed.averaged:
            raise ConfigError(
                f"pull of the moving averages of model {model}, which has none: give ema=0.999, or another decay, to "
                "the init of its workers"
            )

    def _engine(self, flow: int) -> "_native.WorkerEngine":
        """The engine, connected to every server, and knowing the model."""
        follows = self._follows
        assert follows is not None, "a model has started"
        spec = self._job_spec(follows)
        if self._made is None:
            self._connect(follows, spec)
        assert self._made is not None
        # The engine counts models as workers do: those that are not followed too.
        for number in range(len(self._plans), flow + 1):
            agreed = self._agreed[number]
            if agreed.mode == "table":  # nothing of it is followed
                plan, held = Plan((), spec.num_servers, spec.partition_bytes, False, ()), 0
            elif agreed.mode == "ema":
                plan, held = agreed_average_plan(self._plans[-1][0], agreed.digest), 0
            else:
                plan = agreed_plan(
                    agreed.leaves, spec.num_servers, spec.partition_bytes, agreed.digest
                )
                held = from_wire(agreed.policy).held
            mode = "ema" if agreed.mode == "table" else agreed.mode
            native = flow_spec(number, mode, plan, held)
            raise_for(self._made.add_flow(native))
            self._plans.append((plan, native))
        if self._locked is not None and flow not in self._copied:
            self._locked.add(f"a copy of model {flow}", copy_bytes(self._plans[flow][0]))
            self._copied.add(flow)
        return self._made

    def _job_spec(self, follows: Follows) -> ClusterSpec:
        """The cluster, now that it is known."""
        return replace(self._spec, index=follows.number, **follows.settings)

    def _connect(self, follows: Follows, spec: ClusterSpec) -> None:
        if spec.transport not in ("auto", follows.transport):
            raise TransportError(
                f"follower {follows.number} asks for transport {spec.transport}, and the job it follows has "
                f"{follows.transport} ({follows.why}). Set JAXRDMA_TRANSPORT as in the job, or auto"
            )
        servers = sorted(follows.servers, key=lambda entry: entry.index)
        addresses = [entry.address for entry in servers]
        options: TransportArguments
        options, self._locked = transport.prepare(
            spec,
            follows.transport,
            transport.place(spec, servers=addresses),
            f"what it asks of {spec.num_servers} servers",
        )
        engine = raise_for(
            _native.WorkerEngine.create(
                follows.number, spec.job, self._incarnation, follows=True, **options
            )
        )
        with self._changed:
            if (cause := self._cause()) is not None:
                raise cause  # came while there was no engine to be told
            self._made, self._connecting = engine, True
        try:
            tokens = [entry.tokens[follows.number] for entry in servers]
            status = engine.connect(addresses, tokens, int(spec.connect_timeout * 1000))
            with self._changed:
                self._connecting = False
            if status.ok:
                status = engine.status  # it may have been interrupted since
            if not status.ok:
                raise self._connect_error(status)
        except BaseException:
            # Another pull begins anew.
            with self._changed:
                self._made, self._connecting = None, False
            engine.close()
            raise
        if notice := engine.notice:
            control.say_on_stderr(f"follower {follows.number}: {notice}")

    # --- what ends a wait ---

    def _cause(self) -> JaxRdmaError | None:
        """Why nothing more can be pulled. Needs the lock."""
        if self._closed:
            return CancelledError("pull of a follower that is closed")
        if self._ended:
            return JobEndedError("the job has ended in good order")
        return self._failure

    def _end(self) -> JaxRdmaError | None:
        """`_cause`, of which the control plane may tell a little after a connection does."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause() is not None, _VERDICT_SECONDS)
            return self._cause()

    def _connect_error(self, status: "_native.Status") -> BaseException:
        with self._changed:
            cause = self._cause()
        if cause is None and status.code == _native.Code.CANCELLED:
            return KeyboardInterrupt()
        return self._end() or native_error(status)

    def _first_cause(
        self, status: "_native.Status", model: int, least: int, timeout: float | None
    ) -> BaseException:
        code = _native.Code
        if status.code == code.DEADLINE:
            newer = f" newer than step {least - 1}" if least > 0 else ""
            return TimeoutError(f"no version of model {model}{newer} came within {timeout:g} s")
        with self._changed:
            cause = self._cause()
        if cause is None and status.code == code.CANCELLED:
            return KeyboardInterrupt()
        if cause is None and status.code == code.UNAVAILABLE:
            cause = self._end()
        return cause or native_error(status)

    def _on_message(self, message: Message) -> None:
        with self._changed:
            match message:
                case Follows():
                    self._follows = message
                case FlowAgreed():
                    self._agreed[message.flow] = message
                case FlowStart():
                    self._started.add(message.flow)
                case Shutdown():
                    self._ended = True
                case control.JobFailed() | control.FlowRejected() if not self._ended:
                    self._failure = control.job_error(message)
                case _:
                    return
            self._changed.notify_all()
            cause, engine = self._cause(), self._made
        if cause is not None and engine is not None:
            engine.fail(_native.Status(_native.Code.PEER_FAILED, str(cause)))

    def _on_signal(self, number: int) -> None:
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        with self._changed:
            engine = self._made
            if engine is not None and self._connecting:
                engine.interrupt()  # for good: this engine is not used any more
            elif engine is not None:
                engine.stop_waiting()


def _milliseconds(deadline: float) -> int:
    return max(0, min(int((deadline - time.monotonic()) * 1000), 2**31 - 1))
