"""The server process: the native engine, the compiled update, and what the coordinator wants."""

import queue
import secrets
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from jaxrdma import control, transport
from jaxrdma.cluster import ClusterSpec, bind, format_address, listener, parse_address
from jaxrdma.control import (
    LAST,
    MOST_FOLLOWERS,
    AdmitFollower,
    AdmitWorker,
    Answered,
    ControlClient,
    Decided,
    DismissFollower,
    Dropped,
    FlowAgreed,
    FlowReady,
    FlowStart,
    FollowerAdmitted,
    GradientName,
    Held,
    HeldPart,
    JobFailed,
    Landed,
    LostWorker,
    Mean,
    MemberLeft,
    MemberLost,
    Message,
    MirrorAt,
    Rescue,
    RescueCommit,
    RescueSave,
    Restore,
    Roster,
    SaveAt,
    SaveCommit,
    SaveEnded,
    Shutdown,
    WorkerAdmitted,
)
from jaxrdma.dump import Dumper
from jaxrdma.embedding import TableSettings, native_spec
from jaxrdma.errors import ConfigError, JaxRdmaError, MismatchError, TransportError
from jaxrdma.memory import (
    SLOTS_PER_FOLLOWER,
    SLOTS_PER_WORKER,
    Locked,
    connections_bytes,
    shard_bytes,
    version_bytes,
)
from jaxrdma.plan import Plan, agreed_average_plan, agreed_plan, part_plan
from jaxrdma.policy import from_wire
from jaxrdma.saver import Saver
from jaxrdma.signals import SignalWatch, do_nothing, ending_signals, see_signal

if TYPE_CHECKING:
    from jaxrdma import _native
    from jaxrdma.metrics import Endpoint, ServerMetrics
    from jaxrdma.mirror import Copier, Keeper, Part
    from jaxrdma.native import ShardViews, TransportArguments
    from jaxrdma.update import ServerUpdate

# A worker's goodbye travels by the coordinator, the end of its data connection directly: so long may the goodbye be
# behind before the end counts as a loss.
_GOODBYE_SECONDS = 2.0

# With copies: so often are they compared with what they are of.
_COMPARE_STEPS = 1000


@dataclass(frozen=True)
class _Copied:
    """The mirror has this server's part of `flow` at `step`, or will not: `problem`."""

    flow: int
    step: int
    problem: str


@dataclass(frozen=True)
class _Broken:
    """No copy of the other server's part can be kept any longer."""

    text: str


def run_server(spec: ClusterSpec, listen: str, metrics: tuple[str, int] | None = None) -> int:
    """Serve one job, from its start to its end.

    **Arguments:**

    - `spec`: the cluster; `spec.index` is which server this is.
    - `listen`: "host:port" for the workers' data connections; port 0 means any free one.
    - `metrics`: host and port at which Prometheus is told this server's numbers. `None`: nowhere.

    **Returns:** the exit code: 0 after a job that ended in good order, 1 after a failed one, 2 if the settings cannot
    be used, 130 after Ctrl-C, 143 after SIGTERM. What went wrong is printed.
    """
    try:
        with _Server(spec, listen, metrics) as server:
            return server.run()
    except JaxRdmaError as error:
        control.say_on_stderr(f"server {spec.index}: {type(error).__name__}: {error}")
        return 2 if isinstance(error, ConfigError) else 1


class _Server:
    def __init__(self, spec: ClusterSpec, listen: str, metrics: tuple[str, int] | None) -> None:
        from jaxrdma import _native

        # An address that cannot be had is refused before the others are waited for.
        bind(listen, "a server").close()
        if spec.transport == "verbs":
            transport.check_verbs(spec)
        self._metrics: ServerMetrics | None = None
        self._endpoint: Endpoint | None = None
        if metrics is not None:
            self._metrics, self._endpoint = _show_metrics(spec.index, metrics)
            control.say_on_stderr(f"server {spec.index}: metrics at {self._endpoint.url}")
        self._native = _native
        self._spec = spec
        self._listen = listen
        self._inbox: queue.SimpleQueue[Message | _Copied | _Broken] = queue.SimpleQueue()
        self._plans: dict[int, Plan] = {}
        self._updates: dict[int, ServerUpdate] = {}
        self._parts: dict[int, Part] = {}  # of the models of which there are updates
        # With replicate: who has a copy of what lies here, and the copy of what lies elsewhere.
        self._copier: Copier | None = None
        self._keeper: Keeper | None = None
        self._mirror = ""  # its name
        self._frozen = False  # the job has failed: what is held here is saved, and does not change
        self._suspects: dict[
            int, tuple[float, str]
        ] = {}  # worker -> when its connection ended, and what it was
        self._incarnations: dict[int, int] = {}  # of the workers that may connect
        self._left: set[int] = set()
        self._followers: set[int] = set()
        self._follower_room = 0  # for so many of them memory is reckoned as locked
        self._signal = 0
        self._meeting = False  # its mirror, which it waits for
        self._step = -1
        self._doing = "serving"
        self._published: dict[int, int] = {}  # by model, the version of its parameters
        # And the version to which all means that were asked for lead.
        self._decided: dict[int, int] = {}
        self._averages: dict[int, int] = {}  # by model, which one is its averages
        self._last_saves: dict[int, SaveAt] = {}  # that wait for those means
        self._made: _native.ServerEngine | None = None
        self._shard_views: ShardViews | None = None
        self._locked: Locked | None = None  # over verbs
        incarnation = self._incarnation = secrets.randbits(63)
        self._client = ControlClient(
            spec,
            "server",
            spec.index,
            incarnation,
            on_message=self._on_message,
            progress=lambda: (self._step, self._doing),
            details=self._details,
            traffic=self._traffic,
            offer=lambda: transport.offer(spec, transport.place(spec, listen)),
        )
        self._dumper = Dumper(
            "server",
            spec.index,
            incarnation,
            spec.trace_dir,
            self._client.clock,
            control.say_on_stderr,
        )
        self._watch = SignalWatch(self._on_signal)
        self._saver: Saver | None = None
        if spec.checkpoint is not None:
            self._saver = Saver(spec, self._client.send, control.say_on_stderr)

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *_: object) -> None:
        if self._saver is not None:
            self._saver.close()
        if self._copier is not None:
            self._copier.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._made is not None:
            self._made.close()
        self._client.close()
        if self._endpoint is not None:
            self._endpoint.close()

    @property
    def _engine(self) -> "_native.ServerEngine":
        assert self._made is not None, "there is an engine once everybody is there"
        return self._made

    def run(self) -> int:
        for number in ending_signals():
            # A Python handler must exist for the watch to see the signal.
            signal.signal(number, do_nothing)
        if self._spec.trace_dir is not None:
            see_signal(signal.SIGUSR1)
        with self._watch:
            # joins before anything else may fail: the others learn of failures through the client
            try:
                roster = self._client.join()
            except JaxRdmaError:
                if self._signal:
                    return 128 + self._signal
                raise
            try:
                self._made = self._make_engine(roster)
            except JaxRdmaError as error:
                return self._fail(control.raised(error).kind, str(error))
            self._dumper.record(self._made)
            self._made.wake()  # for what came before there was an engine to be woken
            (mine,) = [entry for entry in roster.servers if entry.index == self._spec.index]
            for worker in roster.workers:
                token = mine.tokens[worker.index]
                if problem := self._admit(worker.index, worker.incarnation, token):
                    return self._fail("raised", f"cannot admit worker {worker.index}: {problem}")
            mirror = "" if self._keeper is None else self._keeper.address
            self._client.send(control.Admitting(self._made.address, mirror))
            while True:
                try:
                    code = self._turn()
                except MismatchError as error:
                    return self._fail("mismatch", str(error))
                except JaxRdmaError as error:
                    return self._fail(control.raised(error).kind, str(error))
                except Exception as error:  # whatever an update raises is for every process to know
                    return self._fail("raised", f"{type(error).__name__}: {error}")
                if code is not None:
                    return code

    def _make_engine(self, roster: Roster) -> "_native.ServerEngine":
        from jaxrdma.native import ShardViews, native_error

        spec = self._spec
        options, self._locked = transport.prepare(
            spec,
            roster.transport,
            transport.place(spec, self._listen),
            f"{spec.places} workers to land in",
        )
        if roster.keeps is not None:
            self._replicate(roster.keeps, options)
        made = self._native.ServerEngine.create(
            server=spec.index,
            servers=spec.num_servers,
            workers=spec.places,
            job=spec.job,
            listen=self._listen,
            partition_bytes=spec.partition_bytes,
            slots_per_worker=SLOTS_PER_WORKER,
            followers=MOST_FOLLOWERS,
            ordered=spec.ordered,
            **options,
        )
        if isinstance(made, self._native.Status):
            _, port = parse_address(self._listen)
            # Another server may have taken the port since we looked: they listen when everybody is there.
            error = native_error(made)
            raise type(error)(f"{error}{listener(port) if port else ''}")
        self._shard_views = ShardViews(made)
        return made

    def _replicate(self, keeps: control.Keeps, options: "TransportArguments") -> None:
        from jaxrdma.mirror import Copier, Keeper

        if self._locked is not None:
            self._locked.add(
                "its mirror, and to be one", connections_bytes(2, self._spec.partition_bytes)
            )
        options = {**options, "fault": ""}  # drills are about the connections to workers
        host, _ = parse_address(self._listen, "listen address")
        self._keeper = Keeper(
            self._spec.job,
            keeps,
            format_address(host, 0),
            self._spec.partition_bytes,
            options,
            lambda text: self._tell_self(_Broken(text)),
        )
        self._copier = Copier(
            self._spec.job,
            self._incarnation,
            options,
            lambda flow, step, problem: self._tell_self(_Copied(flow, step, problem)),
        )

    def _tell_self(self, told: _Copied | _Broken) -> None:
        """From another thread."""
        self._inbox.put(told)
        self._wake()

    def _details(self) -> tuple[None, str]:
        for lack in self._made.lacking(1) if self._made is not None else ():
            return None, (
                f"for {lack.seconds:.0f} s without partition {lack.partition} of worker {lack.worker}'s gradient for "
                f"step {lack.step} of model {lack.flow}"
            )
        return None, ""

    def _traffic(self) -> tuple[int, int, int]:
        """For a heartbeat, which is also when the histograms take in what has been recorded since the last."""
        if self._made is None:
            return 0, 0, 0
        if self._metrics is not None:
            self._metrics.read(self._made)
        stats = self._made.stats()
        refused = stats.refused + (0 if self._keeper is None else self._keeper.refused)
        return stats.bytes_pulled + stats.bytes_followed, stats.bytes_pushed, refused

    # --- one turn of the loop: whatever happened first ---

    def _turn(self) -> int | None:
        event = self._engine.wait_event(self._timeout_ms())
        if self._signal:
            self._client.send(self._told_to_end())
            return 128 + self._signal
        while not self._inbox.empty():
            code = self._handle(self._inbox.get())
            if code is not None:
                return code
        kind = self._native.ServerEvent.Kind
        match event.kind:
            case kind.INITIALISED | kind.STEP_READY | kind.STRANDED if self._frozen:
                pass  # of a job that is over
            case kind.INITIALISED:
                self._initialise(event.flow, event.step)
            case kind.STEP_READY if event.flow in self._averages.values():
                self._show_averages(event.flow)
            case kind.STEP_READY:
                self._apply(event.flow, event.step)
            case kind.GRADIENT:
                name = GradientName(*event.gradient)
                self._client.send(Landed(event.flow, name, event.step))
            case kind.WORKER_LOST:
                present = self._incarnations[event.worker] == event.incarnation
                if present and event.worker not in self._left:
                    self._suspects[event.worker] = (time.monotonic(), event.text)
            case kind.VIOLATION:
                return self._fail("protocol", event.text)
            case kind.FOLLOWER_REFUSED:
                control.say_on_stderr(f"server {self._spec.index}: {event.text}")
                self._client.send(FollowerAdmitted(event.worker, event.text))
            case kind.STRANDED:
                return self._fail("left", event.text)
            case _:
                pass
        self._report_lost()
        return None

    def _timeout_ms(self) -> int:
        if not self._suspects:
            return -1
        oldest = min(since for since, _ in self._suspects.values())
        return max(1, int((oldest + _GOODBYE_SECONDS - time.monotonic()) * 1000) + 1)

    def _report_lost(self) -> None:
        now = time.monotonic()
        for worker, (since, text) in list(self._suspects.items()):
            if now - since >= _GOODBYE_SECONDS:
                del self._suspects[worker]
                self._client.send(LostWorker(worker, self._incarnations[worker], text))

    def _handle(self, message: Message | _Copied | _Broken) -> int | None:
        match message:
            case _Copied():
                self._copied(message)
            case _Broken(text):
                assert self._keeper is not None, "nobody else says so"
                about = f"the copy of server {self._keeper.server} cannot be kept: {text}"
                return self._fail("raised", about)
            case MirrorAt():
                self._meet_mirror(message)
            case Rescue():
                self._freeze()
            case RescueSave():
                self._save_rescued(message)
            case RescueCommit():
                assert self._saver is not None, "only who can save is told to"
                self._saver.commit_rescue(message)
            case FlowAgreed():
                self._prepare(message)
            case Decided():
                self._carry_out(message)
            case FlowStart():
                self._started(message)
            case Restore():
                assert self._saver is not None, "only what was found is restored"
                self._client.send(self._saver.restore(message))
            case SaveAt(flow, step) if step == LAST and self._has_means_ahead(flow):
                # Of the job's end: what workers gave before they left still counts.
                self._last_saves[flow] = message
            case SaveAt() | SaveCommit() | SaveEnded():
                assert self._saver is not None, "only who can save is told to"
                self._saver.handle(message)
            case AdmitWorker(index, incarnation, token):
                problem = self._admit(index, incarnation, token)
                self._client.send(WorkerAdmitted(index, incarnation, problem))
            case AdmitFollower():
                self._client.send(FollowerAdmitted(message.number, self._admit_follower(message)))
            case DismissFollower():
                self._followers.discard(message.number)
                self._engine.dismiss_follower(message.number, message.why)
            case MemberLeft(role="worker"):
                self._left.add(message.index)
                self._suspects.pop(message.index, None)
                self._engine.mark_left(message.index)
            case MemberLost(index=index, text=text):
                self._left.add(index)
                self._suspects.pop(index, None)
                self._engine.expel(index, text)
            case Shutdown():
                self._summary()
                self._client.leave(self._step)
                return 0
            case JobFailed() | control.FlowRejected():
                control.say_on_stderr(f"server {self._spec.index}: the job failed: {message.text}")
                self._dumper.save("the job failed")
                return 1
            case _:
                pass
        return None

    def _admit(self, worker: int, incarnation: int, token: bytes) -> str:
        """Let a worker in, in the place of any life before. Why that cannot be; empty if it can."""
        status = self._engine.admit(worker, incarnation, token)
        if status.ok:
            self._incarnations[worker] = incarnation
            self._left.discard(worker)
        return status.message

    # --- followers ---

    def _admit_follower(self, follower: AdmitFollower) -> str:
        """Why it cannot come; empty if it may."""
        if self._locked is not None and len(self._followers) == self._follower_room:
            try:
                self._lock_for_follower(self._locked, f"follower {follower.number}")
            except TransportError as error:
                return str(error)
        status = self._engine.admit_follower(follower.number, follower.incarnation, follower.token)
        if not status.ok:
            return status.message
        self._followers.add(follower.number)
        return ""

    def _lock_for_follower(self, locked: Locked, who: str) -> None:
        """One more than ever before: what those leave that go, the next get."""
        plans = [self._plans[flow] for flow in (*self._updates, *self._averages.values())]
        copies = sum(version_bytes(plan, self._spec.index) for plan in plans)
        locked.add(who, connections_bytes(1, 0, SLOTS_PER_FOLLOWER) + copies)
        self._follower_room += 1

    def _lock_for_followers(self, locked: Locked, plan: Plan) -> None:
        """What those who are here already may cost of a new model. If that is too much, they have to go."""
        need = self._follower_room * version_bytes(plan, self._spec.index)
        try:
            locked.add(f"copies of it for {self._follower_room} followers", need)
        except TransportError as error:
            for number in self._followers:
                self._client.send(FollowerAdmitted(number, str(error)))

    # --- models ---

    def _prepare(self, agreed: FlowAgreed) -> None:
        from jaxrdma.native import flow_spec, raise_for

        if agreed.mode == "table":
            self._prepare_table(agreed)
            return
        if agreed.mode == "ema":
            plan = agreed_average_plan(self._plans[agreed.flow - 1], agreed.digest)
            self._averages[agreed.flow - 1] = agreed.flow
        else:
            plan = agreed_plan(
                agreed.leaves, self._spec.num_servers, self._spec.partition_bytes, agreed.digest
            )
        self._plans[agreed.flow] = plan
        if agreed.mode == "update":
            from jaxrdma.mirror import Part
            from jaxrdma.update import ServerUpdate

            flow, keeps = agreed.flow, self._keeper is not None
            update = self._updates[flow] = ServerUpdate(agreed.program or b"", keep_before=keeps)
            self._parts[flow] = Part(update, lambda: self.views(flow, "parameters"))
        held = 0 if agreed.mode == "ema" else from_wire(agreed.policy).held
        if self._locked is not None:
            workers = self._spec.places
            need = shard_bytes(plan, self._spec.index, agreed.mode, workers, held=held > 0)
            self._locked.add(f"its part of model {agreed.flow}", need)
            if agreed.mode != "average" and self._followers:
                self._lock_for_followers(self._locked, plan)
        raise_for(self._engine.add_flow(flow_spec(agreed.flow, agreed.mode, plan, held)))
        holds = any(p.server == self._spec.index for p in plan.partitions)
        copy = self._prepare_copies(agreed, plan) if agreed.mode == "update" else None
        ready = FlowReady(agreed.flow, holds)
        if self._saver is not None and agreed.mode == "update":
            ready = self._saver.prepare(agreed, plan, self._parts[agreed.flow], copy)
        self._client.send(ready)

    def _prepare_copies(self, agreed: FlowAgreed, plan: Plan) -> "tuple[int, Part] | None":
        """With `replicate`: be a mirror of a new model, and have one. Returns whose copy is kept here, and the copy."""
        if self._keeper is None or self._copier is None:
            return None
        if self._locked is not None:
            kept = shard_bytes(part_plan(plan, self._keeper.server), 0, "update", 1)
            # The means are registered by the connection to the mirror too, and what comes back has its own place.
            own = shard_bytes(plan, self._spec.index, "update", 1)
            self._locked.add(f"the copies of model {agreed.flow}", kept + own)
        self._copier.add(agreed.flow, part_plan(plan, self._spec.index))
        theirs = part_plan(plan, self._keeper.server)
        return self._keeper.server, self._keeper.add(agreed.flow, theirs, agreed.mirrored or b"")

    def _prepare_table(self, agreed: FlowAgreed) -> None:
        from jaxrdma.native import raise_for

        spec, settings = self._spec, TableSettings.from_fingerprint(agreed.update_fingerprint)
        if settings.digest(spec.num_servers, spec.partition_bytes) != agreed.digest:
            raise MismatchError(
                f"embedding {settings.name!r}: server {spec.index} cuts it otherwise than the workers: run the same "
                "version of jaxrdma, with the same JAXRDMA_PARTITION_BYTES, everywhere"
            )
        if self._saver is not None:
            raise ConfigError(
                f"embedding {settings.name!r} in a job with the checkpoint folder {spec.checkpoint}: tables are not "
                "saved. Start the job without checkpoints, and keep what you need by Embedding.lookup"
            )
        native = native_spec(agreed.flow, settings, from_wire(agreed.policy))
        raise_for(self._engine.add_table(native))
        self._client.send(FlowReady(agreed.flow, holds=False))

    def _started(self, start: FlowStart) -> None:
        """Before the parameters of a restored model are published: no step begins earlier."""
        if self._saver is not None:
            self._saver.started(start.flow, start.restored)
        if start.restored is not None:
            if self._keeper is not None and start.flow in self._keeper.parts:
                self._keeper.go_on(start.flow, start.restored)
            if self._copier is not None and start.flow in self._copier:
                # What is read from a checkpoint can be read again: the workers need not wait for that.
                self._copier.go_on(start.flow, start.restored)
            if start.flow in self._parts:
                self._parts[start.flow].step = start.restored
            self._publish(start.flow, start.restored)
        # Nothing was published of a model of which there is nothing here.
        if start.flow in self._averages.values() and start.flow - 1 in self._published:
            self._show_averages(start.flow)

    def _carry_out(self, decided: Decided) -> None:
        from jaxrdma.native import raise_for

        for decision in decided.decisions:
            match decision:
                case Mean(step, gradients):
                    names = [msgspec.structs.astuple(gradient) for gradient in gradients]
                    raise_for(self._engine.aggregate(decided.flow, step, names))
                    self._decided[decided.flow] = step + 1
                case Dropped(gradient):
                    name = msgspec.structs.astuple(gradient)
                    raise_for(self._engine.drop(decided.flow, name))
                case Answered(gradient, step, accepted):
                    name = msgspec.structs.astuple(gradient)
                    raise_for(self._engine.answer(decided.flow, name, step, accepted))

    def _initialise(self, flow: int, step: int) -> None:
        self._updates[flow].initialise(self.views(flow, "parameters"))
        self._parts[flow].step = step
        if self._copier is not None and flow in self._copier:
            self._copier.begin(flow, step, self._parts[flow].parameters())
        else:
            self._publish(flow, step)

    def _apply(self, flow: int, step: int) -> None:
        copied = self._copier is not None and flow in self._copier
        mean = self.views(flow, "gradient")
        if self._copier is not None and copied:
            # The mirror does the same meanwhile. The workers are answered when both have.
            self._copier.step(flow, step, [view.view("uint8") for view in mean])
        self._doing = f"updating model {flow}"
        self._updates[flow].step(mean, self.views(flow, "parameters"))
        self._parts[flow].step = step + 1
        if copied:
            self._doing = f"waiting for {self._mirror} to make step {step + 1} of model {flow} too"
        else:
            self._made_step(flow, step + 1)

    def _made_step(self, flow: int, step: int) -> None:
        self._publish(flow, step)
        self._doing = "serving"
        if self._saver is not None:
            self._saver.after_step(flow, step)
            if flow in self._last_saves and not self._has_means_ahead(flow):
                self._saver.handle(self._last_saves.pop(flow))

    def _has_means_ahead(self, flow: int) -> bool:
        return self._decided.get(flow, -1) > self._published.get(flow, -1)

    def _publish(self, flow: int, step: int) -> None:
        from jaxrdma.native import raise_for

        raise_for(self._engine.publish(flow, step))
        self._step = self._published[flow] = step
        averages = self._averages.get(flow)
        if averages in self._published:
            raise_for(self._engine.refresh(averages))

    def _show_averages(self, flow: int) -> None:
        """Followers of `flow` may have the averages as they are."""
        self._updates[flow - 1].read_averages(self.views(flow, "parameters"))
        self._publish(flow, self._published[flow - 1])

    def views(self, flow: int, what: str) -> tuple[Any, ...]:
        """NumPy views of this server's piece of each leaf, empty where it holds nothing of a leaf. Made once."""
        assert self._shard_views is not None, "there are views once there is an engine"
        return self._shard_views.get(flow, self._plans[flow], what)

    # --- the copies ---

    def _meet_mirror(self, mirror: MirrorAt) -> None:
        assert self._copier is not None, "only who has a mirror is told where it is"
        self._mirror = f"server {mirror.server}"
        self._meeting = True
        try:
            if not self._is_over():
                self._copier.connect(mirror.address, mirror.token, self._spec.connect_timeout)
        except JaxRdmaError:
            if not self._is_over():  # the loop sees why
                raise
        finally:
            self._meeting = False

    def _copied(self, copied: _Copied) -> None:
        """Both have this step: so has whoever is left of them."""
        if self._frozen:
            return
        if copied.problem:
            text = (
                f"server {self._spec.index} has lost its mirror, {self._mirror}: {copied.problem}"
            )
            self._client.send(control.Failed("connection", text))
        elif copied.flow not in self._published:
            self._publish(copied.flow, copied.step)  # the model begins
        elif copied.step > self._published[copied.flow]:  # else it was restored
            self._made_step(copied.flow, copied.step)
            if copied.step % _COMPARE_STEPS == 1:
                self._compare(copied)

    def _compare(self, copied: _Copied) -> None:
        """After the answer to the workers, who compute meanwhile."""
        assert self._copier is not None, "who copies can compare"
        if not self._copier.is_alike(copied.flow, self._parts[copied.flow].parameters()):
            control.say_on_stderr(
                f"server {self._spec.index}: at step {copied.step} of model {copied.flow} the copy on {self._mirror} "
                "has not the same bits: are the processors of the two alike, and their jaxlib? If this server is lost, "
                "the job goes on from that copy"
            )

    def _freeze(self) -> None:
        assert self._keeper is not None, "only what has copies is rescued"
        self._frozen = True
        self._doing = "saving what is left of the job"
        self._keeper.freeze()
        own = [HeldPart(flow, self._spec.index, part.steps()) for flow, part in self._parts.items()]
        kept = [
            HeldPart(flow, self._keeper.server, part.steps())
            for flow, part in self._keeper.parts.items()
        ]
        self._client.send(Held(own + kept))

    def _save_rescued(self, message: RescueSave) -> None:
        assert self._saver is not None, "only who can save is told to"
        assert self._keeper is not None, "only what has copies is rescued"
        copies = self._keeper.parts

        def read(server: int) -> list[Any]:
            parts = self._parts if server == self._spec.index else copies
            return parts[message.flow].at(message.step)

        self._saver.rescue(message, read)

    # --- what comes from other threads ---

    def _is_over(self) -> bool:
        return bool(self._signal) or self._client.failure is not None

    def _stop_meeting(self) -> None:
        """The loop may wait for a mirror that does not come, of a job that has ended."""
        if self._meeting and self._copier is not None:
            self._copier.cancel()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, control.SendTrace):
            # Not for the loop, which may be in an update for long.
            dump = self._dumper.take("asked for", message.steps)
            self._client.send(control.Traced(message.number, dump))
            return
        self._inbox.put(message)
        if isinstance(message, control.JobFailed | control.FlowRejected):
            self._stop_meeting()
        self._wake()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._dumper.save("SIGUSR1")
            return
        self._signal = number
        self._stop_meeting()
        if self._made is None:
            # The others may be waited for, who may never come.
            self._client.send(self._told_to_end())
            self._client.close()
        self._wake()

    def _told_to_end(self) -> control.Failed:
        return control.Failed("interrupted", f"ended by {signal.Signals(self._signal).name}")

    def _wake(self) -> None:
        if self._made is not None:
            self._made.wake()

    # --- ending ---

    def _fail(self, kind: str, text: str) -> int:
        control.say_on_stderr(f"server {self._spec.index}: {text}")
        self._client.send(control.Failed(kind, text))
        self._dumper.save(f"it failed: {kind}")
        return 1

    def _summary(self) -> None:
        stats = self._engine.stats()
        accepted = ", ".join(f"worker {i}: {stats.accepted[i]}" for i in sorted(self._incarnations))
        dropped = [
            f"worker {i}: {count}" for i, count in enumerate(stats.gradients_dropped) if count
        ]
        late = f"; dropped from {', '.join(dropped)}" if dropped else ""
        control.say_on_stderr(
            f"server {self._spec.index}: {stats.steps} steps; gradients accepted from {accepted}{late}; "
            f"{sum(stats.dropped)} dropped, {stats.duplicates} came twice"
        )


def _show_metrics(index: int, address: tuple[str, int]) -> "tuple[ServerMetrics, Endpoint]":
    from jaxrdma.metrics import Endpoint, ServerMetrics

    metrics = ServerMetrics(index)
    return metrics, Endpoint(address, metrics.registry)
