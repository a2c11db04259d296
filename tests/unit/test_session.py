"""`Session.read` without a cluster: what it asks of the engine, what it makes of the answer, and what it refuses."""

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrdma
from jaxrdma import _native, step
from jaxrdma import session as session_module
from jaxrdma.memory import Locked, LockLimit
from jaxrdma.native import flow_spec
from jaxrdma.plan import assign_partitions, describe_leaves
from jaxrdma.session import Session

OK = _native.Status(_native.Code.OK, "")
STALE = _native.Status(_native.Code.STALE, "they did not rest")

ZERO = jnp.zeros((), jnp.int32)
PARAMS = {
    "w": jnp.zeros((3, 2), jnp.float32),
    "b": jnp.zeros((5,), jnp.bfloat16),
    "s": jnp.zeros((), jnp.float32),
    "none": jnp.zeros((0, 4), jnp.float32),
}


class Engine:
    """Answers reads by `answers`, then well: every byte of version n is n."""

    def __init__(self, *answers: _native.Status) -> None:
        self.answers = list(answers)
        self.version = 0
        self.asked: list[Any] = []
        self.last_read = -1
        self.busy = threading.Lock()

    def run_operation(
        self,
        kind: Any,
        flow: int,
        step: int,
        sources: list[Any],
        targets: list[Any],
        spec: Any,
    ) -> _native.Status:
        assert self.busy.acquire(blocking=False), "two reads at once"
        self.asked.append((kind, flow, step, len(sources), spec.id))
        time.sleep(0)  # lets other threads in, as the engine does
        status = self.answers.pop(0) if self.answers else OK
        if status.ok:
            for target in targets:
                target[:] = self.version
            # The engine knows no step of a model without elements.
            self.last_read = self.version if any(map(len, targets)) else self.last_read
        self.busy.release()
        return status

    def stats(self) -> Any:
        return SimpleNamespace(last_read=self.last_read, dropped_of_flow=[3])


class Opened:
    """A session that is not connected, with one model, and its state at step 0."""

    def __init__(
        self, params: Any = PARAMS, transport: str = "verbs", *answers: _native.Status
    ) -> None:
        self.engine = Engine(*answers)
        self.session: Any = object.__new__(Session)
        self.client = SimpleNamespace(failure=None)
        leaves, treedef, _ = describe_leaves(params)
        plan = assign_partitions(leaves, 1, 1 << 20)
        number = next(session_module._session_numbers)
        vars(self.session).update(
            id=number,
            _pid=os.getpid(),
            _transport=transport,
            _why="worker 0 is on loopback",
            _flows=step.open_session(number),
            _models=[session_module._Model(plan, flow_spec(0, "update", plan))],
            _client=self.client,
            _closed=False,
            _made=self.engine,
            _locked=None,
            _readable=set(),
            _read_lock=threading.Lock(),
            _verdict=threading.Event(),
        )
        calls = step.make_calls(number, 0, leaves, average=False)
        self.session._flows[0] = step.FlowCalls(tuple(leaves), treedef, calls)
        self.state = jaxrdma.PSState(params, ZERO, ZERO, number, 0)

    def read(self) -> jaxrdma.PSState:
        return self.session.read(self.state)


def kinds(state: jaxrdma.PSState) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), state)


def test_what_the_servers_hold_is_returned_with_its_step():
    opened = Opened()
    opened.engine.version = 7
    found = opened.read()
    assert jax.tree.structure(found) == jax.tree.structure(opened.state)
    assert kinds(found) == kinds(opened.state)
    assert int(found.step) == 7
    for leaf in jax.tree.leaves(found.params):
        assert set(np.asarray(leaf).tobytes()) <= {7}
    # Of any step, because it may be newer than that of the state; nothing is pushed.
    assert opened.engine.asked == [(_native.OperationKind.READ, 0, 0, 0, 0)]
    assert int(opened.state.step) == 0 and float(opened.state.params["s"]) == 0.0


def test_a_state_that_was_donated_still_says_what_to_read():
    opened = Opened()
    opened.state = jax.tree.map(jnp.copy, opened.state)
    for leaf in jax.tree.leaves(opened.state):
        leaf.delete()
    opened.engine.version = 2
    assert int(opened.read().step) == 2


def test_each_read_has_arrays_of_its_own():
    opened = Opened()
    first = opened.read()
    opened.engine.version = 1
    second = opened.read()
    assert set(np.asarray(first.params["w"]).tobytes()) == {0}
    assert set(np.asarray(second.params["w"]).tobytes()) == {1}


def test_a_model_without_elements_is_at_the_step_of_its_state():
    opened = Opened({"none": jnp.zeros((0, 4))})
    opened.state = jaxrdma.PSState(
        opened.state.params, jnp.asarray(5, jnp.int32), ZERO, opened.session.id, 0
    )
    found = opened.read()
    opened.state.step.delete()
    assert int(found.step) == 5 and kinds(found.params) == {"none": ((0, 4), "float32")}


def test_what_changes_while_it_is_read_is_read_again():
    opened = Opened(PARAMS, "verbs", STALE, STALE, STALE)
    opened.engine.version = 3
    found = opened.read()
    assert (int(found.step), int(found.dropped)) == (3, 3)
    assert len(opened.engine.asked) == 4


def test_what_never_rests_is_given_up_with_advice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_module, "_REST_SECONDS", 0.02)
    opened = Opened(PARAMS, "verbs", *[STALE] * 1000)
    with pytest.raises(jaxrdma.StepError, match="read between two steps of this worker"):
        opened.read()


def test_reads_of_several_threads_take_turns():
    opened = Opened()

    def read_often() -> None:
        for _ in range(50):
            opened.read()

    threads = [threading.Thread(target=read_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened.engine.asked) == 200  # else an assertion of the engine ended a thread


def test_memory_to_read_into_is_reckoned_once_and_refused_beyond_the_limit():
    said: list[str] = []
    opened = Opened()
    opened.session._locked = Locked("worker 0", said.append, LockLimit(3 * 4096, None, False))
    opened.read()
    opened.read()
    assert len(said) == 1 and "8 KiB for what is read of model 0" in said[0]
    opened = Opened()
    opened.session._locked = Locked("worker 0", said.append, LockLimit(4096, None, False))
    with pytest.raises(jaxrdma.TransportError, match="cannot lock the memory for what is read"):
        opened.read()
    assert not opened.engine.asked


def test_reading_over_tcp_says_what_to_do():
    opened = Opened(PARAMS, "tcp")
    with pytest.raises(jaxrdma.TransportError) as caught:
        opened.read()
    for words in ("needs transport verbs", "tcp (worker 0 is on loopback)", "last ps_step"):
        assert words in str(caught.value)
    assert not opened.engine.asked


@pytest.mark.parametrize("trace", ["jit", "closure", "vmap", "grad"])
def test_reading_inside_a_transformation_is_refused(trace: str):
    opened = Opened(PARAMS, "tcp")
    read, state = opened.session.read, opened.state
    run = {
        "jit": lambda: jax.jit(read)(state),
        "closure": lambda: jax.jit(opened.read)(),
        "vmap": lambda: jax.vmap(read)(jax.tree.map(lambda x: jnp.stack([x, x]), state)),
        "grad": lambda: jax.grad(
            lambda s: read(
                jaxrdma.PSState(
                    state.params | {"s": s}, state.step, state.dropped, state.session, 0
                )
            ).params["s"]
        )(1.0),
    }[trace]
    with pytest.raises(TypeError, match="session.read inside jit"):
        run()


def test_a_model_that_is_only_averaged_has_nothing_to_read():
    opened = Opened()
    state: Any = jaxrdma.AverageState(jnp.zeros((), jnp.int32), opened.session.id, 0)
    with pytest.raises(jaxrdma.ConfigError, match="each worker has its own"):
        opened.session.read(state)


def test_a_state_of_another_session_or_model_is_refused():
    opened, other = Opened(), Opened()
    with pytest.raises(jaxrdma.MismatchError, match="init"):
        opened.session.read(other.state)
    of_no_model = jaxrdma.PSState(PARAMS, ZERO, ZERO, opened.session.id, 1)
    with pytest.raises(jaxrdma.StepError, match="not initialised"):
        opened.session.read(of_no_model)
    other_leaves = jaxrdma.PSState({"w": jnp.zeros(3)}, ZERO, ZERO, opened.session.id, 0)
    with pytest.raises(jaxrdma.MismatchError, match="tree of params"):
        opened.session.read(other_leaves)


def test_reading_in_a_session_that_has_ended_says_why():
    opened = Opened()
    opened.session._closed = True
    with pytest.raises(jaxrdma.CancelledError, match="read on a session that is closed"):
        opened.read()
    opened.client.failure = jaxrdma.PeerFailedError("worker 1 died")
    with pytest.raises(jaxrdma.PeerFailedError, match="worker 1 died"):
        opened.read()


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("CANCELLED", "interrupted", KeyboardInterrupt),
        ("CANCELLED", "the session is closed", jaxrdma.CancelledError),
        ("PEER_FAILED", "worker 1 died", jaxrdma.PeerFailedError),
    ],
)
def test_a_read_that_the_engine_fails_raises_the_exception_of_its_code(
    code: str, text: str, kind: type[BaseException]
):
    opened = Opened(PARAMS, "verbs", STALE, _native.Status(getattr(_native.Code, code), text))
    with pytest.raises(kind):
        opened.read()


def test_what_the_last_step_of_a_session_failed_with_is_told_once() -> None:
    session_module._register_target()
    opened, other = Opened(), Opened()
    with pytest.raises(jax.errors.JaxRuntimeError):  # neither has an engine
        jax.block_until_ready(jax.jit(jaxrdma.ps_step)(opened.state, PARAMS))
    assert session_module._settle_programs(other.session.id) is None
    told = session_module._settle_programs(opened.session.id)
    assert told is not None and told.startswith(f"session {opened.session.id} of this program")
    assert session_module._settle_programs(opened.session.id) is None
