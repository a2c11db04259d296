"""A worker's live connection to its cluster: `connect`, `Session`, `Stats`."""

import atexit
import contextlib
import itertools
import os
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxrdma import _native, control, step, table, trace, transport
from jaxrdma.arrays import as_bytes, place_like
from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import ControlClient, FlowProposal, FlowStart, LeafSpec, Message, Wait
from jaxrdma.dispatch import await_programs
from jaxrdma.dump import Dumper
from jaxrdma.embedding import (
    RowInit,
    RowNormal,
    RowOptimizer,
    TableSettings,
    check_settings,
    native_spec,
    table_policy,
)
from jaxrdma.errors import (
    CancelledError,
    ConfigError,
    MismatchError,
    StepError,
    TransportError,
)
from jaxrdma.memory import Locked, copy_bytes
from jaxrdma.monitoring import Monitor
from jaxrdma.native import flow_spec, native_error, raise_for
from jaxrdma.plan import Plan, assign_partitions, average_plan, describe_leaves
from jaxrdma.policy import Policy, SyncReplicas, check_growth, to_wire
from jaxrdma.signals import (
    OrderlyEnd,
    SignalWatch,
    Terminated,
    end_by_interrupt,
    see_signal,
    tell_interrupts_plainly,
)
from jaxrdma.step import AverageState, PSState
from jaxrdma.table import Embedding
from jaxrdma.whereabouts import whereabouts

if TYPE_CHECKING:
    import optax

# A lost data connection is nearly always the echo of a dying process, of which the coordinator knows more: it is given
# this long to say so before the connection itself is called the cause.
_VERDICT_SECONDS = 3.0
# So long a program may go on after its job has failed before that is said: more than it takes to end by the error.
_UNSEEN_SECONDS = 10.0

# While a server runs an update its parameters cannot be read, and nobody tells a reader when it has ended: so we look
# again, soon at first, and at last give up.
_LOOK_SECONDS = 0.001, 0.05
_REST_SECONDS = 10.0

# A step that is under way when this process is told to end has so long to come back. Who ends processes by SIGTERM
# (Kubernetes, Slurm) kills them 30 s later.
LAST_STEP_SECONDS = 15.0

_session_numbers = itertools.count()


@dataclass(frozen=True)
class Stats:
    """What a session has done so far.

    - `steps`: steps that came back.
    - `gradients_accepted`, `gradients_dropped`: gradients of this worker that entered a mean, and that came too late.
    - `bytes_pushed`, `bytes_pulled`: payload, in bytes.
    - `transport`: for each server `(name, transport, why)`.
    """

    steps: int
    gradients_accepted: int
    gradients_dropped: int
    bytes_pushed: int
    bytes_pulled: int
    transport: list[tuple[str, str, str]]


def connect(
    *,
    coordinator: str | None = None,
    index: int | None = None,
    num_workers: int | None = None,
    num_servers: int | None = None,
    transport: str | None = None,
    connect_timeout: float | None = None,
    **settings: Any,
) -> "Session":
    """Join the cluster as a worker, and wait until everybody is there.

    What is not given comes from the environment that `jaxrdma launch` sets (`JAXRDMA_*`), or from `TF_CONFIG`.

    **Arguments:**

    - `coordinator`: "host:port".
    - `index`: which worker this is. Worker 0 is the chief: its parameters start the job.
    - `num_workers`, `num_servers`: the size with which the job begins, equal everywhere. A process in a spare place
      (`most_workers`, an `index` from `num_workers` on) comes when it likes.
    - `transport`: "tcp", "verbs", or "auto": verbs if every process of the job can, else tcp.
    - `connect_timeout`: seconds to wait for the others.
    - `settings`: any other field of `ClusterSpec`.

    **Returns:** the session, also a context manager that leaves the job at its end.

    **Raises:** `ConfigError`, `ConnectError`, `MismatchError`, `PeerFailedError`.
    """
    spec = ClusterSpec.from_environment(
        coordinator=coordinator,
        index=index,
        num_workers=num_workers,
        num_servers=num_servers,
        transport=transport,
        connect_timeout=connect_timeout,
        **settings,
    )
    if spec.role != "worker":
        raise ConfigError(
            f"connect() in a process whose role is {spec.role}: only workers connect; run `jaxrdma server`"
        )
    return Session(spec)


class _Model(NamedTuple):
    """What was agreed on: by its number, the flow."""

    plan: Plan
    spec: "_native.FlowSpec"


def _no_model(table: int) -> _Model:
    """In the place of a table, which takes a number too."""
    plan = Plan((), 1, 1, whole_leaves=False, partitions=())
    return _Model(plan, flow_spec(table, "ema", plan))


class Session:
    """One worker's place in its job. Made by `connect`; closed by `leave`, `close`, or the end of the program.

    `init` starts a model, `ps_step` trains it, `read` looks at it in between; each model has states of its own.

    **Attributes:** `index`, `num_workers`, `num_servers`, `active_workers`; `id`, the small number that compiled
    programs hold.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.id = next(_session_numbers)
        self._spec = spec
        self._pid = os.getpid()
        self._flows = step.open_session(self.id)
        self._models: list[_Model] = []
        self._policies: list[Policy] = []
        # One read at a time: the engine remembers the step of the last one.
        self._read_lock = threading.Lock()
        self._readable: set[int] = set()  # models with memory to read into
        self._closed = False
        self._cut_by: BaseException | None = None  # what interrupted the end of this session
        self._close_lock = threading.Lock()
        self._verdict = threading.Event()
        self._ended = threading.Event()
        self._incarnation = secrets.randbits(63)
        self._made: _native.WorkerEngine | None = None
        self._joined = False  # connected to every server
        self._transport, self._why = "", ""  # which, and why this
        self._locked: Locked | None = None  # over verbs
        if spec.transport == "verbs":
            transport.check_verbs(spec)
        self._client = ControlClient(
            spec,
            "worker",
            spec.index,
            self._incarnation,
            on_message=self._on_message,
            progress=self._progress,
            details=self._details,
            traffic=self._traffic,
            trouble=lambda: self._made.trouble if self._made is not None else "",
            offer=lambda: transport.offer(spec, transport.place(spec)),
        )
        self._monitor_of_jax = Monitor()
        self._dumper = Dumper(
            "worker",
            spec.index,
            self._incarnation,
            spec.trace_dir,
            self._client.clock,
            control.say_on_stderr,
        )
        # Before anything waits: from here on Ctrl-C must end every wait.
        tell_interrupts_plainly()
        if spec.trace_dir is not None:
            see_signal(signal.SIGUSR1)
        self._last_step: threading.Timer | None = None  # for the step under way, once told to end
        self._orderly_end = OrderlyEnd(lambda: self._client.failure is not None).start()
        self._signals = SignalWatch(self._on_signal).start()
        self._monitor = threading.Thread(target=self._watch, name="jaxrdma-monitor", daemon=True)
        try:
            self._join()
            self._monitor.start()
        except BaseException as error:
            self._abort(error)
            raise
        # Registered after jax was imported, so it runs before JAX's own, which would wait for the network for ever.
        atexit.register(self._at_exit)
        reference = weakref.ref(self)

        def forget() -> None:
            session = reference()
            if session is not None:
                session._forget()

        os.register_at_fork(after_in_child=forget)

    @property
    def index(self) -> int:
        """Which worker this is, from 0."""
        return self._spec.index

    @property
    def num_workers(self) -> int:
        """How many workers the job has; with spare places (`JAXRDMA_MOST_WORKERS`), how many it may have.

        Every `index` is below it, so data cut into that many pieces is cut alike whoever comes and goes; what is in the
        pieces of workers that are not there, nobody sees.
        """
        return self._spec.places

    @property
    def active_workers(self) -> tuple[int, ...]:
        """The indices of the workers that are there, as this process was told last.

        It changes when a worker comes, leaves or is lost, and two workers may not see that at the same step: choose by
        it how much there is to do, never what must be agreed on.
        """
        return self._client.active_workers

    @property
    def num_servers(self) -> int:
        """How many servers the job has."""
        return self._spec.num_servers

    def init(
        self,
        params: Any,
        update: "optax.GradientTransformation",
        policy: Policy | None = None,
        ema: float | None = None,
        mesh: Mesh | None = None,
    ) -> PSState:
        """Agree with the other workers on a model, and start it from the chief's parameters.

        Every worker calls this with a tree of the same structure, shapes and dtypes; only worker 0's values count.

        **Arguments:**

        - `params`: a tree of float32, bfloat16, float16 or float64 arrays.
        - `update`: an optax transformation; it runs on the servers, each on its shard.
        - `policy`: whose gradients form a step: `SyncReplicas`, `Async` or `BoundedStaleness`. Default: one of every
          worker.
        - `ema`: a decay, e.g. 0.999: the servers also keep an exponential moving average of the parameters, which
          followers pull, for evaluation. It begins as the parameters do; 16-bit parameters have it in float32.
        - `mesh`: devices of this process that train together and are one worker, e.g. `jax.make_mesh((8,), ("data",))`.
          All have the whole state; with batches sharded over the mesh, `jit` gives the mean gradient of all of them.

        **Returns:** the state, the same on every worker: the chief's parameters at step 0; in a job that was started
        again and has checkpoints, those of the last one at its step; on a worker that was started in the place of a
        lost one, or in a spare place, those that the servers have now, at their step.

        **Raises:** `PlanError` for a leaf that cannot be trained; `UpdateError` for an update that the servers cannot
        run; `ConfigError` for an `ema` that is no decay or a `mesh` of other processes' devices; `MismatchError`, on
        every process, if the workers' models differ, or the checkpoint is of another model, and only here if this
        worker comes to a job that has begun, with another model; `PeerFailedError`.
        """
        from jaxrdma.update import analyse, export_update

        self._check_open("init")
        _check_mesh(mesh)
        policy = policy if policy is not None else SyncReplicas()
        if self._spec.grows:
            check_growth(policy.complete(self.num_workers), "init")
        if self._spec.replicate and policy.complete(self.num_workers).held > 0:
            raise ConfigError(
                f"replicate=1 with {policy.describe()}: what the servers hold is of no common step then. Use "
                "SyncReplicas(), of every worker and with on_loss='fail', or JAXRDMA_REPLICATE=0 and checkpoints"
            )
        leaves, treedef, arrays = describe_leaves(params)
        analysis = analyse(update, treedef, leaves, ema)
        analysis.check_servers(self.num_servers)
        plan = assign_partitions(
            leaves, self.num_servers, self._spec.partition_bytes, analysis.whole_leaves
        )
        # The programs are needed once; the other workers compare what they are made from.
        programs = export_update(analysis, plan).programs if self.index == 0 else []
        start = self._agree(
            leaves,
            treedef,
            plan,
            "update",
            policy,
            analysis.fingerprint,
            programs,
            analysis.averaged,
            mesh,
        )
        flow, restored = start.flow, start.restored
        if start.joined is not None:
            values, version = self._resume(flow, start.joined)
        else:
            begins = self.index == 0 and restored is None
            host = [np.ascontiguousarray(np.asarray(array)) for array in arrays] if begins else []
            kind = _native.OperationKind.INIT if begins else _native.OperationKind.FETCH
            values, status = self._receive(kind, flow, host, restored or 0)
            if not status.ok:
                raise self._first_cause(status)
            version = restored or 0
            if restored is not None and self.index == 0:
                control.say_on_stderr(f"worker 0: {start.text}")
        if analysis.averaged:
            # Once the parameters are there, of which they are the averages.
            averages = average_plan(plan)
            self._agree(list(averages.leaves), treedef, averages, "ema", policy, "", [])
        zero = jnp.zeros((), jnp.int32)
        return self._state(flow, values, arrays, jnp.asarray(version, jnp.int32), zero)

    def embedding(
        self,
        name: str,
        *,
        rows: int,
        columns: int,
        optimizer: RowOptimizer,
        init: RowInit | None = None,
        policy: Policy | None = None,
    ) -> Embedding:
        """Agree with the other workers on a table of which single rows are looked up and trained, on the servers.

        Every worker calls this with the same arguments, in the same order among its models and tables. The table may
        be larger than a worker's memory: a worker holds the rows of a call only. Row r lies on server r % num_servers,
        takes memory there once it is first trained, and has an optimizer state of its own. What a row holds before
        depends on the seed, the row and the column alone, not on the number of servers.

        A table is not in checkpoints: a job with a checkpoint folder refuses it.

        **Arguments:**

        - `name`: for messages.
        - `rows`, `columns`: its size; a row and its id fit `JAXRDMA_PARTITION_BYTES`.
        - `optimizer`: `RowSGD`, `RowAdagrad` or `RowAdam`, in float32. Rows that are not touched do not change.
        - `init`: `RowNormal`, `RowUniform` or `RowConstant`. Default: `RowNormal(0.01)`.
        - `policy`: `SyncReplicas()`, the default: a step ends when every worker has pushed, and a row takes the mean
          over those that touched it. `Async()`: each push is applied when it comes.

        **Returns:** the table at step 0.

        **Raises:** `ConfigError` for a size, a number or a policy that cannot be; `MismatchError`, on every process, if
        the workers' tables differ; `PeerFailedError`.
        """
        self._check_open("embedding")
        settings = TableSettings(
            name, rows, columns, optimizer, init if init is not None else RowNormal()
        )
        check_settings(settings, self._spec.partition_bytes)
        if self._spec.grows:
            raise ConfigError(
                f"embedding {name!r} in a job to which workers may be added (JAXRDMA_MOST_WORKERS): a step of a table "
                "takes a push of each of a fixed number of workers. Leave JAXRDMA_MOST_WORKERS out, or train the table "
                "in a job of its own"
            )
        if self._spec.replicate:
            raise ConfigError(
                f"replicate=1 with embedding {name!r}: no other server keeps a copy of a table's rows. Start the job "
                "without replicate, or train the table in a job of its own"
            )
        complete = table_policy(name, policy, self.num_workers)
        number = len(self._models)
        self._propose(
            FlowProposal(
                flow=number,
                leaves=[settings.leaf],
                digest=settings.digest(self.num_servers, self._spec.partition_bytes),
                mode="table",
                policy=to_wire(complete),
                update_fingerprint=settings.fingerprint(),
                programs=[],
            )
        )
        raise_for(self._engine.add_table(native_spec(number, settings, complete)))
        self._models.append(_no_model(number))
        if self._spec.show_plan and self.index == 0:
            control.say_on_stderr(f"model {number}: {settings.text(self.num_servers)}")
        return Embedding(jnp.zeros((), jnp.int32), name, rows, columns, self.id, number)

    def read(self, state: PSState) -> PSState:
        """The parameters as the servers hold them now, and their step; over verbs.

        Nothing is pushed, and no worker is waited for: they are read out of the servers' memory (RDMA READ), all of one
        version, as soon as no server is in the middle of an update. Training goes on from its own state, as if nothing
        had been read. May be called beside a step, by another thread or between `push` and `pull`; not inside `jit`.

        The first call of a model locks memory for one more copy of it.

        **Arguments:**

        - `state`: any state of the model, also one that was donated: it says which model, and where arrays go.

        **Returns:** a state in arrays of its own. With `SyncReplicas()` it equals, between two steps of this worker,
        what the last of them returned, because no step ends without this worker; beside a step it may be one further.
        With another policy it may be any number of steps further.

        **Raises:** `TransportError` if the job's transport is not verbs, or no more memory may be locked; `ConfigError`
        for a model whose gradients are only averaged; `StepError` if steps followed each other too fast to read
        between them; `MismatchError` if `state` is of another session or has other leaves; `TypeError` under `jit`,
        `vmap` or `grad`; `CancelledError` if the session is closed; `PeerFailedError`.
        """
        self._check_open("read")
        self._check_readable(state)
        model = step.find_flow(state.session, state.flow, "read")
        likes = model.flatten("params", state.params, exact=True)
        with self._read_lock:
            if self._locked is not None and state.flow not in self._readable:
                need = copy_bytes(self._models[state.flow].plan)
                self._locked.add(f"what is read of model {state.flow}", need)
                self._readable.add(state.flow)
            values = self._read_at_rest(state.flow)
            found = self._engine.stats().last_read
        if any(like.size for like in likes):
            newest = jnp.asarray(found, jnp.int32)
        else:
            # The servers hold nothing, of any step. A copy, because either state may be donated.
            newest = jnp.array(state.step, copy=True)
        dropped = jnp.asarray(self._engine.stats().dropped_of_flow[state.flow], jnp.int32)
        return self._state(state.flow, values, likes, newest, dropped)

    def average_flow(self, params: Any, known: dict[tuple[LeafSpec, ...], int]) -> int:
        """The number of a model whose gradients are averaged only. For `average_gradients`.

        Under a trace (`jax.eval_shape`, `jit` of an optimizer's init) nothing must be agreed twice: leaves that are in
        `known` keep their number then.
        """
        self._check_open("average_gradients")
        if self._spec.grows:
            raise ConfigError(
                "average_gradients in a job to which workers may be added (JAXRDMA_MOST_WORKERS): the servers hold no "
                "parameters that one could begin with. Use session.init(params, update=...), or leave "
                "JAXRDMA_MOST_WORKERS out"
            )
        if self._spec.replicate:
            raise ConfigError(
                "replicate=1 with average_gradients: the servers hold no parameters, of which a copy could be kept; "
                "each worker has its own, and its script must save them. Use session.init(params, update=...), or "
                "JAXRDMA_REPLICATE=0"
            )
        leaves, treedef, _ = describe_leaves(params)
        key = tuple(leaves)
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params))
        if traced and key in known:
            return known[key]
        plan = assign_partitions(leaves, self.num_servers, self._spec.partition_bytes)
        flow = self._agree(leaves, treedef, plan, "average", SyncReplicas(), "", []).flow
        known[key] = flow
        return flow

    def stats(self) -> Stats:
        """Counts so far; also after `close`."""
        stats = self._engine.stats()
        name = self._engine.transport
        return Stats(
            steps=stats.steps,
            gradients_accepted=stats.gradients_accepted,
            gradients_dropped=stats.gradients_dropped,
            bytes_pushed=stats.bytes_pushed,
            bytes_pulled=stats.bytes_pulled,
            transport=[(f"server {i}", name, self._why) for i in range(self.num_servers)],
        )

    def trace(self) -> NDArray[Any]:
        """The flight recorder: see `jaxrdma.trace.decode`."""
        return trace.decode(self._engine.records())

    def leave(self) -> None:
        """End this worker's part in good order: wait for what is in flight, say goodbye, close.

        **Raises:** why the job failed, if the last step that the program began did so too: nobody may have looked at a
        result of it. (Once more, where the program did and caught the error.) All is closed then. The end of a
        `with` block raises it too, unless an exception ended that; a program that ends without either says it, and
        ends with 1.
        """
        self._close(None)

    def close(self) -> None:
        """The same as `leave`. Idempotent: only the first call raises."""
        self._close(None)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._close(error)

    # --- beginning ---

    @property
    def _engine(self) -> "_native.WorkerEngine":
        assert self._made is not None, "there is an engine once the servers are known"
        return self._made

    def _join(self) -> None:
        roster = self._client.join()
        servers = sorted(roster.servers, key=lambda entry: entry.index)
        addresses = [entry.address for entry in servers]
        self._transport, self._why = roster.transport, roster.why
        self._made = self._make_engine(roster.transport, addresses)
        self._dumper.record(self._made)
        if self._client.failure is not None:
            raise self._client.failure  # came while there was no engine to be told
        with self._telling_of_trouble():
            status = self._engine.connect(
                addresses,
                [entry.tokens[self.index] for entry in servers],
                int(self._spec.connect_timeout * 1000),
            )
        self._joined = status.ok
        if not status.ok:
            raise self._first_cause(status)
        if notice := self._engine.notice:
            control.say_on_stderr(f"worker {self.index}: {notice}")
        _register_target()
        _native.register_session(self.id, self._engine)

    @contextlib.contextmanager
    def _telling_of_trouble(self) -> Generator[None, None, None]:
        """While servers are connected to, it is said every few seconds which cannot be reached, and why."""
        done, begin = threading.Event(), time.monotonic()

        def tell() -> None:
            while not done.wait(control.progress_pause(time.monotonic() - begin)):
                if trouble := self._engine.trouble:
                    control.say_on_stderr(f"worker {self.index}: {trouble}")

        thread = threading.Thread(target=tell, name="jaxrdma-connecting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _make_engine(self, name: str, servers: list[str]) -> "_native.WorkerEngine":
        spec = self._spec
        options, self._locked = transport.prepare(
            spec,
            name,
            transport.place(spec, servers=servers),
            f"what is on its way to {self.num_servers} servers",
        )
        engine = _native.WorkerEngine.create(
            spec.index,
            spec.job,
            self._incarnation,
            # A server that stands still for so long has been declared lost before, and the job has failed.
            sent_timeout_ms=int((spec.heartbeat_timeout + 5) * 1000),
            **options,
        )
        return raise_for(engine)

    def _agree(
        self,
        leaves: list[LeafSpec],
        treedef: Any,
        plan: Plan,
        mode: str,
        policy: Policy,
        fingerprint: str,
        programs: list[bytes],
        averaged: bool = False,
        mesh: Mesh | None = None,
    ) -> FlowStart:
        """Compare the model with the other workers', and make it known to the engine."""
        flow = len(self._models)
        resolved = policy.complete(self.num_workers)
        start = self._propose(
            FlowProposal(
                flow=flow,
                leaves=leaves,
                digest=plan.digest,
                mode=mode,
                policy=to_wire(resolved),
                update_fingerprint=fingerprint,
                programs=programs,
                averaged=averaged,
            )
        )
        if self._locked is not None and mode != "ema":
            self._locked.add(f"a copy of model {flow}", copy_bytes(plan))
        spec = flow_spec(flow, mode, plan, 0 if mode == "ema" else resolved.held)
        raise_for(self._engine.add_flow(spec))
        self._models.append(_Model(plan, spec))
        self._policies.append(resolved)
        if self._spec.show_plan and self.index == 0:
            for line in plan.text(flow):
                control.say_on_stderr(line)
        if mode != "ema":  # no step is made with them
            calls = step.make_calls(self.id, flow, leaves, average=mode == "average", mesh=mesh)
            self._flows[flow] = step.FlowCalls(tuple(leaves), treedef, calls, mesh)
        return start

    def _propose(self, proposal: FlowProposal) -> FlowStart:
        """Wait until all workers have proposed the same, and the servers are ready for it."""
        self._client.send(proposal)
        start = self._client.wait(
            lambda message: isinstance(message, FlowStart) and message.flow == proposal.flow,
            self._spec.connect_timeout,
        )
        assert isinstance(start, FlowStart)
        return start

    def _receive(
        self,
        kind: "_native.OperationKind",
        flow: int,
        sources: Sequence[NDArray[Any]] = (),
        step: int = 0,
    ) -> tuple[list[NDArray[Any]], "_native.Status"]:
        """Run an operation whose results are parameters, in new arrays. Ctrl-C ends it."""
        values = self._empty(flow)
        status = self._engine.run_operation(
            kind,
            flow,
            step,
            [as_bytes(array) for array in sources],
            [as_bytes(array) for array in values],
            self._models[flow].spec,
        )
        return values, status

    def _resume(self, flow: int, least: int) -> tuple[list[NDArray[Any]], int]:
        """What a worker begins with that comes to a running model: one version, `least` or a later one, and which."""
        values = self._empty(flow)
        targets = [as_bytes(array) for array in values]
        found = self._engine.follow(flow, least, targets, self._models[flow].spec)
        if not isinstance(found, int):
            raise self._first_cause(found)
        control.say_on_stderr(
            f"worker {self.index}: takes part in model {flow} from step {found} on"
        )
        return values, found

    def _empty(self, flow: int) -> list[NDArray[Any]]:
        """New arrays for the parameters of a model."""
        leaves = self._flows[flow].leaves
        return [np.empty(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]

    def _state(
        self,
        flow: int,
        values: Sequence[Any],
        likes: Sequence[Any],
        step: jax.Array,
        dropped: jax.Array,
    ) -> PSState:
        """A state of `values`, each placed as the one of `likes` is, or all on every device of the model's mesh."""
        model = self._flows[flow]
        placed: Sequence[Any] = values
        if model.mesh is None:
            placed = [place_like(value, like) for value, like in zip(values, likes, strict=True)]
        state = PSState(model.unflatten(placed), step, dropped, self.id, flow)
        if model.mesh is None:
            return state
        return jax.device_put(state, NamedSharding(model.mesh, PartitionSpec()))

    # --- reading ---

    def _check_readable(self, state: PSState) -> None:
        if isinstance(state, AverageState):
            raise ConfigError(
                "read of a model whose gradients are only averaged: its servers hold no parameters, each worker has "
                "its own"
            )
        # The first for vmap and grad, the second for a state from outside of the function that is traced.
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state))
        if traced or isinstance(jnp.zeros(()), Tracer):
            raise TypeError(
                "session.read inside jit, vmap or grad: it would run once, when the function is traced. Call it "
                "between two calls of the jitted function"
            )
        if state.session != self.id:
            raise MismatchError(
                f"read in session {self.id} of a state of session {state.session}: give a state that this session's "
                "init, or a ps_step from there, returned"
            )
        if self._transport != "verbs":
            raise TransportError(
                f"reading needs transport verbs, and this job has {self._transport} ({self._why}): only an RDMA device "
                "reads in a server's memory. Take the state that the last ps_step returned: it is the newest"
            )

    def _read_at_rest(self, flow: int) -> list[NDArray[Any]]:
        """What the servers hold, once no update is changing it."""
        deadline = time.monotonic() + _REST_SECONDS
        pause, longest = _LOOK_SECONDS
        while True:
            values, status = self._receive(_native.OperationKind.READ, flow)
            if status.ok:
                return values
            if status.code != _native.Code.STALE:
                raise self._first_cause(status)
            if time.monotonic() > deadline:
                raise StepError(
                    f"the servers' parameters changed whenever they were read, for {_REST_SECONDS:.0f} s: read between "
                    "two steps of this worker, when they rest"
                )
            self._verdict.wait(pause)  # else the engine knows at once
            pause = min(2 * pause, longest)

    # --- while it lives ---

    def _progress(self) -> tuple[int, str]:
        if self._made is None or not self._joined:
            return -1, control.JOINS
        stats = self._engine.stats()
        return stats.last_step, control.IN_STEP if self._engine.in_flight() else "computing"

    def _traffic(self) -> tuple[int, int, int]:
        """For a heartbeat, which is also when `jax.monitoring` hears of the steps since the last."""
        if self._made is None:
            return 0, 0, 0
        self._monitor_of_jax.look(self._made)
        stats = self._made.stats()
        return stats.bytes_pushed, stats.bytes_pulled, 0

    def _details(self) -> tuple[Wait | None, str]:
        if self._made is not None and not self._joined and (trouble := self._made.trouble):
            return None, trouble
        for each in self._made.pending(1) if self._made is not None else ():
            return Wait(each.flow, each.step, each.server, each.partition, each.stage), ""
        return None, whereabouts()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, control.SendTrace):
            dump = self._dumper.take("asked for", message.steps)
            self._client.send(control.Traced(message.number, dump))
        if isinstance(message, control.JobFailed | control.FlowRejected):
            self._verdict.set()
            if self._made is not None:
                self._made.fail(_native.Status(_native.Code.PEER_FAILED, message.text))
            self._dumper.save("the job failed")

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._dumper.save("SIGUSR1")
        ends = number in (signal.SIGTERM, signal.SIGHUP) and OrderlyEnd.is_due(number)
        if number == signal.SIGINT or (ends and not self._joined):
            self._interrupt()
        elif ends and self._last_step is None:
            step = self._progress()[0]
            self._last_step = threading.Timer(LAST_STEP_SECONDS, self._interrupt, [step])
            self._last_step.name = "jaxrdma-last-step"
            self._last_step.daemon = True
            self._last_step.start()

    def _interrupt(self, step: int | None = None) -> None:
        """End what is waited for; if `step` is given, only if that is still the last one done."""
        engine = self._made
        if engine is None or (step is not None and engine.stats().last_step != step):
            return
        if engine.in_flight() > 0 or not self._joined:
            engine.interrupt()

    def _watch(self) -> None:
        self._watch_connections()
        # A program that looks at its steps ends now. JAX lets one that does not go on and on, and tells it nothing.
        if self._ended.wait(_UNSEEN_SECONDS) or self._client.failure is None:
            return
        why = str(self._client.failure).rstrip(".")
        control.say_on_stderr(
            f"worker {self.index}: no step can be made any more, for {_UNSEEN_SECONDS:.0f} s already: {why}. A step "
            "raises that where a result of it is waited for, as by jax.block_until_ready(state)"
        )

    def _watch_connections(self) -> None:
        if not self._engine.wait_failure(-1) or self._verdict.is_set() or self._closed:
            return
        status = self._engine.status
        if status.code in (_native.Code.CANCELLED, _native.Code.PEER_FAILED):
            return
        self._client.send(control.Failed("connection", status.message))
        if not self._verdict.wait(_VERDICT_SECONDS):
            self._engine.fail(status)

    def _first_cause(self, status: "_native.Status") -> BaseException:
        """The exception for a native failure, or what the control plane knows to be behind it."""
        if status.code == _native.Code.UNAVAILABLE and self._client.failure is None:
            self._verdict.wait(_VERDICT_SECONDS)
        if status.code == _native.Code.CANCELLED and "interrupted" in status.message:
            return KeyboardInterrupt()
        return self._client.failure or native_error(status)

    def _check_open(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"{what} in process {os.getpid()}, which was forked from worker {self.index}, process {self._pid}: the "
                "session's connections and threads are there alone. Let forked processes load data, and start those "
                "that use JAX by multiprocessing's spawn"
            )
        if self._client.failure is not None:
            raise self._client.failure
        if self._closed:
            raise CancelledError(f"{what} on a session that is closed")

    # --- ending ---

    def _abort(self, error: BaseException) -> None:
        """Ends a session that never began."""
        self._closed = True
        step.close_session(self.id)
        if self._client.failure is None:
            self._client.send(_failed_message(error))
        if self._made is not None:
            self._made.close()
        self._client.close()
        if self._monitor.is_alive():
            self._end_threads()
        self._end_signals()

    def _end_signals(self) -> None:
        self._signals.stop()
        self._orderly_end.stop()
        if self._last_step is not None:
            self._last_step.cancel()
            self._last_step.join()

    def _forget(self) -> None:
        """In a forked child: nothing of the session is here, and its end is none."""
        self._closed = True
        step.close_session(self.id)
        OrderlyEnd.forget()

    def _at_exit(self) -> None:
        try:
            # An end that was interrupted, and what that led to was too.
            if self._cut_by is not None and os.getpid() == self._pid:
                self._cut(self._cut_by)
                return
            # Set by the interpreter when an exception ended the program, or at a prompt, by any of them.
            asked = hasattr(sys, "ps1") or sys.flags.interactive
            error = None if asked else getattr(sys, "last_value", None)
            unseen = self._close_quietly(error)
            if unseen is not None and error is None:
                # Nobody can be raised at any more.
                _native.exit_with(1)
        except Terminated:
            _native.exit_with(128 + OrderlyEnd.told)
        except KeyboardInterrupt as interrupt:
            # Python would not tell it to anybody any more, and end with 0.
            try:
                self._close_quietly(interrupt)
            finally:
                end_by_interrupt()

    def _close(self, error: BaseException | None) -> None:
        if error is not None:
            self._close_quietly(error)
            return
        with OrderlyEnd.put_off():
            unseen = self._end(error)
        if unseen is not None:
            raise unseen

    def _close_quietly(self, error: BaseException | None) -> BaseException | None:
        """Says on stderr what `_end` returns."""
        with OrderlyEnd.put_off():
            unseen = self._end(error)
        if unseen is not None:
            text = f"no step could be made any more when the session was closed: {unseen}"
            control.say_on_stderr(f"worker {self.index}: {text}")
        return unseen

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Returns why the job has failed, if the program may not have heard of it."""
        if os.getpid() != self._pid:
            return None
        with self._close_lock:
            if self._closed:
                return None
            failed = error is not None and not _is_clean_exit(error)
            problem: str | None = None
            if not failed and self._engine.status.ok:
                problem = _settle_programs(self.id)
                if problem is not None and self._engine.status.ok and not OrderlyEnd.told:
                    text = f"a step that nobody waited for failed: {problem}"
                    control.say_on_stderr(f"worker {self.index}: {text}")
                sent = self._engine.await_sent()
                if sent.code == _native.Code.DEADLINE:  # it may have arrived, and count
                    control.say_on_stderr(
                        f"worker {self.index}: {sent.message}; it leaves the job all the same"
                    )
            self._closed = True
        try:
            return self._part(error if failed else None, problem)
        except BaseException as interrupt:
            self._cut_by = interrupt
            self._cut(interrupt)
            raise

    def _part(self, error: BaseException | None, problem: str | None) -> BaseException | None:
        """What remains of `_end`, once nothing can be begun any more. `error`: of this worker; `problem`: of a step."""
        step.close_session(self.id)
        last_step = self._engine.stats().last_step
        told, failed = self._told_to_end(last_step), error is not None
        if error is not None and self._client.failure is None:
            self._client.send(_failed_message(error))
            self._dumper.save(f"ended by {type(error).__name__}")
        elif told is not None:
            self._client.send(told)
            failed = True
        if failed or not self._engine.status.ok:
            self._end_engine()
            self._client.close()
        else:
            # The goodbye first: a server takes the end of a connection before it for a loss.
            self._client.leave(last_step)
            self._engine.close()
        self._end_threads()
        unseen: BaseException | None = None
        if failed:
            _settle_programs(self.id)
        elif not self._engine.status.ok:
            problem = _settle_programs(self.id) or problem
            if problem is not None and not OrderlyEnd.told:  # or that is said in its place
                unseen = self._first_cause(self._engine.status)
        self._end_signals()
        atexit.unregister(self._at_exit)
        return unseen

    def _cut(self, interrupt: BaseException) -> None:
        """Ends at once what `_part` was interrupted in. Once more does no harm, wherever that was interrupted too.

        A thread of the session that came back from a native wait after the interpreter has ended would be unwound
        through functions that may not throw, and abort the process.
        """
        if self._client.failure is None:
            self._client.send(_failed_message(interrupt))  # goes nowhere after the goodbye
        self._client.close()
        self._end_engine()
        self._end_threads()
        self._end_signals()
        atexit.unregister(self._at_exit)

    def _end_engine(self) -> None:
        """What still waits ends now: a program of this process must not outlive its session."""
        why = "the session was closed because this worker failed"
        self._engine.fail(_native.Status(_native.Code.CANCELLED, why))
        self._engine.close()

    def _end_threads(self) -> None:
        _native.forget_session(self.id)
        self._verdict.set()
        self._ended.set()
        if threading.current_thread() is not self._monitor:
            self._monitor.join()

    def _told_to_end(self, last_step: int) -> control.Failed | None:
        """What the others are told if a signal ends this process: nothing if they can do without it, for it leaves."""
        if not OrderlyEnd.told or self._client.failure is not None:
            return None
        ended = self._engine.status.ok
        text = f"ended by {signal.Signals(OrderlyEnd.told).name}, after step {last_step}"
        if not ended:
            text += f"; the step after that did not come back within {LAST_STEP_SECONDS:.0f} s"
        needed = any(policy.held == 0 or policy.on_loss == "wait" for policy in self._policies)
        leaves = ended and (self.num_workers == 1 or (bool(self._policies) and not needed))
        control.say_on_stderr(f"worker {self.index}: {text}{'; left the job' if leaves else ''}")
        return None if leaves else control.Failed("terminated", text)


def _check_mesh(mesh: Mesh | None) -> None:
    """Refuse devices that are not this process's.

    **Raises:** `ConfigError`.
    """
    if mesh is None:
        return
    here = jax.process_index()
    others = [device for device in mesh.devices.flat if device.process_index != here]
    if others:
        raise ConfigError(
            f"mesh: {len(others)} of its {mesh.size} devices, such as {others[0]}, are of another process of "
            "jax.distributed. Give a mesh of jax.local_devices(): between processes the servers form the mean"
        )


def _failed_message(error: BaseException) -> control.Failed:
    if isinstance(error, KeyboardInterrupt):
        return control.Failed("interrupted", "interrupted (Ctrl-C)")
    if isinstance(error, Terminated):
        return control.Failed("terminated", f"ended by {signal.Signals(OrderlyEnd.told).name}")
    return control.raised(error)


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, Terminated) or (
        isinstance(error, SystemExit) and error.code in (None, 0)
    )


def _settle_programs(session: int) -> str | None:
    """Waits for every program of this thread; returns what the last step of `session` failed with, if it did.

    JAX forgets the error too. Otherwise it would report it at exit, twice, although the user has been told.
    """
    problem: str | None = None
    try:
        await_programs()
    except Exception as error:  # JaxRuntimeError, or a group of them
        # JAX tells an error of each program that waited for a failed one; ours is the first cause of all.
        problem = str(error).rpartition("jaxrdma: ")[2]
        with contextlib.suppress(ImportError, AttributeError):
            # Before 0.12 the barrier keeps what has failed, and there is no public way to drop it.
            from jax._src import dispatch  # pyright: ignore[reportPrivateUsage]

            dispatch.runtime_tokens.clear()
    end = _native.take_end(session)
    return problem if end.ok else end.message


_target_lock = threading.Lock()
_target_registered = False


def _register_target() -> None:
    global _target_registered
    with _target_lock:
        if not _target_registered:
            jax.ffi.register_ffi_target(step.TARGET, _native.cpu_handler(), platform="cpu")
            jax.ffi.register_ffi_target(table.TARGET, _native.rows_handler(), platform="cpu")
            _target_registered = True
