"""With `replicate=1`: the copy of a server's part that another server keeps. The why stands in `rescue.py`.

Between the two is a pair of the engines that workers and servers have: the server is the one worker of its mirror. What
it pushes is the mean gradient of a step, in the type in which it was summed; the mean of one is itself, so the mirror
runs the same program on the same numbers. On like processors the copy has the same bits; on unlike ones it may differ
in the last, as two runs of the job may. The answer is the parameters as the mirror has them: now and then the two are
compared, and a difference is said.

- `Copier`, on a server: sends what it does to its mirror, and tells when that is done.
- `Keeper`, on the mirror: has the copy, and applies what comes.

Each has a thread of its own; between a mean and the answer to the workers the server's own update and that of its
mirror run side by side.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrdma import _native
from jaxrdma.checkpoint import Bytes
from jaxrdma.control import Keeps
from jaxrdma.errors import JaxRdmaError
from jaxrdma.memory import SLOTS_PER_WORKER
from jaxrdma.native import ShardViews, TransportArguments, flow_spec, raise_for
from jaxrdma.plan import ITEM_BYTES, Plan
from jaxrdma.update import ServerUpdate

if TYPE_CHECKING:
    from jaxrdma.update import StatePart


class Part:
    """What a server has of a model: the newest version, and the one before it. As checkpoints see it.

    **Arguments:**

    - `update`: with its state; keeps what a step replaces.
    - `views`: the parameters in the engine's memory, a view for each leaf.

    **Attributes:** `step`: of the newest; -1 before there is one.
    """

    def __init__(self, update: ServerUpdate, views: Callable[[], Sequence[Any]]) -> None:
        self._update = update
        self._views = views
        self.step = -1

    def parameters(self) -> list[Bytes]:
        """The newest."""
        return [view.view(np.uint8) for view in self._views()]

    def state_parts(self) -> "list[StatePart]":
        """What the state consists of."""
        return self._update.state_parts()

    def state(self) -> list[Bytes]:
        """The newest."""
        return self._update.state()

    def load_state(self, fill: "Callable[[StatePart, Bytes], None]") -> None:
        """Replace it."""
        self._update.load_state(fill)

    def steps(self) -> list[int]:
        """Of which `at` knows."""
        if self.step < 0:
            return []
        return [self.step] if self._update.before() is None else [self.step - 1, self.step]

    def at(self, step: int) -> list[Bytes]:
        """Parameters, then state, of one of `steps`. Not to be overwritten while they are read."""
        if step == self.step:
            return [*self.parameters(), *self.state()]
        before = self._update.before()
        assert before is not None and step == self.step - 1, "only what is kept is asked for"
        params, state = before
        return [*params, *state]


class Copier:
    """Sends this server's part of every model, step by step, to its mirror. Owns the thread `jaxrdma-copy`.

    **Arguments:**

    - `job`, `incarnation`: of this server.
    - `options`: how tensors travel.
    - `done`: called on the thread with model, step, and what went wrong or nothing: the mirror has that step, or will
      not.
    """

    def __init__(
        self,
        job: str,
        incarnation: int,
        options: TransportArguments,
        done: Callable[[int, int, str], None],
    ) -> None:
        self._engine = raise_for(_native.WorkerEngine.create(0, job, incarnation, **options))
        self._done = done
        self._specs: dict[int, _native.FlowSpec] = {}  # by model
        self._held: set[int] = set()  # models of which there is something to copy
        self._answers: dict[int, list[Bytes]] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxrdma-copy", daemon=True)
        self._thread.start()

    def connect(self, address: str, token: bytes, timeout: float) -> None:
        """To the mirror.

        **Raises:** `JaxRdmaError`.
        """
        raise_for(self._engine.connect([address], [token], int(timeout * 1000)))

    def cancel(self) -> None:
        """Copy nothing any more: a `connect` that waits in another thread ends."""
        self._engine.fail(_native.Status(_native.Code.CANCELLED, "the job has ended"))

    def add(self, flow: int, part: Plan) -> None:
        """A model, of which this server holds `part`, by `part_plan`; once there is a connection.

        Copies are kept of the models with an update alone: on both sides these are numbered from 0.
        """
        spec = self._specs[flow] = flow_spec(len(self._specs), "update", part)
        if part.partitions:
            self._held.add(flow)
        self._answers[flow] = [
            np.empty(leaf.shape[0] * ITEM_BYTES[leaf.dtype], np.uint8) for leaf in part.leaves
        ]
        raise_for(self._engine.add_flow(spec))

    def __contains__(self, flow: int) -> bool:
        """Whether there is anything of this model to be copied."""
        return flow in self._held

    def begin(self, flow: int, step: int, parameters: Sequence[Bytes]) -> None:
        """The model begins with these, of `step`."""
        self._put(_native.OperationKind.INIT, flow, step, parameters, step)

    def go_on(self, flow: int, step: int) -> None:
        """The mirror has read these parameters, of `step`, from a checkpoint: wait until it is ready."""
        self._put(_native.OperationKind.FETCH, flow, step, [], step)

    def step(self, flow: int, step: int, mean: Sequence[Bytes]) -> None:
        """The mean gradient that leads from `step` to the next. It is read until that is done."""
        self._put(_native.OperationKind.EXCHANGE, flow, step, mean, step + 1)

    def is_alike(self, flow: int, parameters: Sequence[Bytes]) -> bool:
        """Whether the mirror, when it was last heard of this model, had these."""
        pairs = zip(self._answers[flow], parameters, strict=True)
        return all(np.array_equal(theirs, ours) for theirs, ours in pairs)

    def close(self) -> None:
        """Give up what is under way, and end."""
        self._jobs.put(None)
        self._engine.close()
        self._thread.join()

    def _put(
        self,
        kind: _native.OperationKind,
        flow: int,
        step: int,
        sources: Sequence[Bytes],
        leads_to: int,
    ) -> None:
        def run() -> None:
            spec = self._specs[flow]
            status = self._engine.run_operation(
                kind, spec.id, step, sources, self._answers[flow], spec
            )
            self._done(flow, leads_to, "" if status.ok else status.message)

        self._jobs.put(run)

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            job()


class Keeper:
    """The copy of another server's part of every model. Owns the thread `jaxrdma-keeper`.

    **Arguments:**

    - `job`: this server's.
    - `keeps`: whose part, and how that proves who it is.
    - `listen`: "host:port" for its connection.
    - `partition_bytes`: as all have it.
    - `options`: how tensors travel.
    - `failed`: called on the thread, with what went wrong, if the copy cannot be kept any longer.
    """

    def __init__(
        self,
        job: str,
        keeps: Keeps,
        listen: str,
        partition_bytes: int,
        options: TransportArguments,
        failed: Callable[[str], None],
    ) -> None:
        self.server = keeps.server
        self._failed = failed
        self._models: list[int] = []  # by their number between the two
        self._plans: dict[int, Plan] = {}
        self._updates: dict[int, ServerUpdate] = {}
        self.parts: dict[int, Part] = {}  # by model
        # Held while a step is made: what is asked for then is the version before or the one after.
        self._lock = threading.Lock()
        self._frozen = False
        self._engine = raise_for(
            _native.ServerEngine.create(
                server=0,
                servers=1,
                workers=1,
                job=job,
                listen=listen,
                partition_bytes=partition_bytes,
                slots_per_worker=SLOTS_PER_WORKER,
                **options,
            )
        )
        self._shard_views = ShardViews(self._engine)
        raise_for(self._engine.admit(0, keeps.incarnation, keeps.token))
        self.address = self._engine.address
        self._thread = threading.Thread(target=self._run, name="jaxrdma-keeper", daemon=True)
        self._thread.start()

    def add(self, flow: int, part: Plan, program: bytes) -> Part:
        """A model: `part` of it, by `part_plan`, and the update for that.

        **Raises:** `JaxRdmaError`.
        """
        with self._lock:
            number = len(self._models)
            self._models.append(flow)
            self._plans[flow] = part
            self._updates[flow] = ServerUpdate(program, keep_before=True)
            made = Part(self._updates[flow], lambda: self._views(flow, "parameters"))
            self.parts[flow] = made
            raise_for(self._engine.add_flow(flow_spec(number, "update", part)))
        return made

    def go_on(self, flow: int, step: int) -> None:
        """The part was filled from a checkpoint of `step`."""
        with self._lock:
            self._publish(flow, step)

    def freeze(self) -> None:
        """Make no other step. On return none is under way."""
        with self._lock:
            self._frozen = True

    @property
    def refused(self) -> int:
        """How many connections were turned away."""
        return self._engine.stats().refused

    def close(self) -> None:
        """End the connection and the thread."""
        self._engine.close()
        self._thread.join()

    def _run(self) -> None:
        kind = _native.ServerEvent.Kind
        try:
            while (event := self._engine.wait_event(-1)).kind != kind.CLOSED:
                with self._lock:
                    if self._frozen:
                        continue
                    if event.kind == kind.INITIALISED:
                        flow = self._models[event.flow]
                        self._updates[flow].initialise(self._views(flow, "parameters"))
                        self._publish(flow, event.step)
                    elif event.kind == kind.STEP_READY:
                        flow = self._models[event.flow]
                        mean, params = (
                            self._views(flow, "gradient"),
                            self._views(flow, "parameters"),
                        )
                        self._updates[flow].step(mean, params)
                        self._publish(flow, event.step + 1)
                if event.kind == kind.VIOLATION:
                    return self._failed(event.text)
        except JaxRdmaError as error:
            self._failed(str(error))
        except Exception as error:  # whatever an update raises is for every process to know
            self._failed(f"{type(error).__name__}: {error}")

    def _publish(self, flow: int, step: int) -> None:
        self.parts[flow].step = step  # before it is known to anybody
        raise_for(self._engine.publish(self._models.index(flow), step))

    def _views(self, flow: int, what: str) -> tuple[Any, ...]:
        return self._shard_views.get(self._models.index(flow), self._plans[flow], what)
