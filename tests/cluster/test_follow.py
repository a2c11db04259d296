"""Followers of real jobs: each snapshot is one version, and no job minds who follows it, how, or for how long."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxrdma
from jaxrdma.cluster import VerbsSettings
from tests.cluster.job import DEVICES, PATIENCE, TRANSPORT, Job
from tests.cluster.scripts.followed import gradient, parameters, update

EMA = 0.9


class Reference:
    """One process and optax, as far as is asked for; and the moving averages in float64."""

    def __init__(self) -> None:
        self._params = parameters()
        self._averages = {name: np.asarray(p, np.float64) for name, p in self._params.items()}
        self._state = update().init(self._params)
        self.step = 0

        @jax.jit
        def advance(params: Any, state: Any, grads: Any) -> Any:
            updates, state = update().update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self._advance = advance
        self._gradient = gradient()

    def check(self, snapshot: jaxrdma.Snapshot, ema: bool = False) -> None:
        """Every element is that of the step, to the last bits; steps come in order."""
        while self.step < snapshot.step:
            self._params, self._state = self._advance(self._params, self._state, self._gradient)
            self.step += 1
            for name, param in self._params.items():
                old, new = self._averages[name], np.asarray(param, np.float64)
                self._averages[name] = EMA * old + (1 - EMA) * new
        assert self.step == snapshot.step, "older than one before"
        for name, param in self._params.items():
            got = snapshot.params[name]
            assert got.dtype == param.dtype
            if ema:
                # What one step adds is more than this; the last bits of 16-bit leaves are rounded.
                tolerance = {"rtol": 1e-2 if param.dtype.itemsize == 2 else 2e-5, "atol": 2e-6}
                expected = self._averages[name]
            else:
                tolerance, expected = {"rtol": 1e-6}, np.asarray(param, np.float64)
            np.testing.assert_allclose(np.asarray(got, np.float64), expected, **tolerance)


def follow(job: Job) -> jaxrdma.Follower:
    verbs = VerbsSettings(device=(DEVICES[0],)) if TRANSPORT == "verbs" else None
    return jaxrdma.follow(
        coordinator=job.address, transport=TRANSPORT, connect_timeout=60 * PATIENCE, verbs=verbs
    )


def stop_at(file: Path, step: int) -> None:
    """All of a sudden, so that no worker reads half of it."""
    new = file.with_suffix(".new")
    new.write_text(str(step))
    new.rename(file)


@pytest.mark.timeout(100)
def test_a_hundred_snapshots_beside_training_and_the_death_of_a_follower(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """One follower is there before the job, is stopped, and killed; another takes 100 versions and sees the end."""
    job = make_job(2, 2, partition_bytes=1024)
    stop = tmp_path / "stop"
    job.start_coordinator()
    job.start_follower("follower.py")
    job.wait_for_output("follower", "following")
    with follow(job) as follower:
        with pytest.raises(TimeoutError, match="model 0 has not started"):
            follower.pull(parameters(), timeout=0)
        for index in range(2):
            job.start_server(index)
        for index in range(2):
            job.start_worker(index, "followed.py", "sync", stop)
        reference = Reference()
        newest = -1
        for count in range(100):
            # In turn what is there and what is newer.
            wanted = newest if count % 2 else None
            snapshot = follower.pull(parameters(), newer_than=wanted)
            assert snapshot.step > newest if count % 2 else snapshot.step >= newest
            newest = snapshot.step
            reference.check(snapshot)
        job.wait_for_output("follower", "pull 20")
        # Amid a pull, as it does nothing else.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            job.kill("follower", number)
            done = follower.pull(parameters()).step
            after = follower.pull(parameters(), newer_than=done + 50)
            reference.check(after)
        job.wait(10, ["follower"])
        with pytest.raises(jaxrdma.MismatchError, match=r"shape of a leaf differs.*params\['b'\]"):
            follower.pull(parameters() | {"b": np.zeros(7, np.float32)})
        end = follower.pull(parameters()).step + 300  # no worker is there before it is told
        stop_at(stop, end)
        last = [snapshot.step for snapshot in follower.snapshots(parameters())][-1]
        assert after.step < last <= end
        with pytest.raises(jaxrdma.JobEndedError):
            follower.pull(parameters())
        names = [name for name in job.processes if name != "follower"]
        assert set(job.wait(30, names).values()) == {0}, job.outputs()
    with pytest.raises(jaxrdma.CancelledError, match="closed"):
        follower.pull(parameters())
    for index in range(2):
        assert f"stopped at step {end}" in job.output(f"worker {index}")


@pytest.mark.timeout(100)
def test_moving_averages_are_followed_beside_the_parameters(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2, 2, partition_bytes=1024)
    stop = tmp_path / "stop"
    job.start("followed.py", "sync,async", stop, EMA)
    with follow(job) as follower:
        references = {(model, ema): Reference() for model in (0, 1) for ema in (False, True)}
        for _ in range(10):
            for (model, ema), reference in references.items():
                wanted = reference.step + 1
                snapshot = follower.pull(parameters(), model, wanted, 60 * PATIENCE, ema=ema)
                assert snapshot.step > wanted
                reference.check(snapshot, ema)
        end = snapshot.step + 100
        stop_at(stop, end)
        last = [each.step for each in follower.snapshots(parameters(), ema=True)][-1]
        assert snapshot.step < last <= end
    assert set(job.wait(30).values()) == {0}, job.outputs()


@pytest.mark.timeout(100)
def test_averages_that_are_not_kept_are_refused(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(1, 1)
    job.start("followed.py", "sync", tmp_path / "never")
    with (
        follow(job) as follower,
        pytest.raises(jaxrdma.ConfigError, match=r"moving averages of model 0, which has none"),
    ):
        follower.pull(parameters(), ema=True)


@pytest.mark.timeout(100)
def test_snapshots_of_other_policies_and_the_failure_of_a_job(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2, 1, partition_bytes=1024)
    job.start("followed.py", "async,bounded", tmp_path / "never")
    references = Reference(), Reference()
    with follow(job) as follower:
        newest = -1
        for count in range(60):
            model = count % 2
            snapshot = follower.pull(parameters(), model, newer_than=newest, timeout=60 * PATIENCE)
            assert snapshot.step > newest
            newest = snapshot.step
            references[model].check(snapshot)
        assert follower.pull(parameters(), model, newer_than=newest - 1, timeout=0).step >= newest
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=f"newer than step {newest + 10**6} came within 0.2"):
            follower.pull(parameters(), newer_than=newest + 10**6, timeout=0.2)
        assert time.monotonic() - began < 5 * PATIENCE
        job.kill("worker 0")
        with pytest.raises(jaxrdma.PeerFailedError, match="worker 0 .* died"):
            follower.pull(parameters(), newer_than=newest + 10**6)
    job.wait(30)


@pytest.mark.timeout(100)
def test_a_follower_may_be_interrupted_while_it_connects_and_pull_again(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(1, 1, heartbeat_timeout=60 * PATIENCE)
    job.start("followed.py", "sync", tmp_path / "never")
    file = tmp_path / "now"
    job.start_follower("interrupted.py", "connecting", file)
    job.wait_for_output("follower", "following")
    with follow(job) as other:
        other.pull(parameters())  # so the model has started
    job.kill("server 0", signal.SIGSTOP)
    file.touch()
    job.wait_for_output("follower", "pulls\n")
    time.sleep(1)  # it does not say when it waits for the server
    job.kill("follower", signal.SIGINT)
    job.wait_for_output("follower", "interrupted\n", 2)
    job.kill("server 0", signal.SIGCONT)
    job.wait_for_output("follower", "pulled step", 20)
    assert job.wait(10, ["follower"]) == {"follower": 0}, job.outputs()


@pytest.mark.timeout(100)
def test_a_follower_that_is_interrupted_while_its_program_ends_ends_by_the_signal(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(1, 1)
    job.start_coordinator()
    file = tmp_path / "now"
    job.start_follower("interrupted.py", "at-end", file)
    job.wait_for_output("follower", "following")
    job.kill("coordinator", signal.SIGSTOP)  # so nobody takes note of its goodbye
    file.touch()
    job.wait_for_output("follower", "ends\n")
    time.sleep(0.5)  # Python ends, and says nothing of how far it is
    job.kill("follower", signal.SIGINT)
    assert job.wait(3, ["follower"]) == {"follower": -signal.SIGINT}, job.outputs()
    assert job.output("follower") == "following\nends\n"


@pytest.mark.timeout(30)
def test_who_follows_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("JAXRDMA_")]:
        monkeypatch.delenv(name)
    with pytest.raises(jaxrdma.ConfigError, match="no job to follow: coordinator not given"):
        jaxrdma.follow()
    with pytest.raises(jaxrdma.ConnectError, match="follower gave up"):
        jaxrdma.follow(coordinator="127.0.0.1:1", connect_timeout=0.2)
