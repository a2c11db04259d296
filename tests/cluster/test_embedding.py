"""Rows that are trained on the servers are those of float64 NumPy, and only they travel."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import jaxrdma
from tests.cluster.blame import check_all_name
from tests.cluster.job import Job
from tests.cluster.scripts import rows as script

Array = NDArray[Any]


def started(ids: Array, columns: int) -> Array:
    """What rows hold before they are trained: Box and Muller's transform of SplitMix64."""
    index = ids[:, None].astype(np.uint64) * np.uint64(columns) + np.arange(
        columns, dtype=np.uint64
    )
    bits = np.uint64(script.SEED) + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    radius = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    angle = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
    return 0.5 * np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)


class Reference:
    """Training as script rows.py does it, of all workers, in float64 on the rows that are ever touched."""

    def __init__(
        self,
        workers: int,
        rows: int,
        columns: int,
        touched: int,
        steps: int,
        optimizer: str,
        *,
        rests: bool = False,
    ) -> None:
        self.drawn = [
            [
                script.draw(worker, step, rows, columns, touched, rests=rests)
                for worker in range(workers)
            ]
            for step in range(steps)
        ]
        self.columns = columns
        self.ids = np.unique(np.concatenate([ids for step in self.drawn for ids, _ in step]))
        self.values = started(self.ids, columns)
        self.first = np.zeros_like(self.values)
        self.second = np.zeros_like(self.values)
        self.times = np.zeros((len(self.ids), 1))
        if optimizer == "adagrad":
            self.first += 0.1
        for step in self.drawn:
            sums = np.zeros_like(self.values)
            counts = np.zeros((len(self.ids), 1))
            for ids, noise in step:
                places = np.searchsorted(self.ids, ids)
                np.add.at(sums, places, 0.125 * self.values[places] + noise.astype(np.float64))
                counts[np.unique(places)] += 1
            touched_now = np.flatnonzero(counts)
            self.apply(optimizer, touched_now, sums[touched_now] / counts[touched_now])

    def apply(self, optimizer: str, at: Array, g: Array) -> None:
        self.times[at] += 1
        match optimizer:
            case "sgd":
                self.values[at] -= 0.25 * g
            case "momentum":
                self.first[at] = 0.5 * self.first[at] + g
                self.values[at] -= 0.25 * self.first[at]
            case "adagrad":
                self.first[at] += g**2
                self.values[at] -= 0.125 * g / np.sqrt(self.first[at] + 1e-7)
            case _:
                self.first[at] = 0.9 * self.first[at] + 0.1 * g
                self.second[at] = 0.999 * self.second[at] + 0.001 * g**2
                m = self.first[at] / (1 - 0.9 ** self.times[at])
                v = self.second[at] / (1 - 0.999 ** self.times[at])
                self.values[at] -= 0.0625 * m / (np.sqrt(v) + 1e-8)

    def check(self, out: Path, worker: int, *, within: float = 1e-5) -> None:
        """What the worker has seen at the end."""
        with np.load(f"{out}-{worker}.npz") as got:
            np.testing.assert_array_equal(got["ids"], self.ids)
            np.testing.assert_allclose(got["values"], self.values, rtol=0, atol=within)
            # Nobody touched these.
            expected = started(got["never"], self.columns)
            np.testing.assert_allclose(got["started"], expected, rtol=0, atol=1e-6)

    def check_bytes(self, told: dict[str, int], worker: int, *, more: float) -> None:
        """Each row that it touched travels once each way in a step, with its id; `more`: what else there may be."""
        touched = sum(len(np.unique(step[worker][0])) for step in self.drawn)
        row, number = 4 * self.columns, 4
        pushed = touched * (row + number) + touched * number  # gradients; what is looked up
        assert pushed <= told["pushed"] <= pushed * (1 + more), (told, pushed)
        assert told["pulled"] == touched * row, (told, touched * row)


def train(job: Job, out: Path, *work: Any, limit_s: float = 100) -> list[dict[str, int]]:
    """Runs the script; returns what each worker told of bytes."""
    job.start("rows.py", out, *work).succeed(limit_s)
    return [
        json.loads(job.output(f"worker {worker}").splitlines()[-1]) for worker in range(job.workers)
    ]


def train_rows(
    job: Job, rows: int, columns: int, steps: int, optimizer: str, limit_s: float = 100
) -> None:
    """One row in a hundred is touched by each worker in a step; numbers and bytes are checked."""
    out = job.folder / "rows"
    touched = rows // 100
    told = train(job, out, rows, columns, touched, steps, optimizer, "jit", limit_s=limit_s)
    reference = Reference(job.workers, rows, columns, touched, steps, optimizer)
    for worker in range(job.workers):
        reference.check(out, worker)
        reference.check_bytes(told[worker], worker, more=0.01)


@pytest.mark.parametrize("optimizer", list(script.OPTIMIZERS))
def test_rows_are_those_of_float64_and_bytes_are_those_of_touched_rows(
    make_job: Callable[..., Job], optimizer: str
) -> None:
    train_rows(make_job(2, 3), 20_000, 64, 5, optimizer)


@pytest.mark.parametrize("way", ["jit", "eager", "scan"])
def test_every_way_to_call_gives_the_same_rows(
    make_job: Callable[..., Job], tmp_path: Path, way: str
) -> None:
    job = make_job(3, 2, partition_bytes=4096)  # several messages for each server
    told = train(job, tmp_path / "rows", 5_000, 16, 1_000, 6, "adagrad", way)
    reference = Reference(2, 5_000, 16, 1_000, 6, "adagrad")
    for worker in range(2):
        reference.check(tmp_path / "rows", worker)
        reference.check_bytes(told[worker], worker, more=0.05)


def test_a_model_and_a_table_are_trained_together_and_a_worker_may_touch_nothing(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    work = (2_000, 8, 300, 4, "momentum", "jit", "model", "rest")
    train(make_job(2, 3), tmp_path / "rows", *work)
    reference = Reference(3, 2_000, 8, 300, 4, "momentum", rests=True)
    for worker in range(3):
        reference.check(tmp_path / "rows", worker)


def test_an_asynchronous_table_takes_each_push_as_it_comes(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    train(make_job(2, 1), tmp_path / "rows", 2_000, 8, 300, 5, "adam", "jit", "async")
    Reference(1, 2_000, 8, 300, 5, "adam").check(tmp_path / "rows", 0)


WRONG = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jaxrdma

session = jaxrdma.connect()
columns = 8 + (sys.argv[1] == "unlike") * session.index
table = session.embedding("words", rows=100, columns=columns, optimizer=jaxrdma.RowSGD(0.5))
for ids in (np.array([3, 100]), jnp.array([-1]), [2**40]):
    try:
        table.lookup(ids)
    except jaxrdma.ConfigError as error:
        print(error)
for ids, grads in (([1], np.ones((1, 7), np.float32)), ([1], np.ones((1, 8), np.int32)), ([0.5], np.ones((1, 8)))):
    try:
        table.push(ids, grads)
    except jaxrdma.ConfigError as error:
        print(error)
for name, call in (
    ("vmap", lambda: jax.vmap(lambda g: table.push(jnp.zeros(1, int), g).step)(jnp.zeros((2, 1, 8)))),
    ("grad", lambda: jax.grad(lambda g: table.push(jnp.zeros(1, int), g).step * 1.0)(jnp.zeros((1, 8)))),
):
    try:
        call()
    except TypeError as error:
        print(name, error)
assert table.lookup([]).shape == (0, 8)
assert table.lookup(np.zeros((2, 3), np.int64)).shape == (2, 3, 8)
table = table.push([], np.zeros((0, 8), np.float32))
sys.stdout.flush()
jax.block_until_ready(jax.jit(lambda ids: table.lookup(ids))(jnp.array([5, 100 + session.index])))
"""


def test_what_is_wrong_is_told_by_table_id_and_rows(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    job = make_job(1, 2).start(path, "alike")
    job.wait(60)
    said = job.output("worker 1")
    for text in (
        "'words' has rows 0 to 99, and one of the ids is 100",
        "one of the ids is -1",
        f"one of the ids is {2**40}",
        "got float32 of shape (1, 7)",
        "got int32 of shape (1, 8)",
        "ids: expected integers, got float64",
        "vmap Embedding.push under vmap",
        "grad Embedding.push cannot be differentiated",
        "JaxRuntimeError",
        "table 'words' has rows 0 to 99, and id number 1 of this call is 10",  # of whoever is told first
    ):
        assert text in said, said


def test_unlike_tables_fail_every_process(make_job: Callable[..., Job], tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    job = make_job(1, 2).start(path, "unlike")
    job.wait_for_output("coordinator", "the job failed")
    says = (r"embedding\['words'\] float32\[100,8\]", r"embedding\['words'\] float32\[100,9\]")
    check_all_name(job, says, 10, list(job.processes))


def test_a_worker_that_pushes_less_often_is_named(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    path = tmp_path / "fewer.py"
    path.write_text(
        "import jax, numpy as np, jaxrdma\n"
        "with jaxrdma.connect() as session:\n"
        "    table = session.embedding('words', rows=9, columns=2, optimizer=jaxrdma.RowSGD(0.5))\n"
        "    for _ in range(3 - session.index):\n"
        "        table = table.push([1], np.ones((1, 2), np.float32))\n"
        "    jax.block_until_ready(table.lookup([1]))\n"
    )
    job = make_job(1, 2).start(path)
    job.wait(60)
    assert "worker 1 left the job" in job.output("worker 0"), job.outputs()
    assert "step 2 of table 'words'" in job.output("worker 0"), job.outputs()


LOSES = """
import os, signal
import numpy as np
import jaxrdma

with jaxrdma.connect() as session:
    table = session.embedding(
        "words",
        rows=100,
        columns=4,
        optimizer=jaxrdma.RowSGD(0.5),
        init=jaxrdma.RowConstant(1.0),
        policy=jaxrdma.Async(),
    )
    mine = [session.index]
    for number in range(40):
        table = table.push(mine, np.ones((1, 4), np.float32))
        if session.index == 1 and number == 3:
            table.lookup(mine).block_until_ready()
            print("dies", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    print(np.asarray(table.lookup([0, 1]))[:, 0].tolist())
"""


def test_an_asynchronous_table_bears_the_loss_of_a_worker(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    path = tmp_path / "loses.py"
    path.write_text(LOSES)
    job = make_job(2, 2).start(path)
    codes = job.wait(60)
    lost = codes.pop("worker 1")
    assert lost == -9, job.outputs()
    assert set(codes.values()) == {0}, job.outputs()
    trained = json.loads(job.output("worker 0").splitlines()[-1])
    assert trained[0] == 1.0 - 40 * 0.5


FOLLOWED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, optax
import jaxrdma

with jaxrdma.connect() as session:
    table = session.embedding("words", rows=100, columns=4, optimizer=jaxrdma.RowSGD(0.5))
    state = session.init({"w": jnp.ones(3)}, update=optax.sgd(1.0))
    state = jax.block_until_ready(jaxrdma.ps_step(state, {"w": jnp.ones(3)}))
    print("stepped", flush=True)
    while not Path(sys.argv[1]).exists():
        table = table.push([1], jnp.ones((1, 4)))
        table.lookup([1]).block_until_ready()
"""


def test_a_follower_of_a_job_with_a_table_takes_its_models(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    path = tmp_path / "followed.py"
    path.write_text(FOLLOWED)
    job = make_job(2, 1).start(path, tmp_path / "enough")
    job.wait_for_output("worker 0", "stepped")
    with jaxrdma.follow(coordinator=job.address) as follower:
        snapshot = follower.pull({"w": np.zeros(3, np.float32)})
    (tmp_path / "enough").touch()
    assert snapshot.step == 1
    assert np.asarray(snapshot.params["w"]).tolist() == [0.0, 0.0, 0.0]
    job.succeed()


def test_a_job_with_checkpoints_refuses_a_table(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(1, 1, checkpoint=tmp_path / "saved")
    job.start("rows.py", tmp_path / "rows", 100, 8, 10, 2, "sgd", "jit")
    job.wait(60)
    assert "tables are not saved" in job.output("worker 0"), job.outputs()


def test_the_names_are_public() -> None:
    names = ("Embedding", "RowAdagrad", "RowAdam", "RowConstant", "RowNormal", "RowSGD")
    for name in (*names, "RowUniform"):
        assert getattr(jaxrdma, name).__module__.startswith("jaxrdma.")
