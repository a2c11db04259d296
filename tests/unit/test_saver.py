"""Servers and the coordinator agree on what is saved and restored, in whatever order, and whatever fails."""

import errno
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrdma import checkpoint, control
from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import (
    FlowAgreed,
    FlowReady,
    FlowStart,
    LeafSpec,
    RescueCommit,
    RescueCommitted,
    RescueSave,
    Restore,
)
from jaxrdma.errors import ConfigError, MismatchError
from jaxrdma.plan import Plan, assign_partitions
from jaxrdma.policy import SyncReplicas, to_wire
from jaxrdma.savepoints import Orders, Savepoints
from jaxrdma.saver import Saver
from jaxrdma.update import StatePart

LEAVES = [LeafSpec("params['w']", (300,), "float32"), LeafSpec("params['b']", (7,), "float32")]


class Held:
    """Parameters that say of which step they are, and one state array along each leaf, and a step count."""

    def __init__(self, plan: Plan, server: int) -> None:
        self.pieces = plan.pieces(server)
        self.counts = [sum(n for _, n in ranges) for ranges in self.pieces]
        self.params = [np.zeros(count, np.float32) for count in self.counts]
        self.mu = [np.zeros(count, np.float32) for count in self.counts]
        self.count = np.zeros(1, np.int32)

    def values(self, leaf: int, step: int, what: int) -> np.ndarray:
        places = [np.arange(b, b + n) for b, n in self.pieces[leaf]]
        return (
            np.concatenate([np.empty(0), *places]) + 1000 * step + 1e6 * leaf + 5e5 * what
        ).astype(np.float32)

    def go_to(self, step: int) -> None:
        for leaf in range(len(self.counts)):
            self.params[leaf][:] = self.values(leaf, step, 0)
            self.mu[leaf][:] = self.values(leaf, step, 1)
        self.count[:] = step

    def check(self, step: int) -> None:
        for leaf in range(len(self.counts)):
            np.testing.assert_array_equal(self.params[leaf], self.values(leaf, step, 0))
            np.testing.assert_array_equal(self.mu[leaf], self.values(leaf, step, 1))
        assert self.count[0] == step or not sum(self.counts)

    def parameters(self) -> list[np.ndarray]:
        return [array.view(np.uint8) for array in self.params]

    def state_parts(self) -> list[StatePart]:
        along = [StatePart(i, 0, "float32", n, True) for i, n in enumerate(self.counts) if n]
        return [*along, StatePart(-1, 0, "int32", 1, False)] if along else []

    def state(self) -> list[np.ndarray]:
        arrays = [*(array for array in self.mu if array.size), self.count]
        return [array.view(np.uint8) for array in arrays] if sum(self.counts) else []

    def load_state(self, fill: Callable[[StatePart, Any], None]) -> None:
        for part, array in zip(self.state_parts(), self.state(), strict=True):
            fill(part, array)


class Job:
    """Servers that save for real, and what the coordinator decides; messages travel when the test lets them.

    As under SyncReplicas, no server is more than one step ahead of another.
    """

    def __init__(self, stack: ExitStack, folder: Path, servers: int, **settings: Any) -> None:
        self.now = 100.0
        self.notes: list[str] = []
        self.said: list[str] = []
        self.problem: tuple[str, str, int] | None = None
        self.start: FlowStart | None = None
        self.to_coordinator: list[deque] = [deque() for _ in range(servers)]
        self.to_server: list[deque] = [deque() for _ in range(servers)]
        self.steps = [0] * servers
        self.savepoints = Savepoints(0, servers)
        plan = assign_partitions(LEAVES, servers, 256)
        update = settings.pop("update", "u")
        leaves = settings.pop("leaves", LEAVES)
        agreed = FlowAgreed(
            0, leaves, plan.digest, "update", to_wire(SyncReplicas(1, 1).complete(1)), update
        )
        self.held = [Held(plan, server) for server in range(servers)]
        self.savers: list[Saver] = []
        settings = {"checkpoint": str(folder), **settings}
        for server in range(servers):
            spec = ClusterSpec("127.0.0.1:1", "server", server, 1, servers, **settings)
            saver = Saver(spec, self.to_coordinator[server].append, self.said.append)
            stack.callback(saver.close)
            self.savers.append(saver)
        for server, saver in enumerate(self.savers):
            self.to_coordinator[server].append(saver.prepare(agreed, plan, self.held[server]))

    def begin(self) -> "Job":
        while self.start is None and self.problem is None:
            assert self.travel(), "nothing is on its way, and the model has not begun"
        if self.start is not None:
            step = self.start.restored or 0
            for server, saver in enumerate(self.savers):
                if self.start.restored is not None:
                    self.held[server].check(step)
                saver.started(0, self.start.restored)
                self.steps[server] = step
                self.held[server].go_to(step)
        return self

    def obey(self, orders: Orders) -> None:
        self.notes += orders.notes
        self.start = orders.start or self.start
        self.problem = orders.problem or self.problem
        for server, message in orders.messages:
            self.to_server[server].append(message)

    def travel(self, chance: random.Random | None = None) -> bool:
        """Let one message arrive, if there is one."""
        ways = [q for q in (*self.to_coordinator, *self.to_server) if q]
        if not ways:
            return False
        way = chance.choice(ways) if chance else ways[0]
        message = way.popleft()
        if way in self.to_coordinator and any(way is q for q in self.to_coordinator):
            server = next(i for i, q in enumerate(self.to_coordinator) if q is way)
            self.obey(self.savepoints.handle(server, message, self.now))
        else:
            server = next(i for i, q in enumerate(self.to_server) if q is way)
            if isinstance(message, Restore):
                self.to_coordinator[server].append(self.savers[server].restore(message))
            else:
                self.savers[server].handle(message)
        return True

    def step(self, server: int) -> None:
        if self.steps[server] > min(self.steps):
            return
        self.steps[server] += 1
        self.held[server].go_to(self.steps[server])
        self.savers[server].after_step(0, self.steps[server])

    def settle(self) -> None:
        """Until nothing is on its way and no thread writes."""
        for _ in range(10_000):
            if self.travel():
                continue
            event = threading.Event()
            for saver in self.savers:
                saver._jobs.put(event.set)
                assert event.wait(5)
                event.clear()
            if not any((*self.to_coordinator, *self.to_server)):
                return
        pytest.fail("messages go round in circles")

    def run(self, steps: int) -> "Job":
        for _ in range(steps):
            for server in range(len(self.steps)):
                self.step(server)
            self.settle()
        return self

    def finish(self) -> "Job":
        self.obey(self.savepoints.finish())
        self.settle()
        assert not self.savepoints.busy
        return self

    def saved(self) -> list[int]:
        saver = self.savers[0]
        return [m.step for m in checkpoint.find(saver._models[0].folder)[0]]


@pytest.fixture
def make(tmp_path: Path, no_leftovers: None) -> Iterator[Callable[..., Job]]:
    with ExitStack() as stack:
        yield lambda servers, **settings: Job(stack, tmp_path / "saved", servers, **settings)


# --- what is saved of a job that failed ---


def test_what_two_servers_held_is_saved_by_one_and_read_by_three(make, tmp_path: Path) -> None:
    job = make(2, checkpoint_steps=3).begin().run(4)
    sent = job.to_coordinator[1]
    agreed = job.savers[1]._models[0].agreed
    plan = assign_partitions(LEAVES, 2, 256)
    job.savers[1].prepare(agreed, plan, job.held[1], copy=(0, job.held[0]))

    def read(server: int) -> list[np.ndarray]:
        return [*job.held[server].parameters(), *job.held[server].state()]

    job.savers[1].rescue(RescueSave(0, 4, [0, 1]), read)
    settle(job.savers[1])
    saved = sent.pop()
    assert (saved.step, saved.problem) == (4, "")
    names = ["server-000-of-002.shard", "server-001-of-002.shard"]
    assert sorted(shard.name for shard in saved.shards) == names
    assert job.saved() == [3]  # it is none before the manifest is there
    job.savers[1].commit_rescue(RescueCommit(0, 4, saved.shards))
    settle(job.savers[1])
    assert sent.pop() == RescueCommitted(0, 4)
    again = make(3).begin()  # checks the numbers
    assert again.start.restored == 4


def test_a_copy_is_restored_with_the_part_it_is_of(make) -> None:
    make(2, checkpoint_steps=3).begin().run(3)
    job = make(2, checkpoint_steps=3)
    agreed = job.savers[1]._models[0].agreed
    plan = assign_partitions(LEAVES, 2, 256)
    copy = Held(plan, 0)
    job.savers[1].prepare(agreed, plan, job.held[1], copy=(0, copy))
    assert job.savers[1].restore(Restore(0, 3)).problem == ""
    copy.check(3)
    job.held[1].check(3)


def test_what_cannot_be_saved_of_a_job_that_failed_is_said(make, tmp_path: Path) -> None:
    job = make(1).begin().run(2)
    sent = job.to_coordinator[0]
    (tmp_path / "saved" / "model-0").write_text("in the way")
    job.savers[0].rescue(RescueSave(0, 2, [0]), lambda server: [])
    settle(job.savers[0])
    assert sent.pop().problem.startswith("server 0 could not write in ")
    job.savers[0].commit_rescue(RescueCommit(0, 2, []))
    settle(job.savers[0])
    assert sent.pop().problem.startswith("server 0 could not write the manifest: ")


def settle(saver: Saver) -> None:
    """Until its thread has done what it was told."""
    event = threading.Event()
    saver._jobs.put(event.set)
    assert event.wait(5)


# --- what is saved ---


def test_every_n_steps_and_the_last_are_saved_and_the_newest_restored(make) -> None:
    job = make(2, checkpoint_steps=3).begin().run(7)
    assert job.saved() == [6, 3]
    assert job.finish().saved() == [7, 6, 3]
    assert not job.said and len(job.notes) == 2
    again = make(3, checkpoint_keep=2).begin()
    assert again.start.restored == 7
    assert again.notes == ["model 0 goes on from the checkpoint of step 7"]
    assert again.run(2).finish().saved() == [9, 7]
    assert make(1).begin().start.restored == 9


def test_a_link_among_checkpoints_is_said_once_and_gives_way_to_the_next(make, tmp_path) -> None:
    foreign = tmp_path / "elsewhere"
    foreign.mkdir()
    (foreign / "manifest.json").write_text("of somebody else")
    make(2, checkpoint_steps=3).begin().run(4).finish()
    link = tmp_path / "saved" / "model-0" / "step-000000009"
    link.symlink_to(foreign)
    job = make(2, checkpoint_steps=3).begin()
    (note,) = job.notes
    assert note.startswith("model 0 goes on from the checkpoint of step 4; a newer one is damaged")
    assert note.count(f"{link} is not a folder, and links are not followed here") == 1
    assert job.run(5).saved() == [9, 6, 4] and not job.said
    assert [path.name for path in foreign.iterdir()] == ["manifest.json"]


def test_only_links_among_checkpoints_begin_nothing(make, tmp_path) -> None:
    (tmp_path / "saved" / "model-0").mkdir(parents=True)
    (tmp_path / "saved" / "model-0" / "step-000000009").symlink_to(tmp_path)
    kind, text, _ = make(2).begin().problem
    assert kind == "checkpoint" and "step-000000009 is not a folder, and links are not" in text


def test_nothing_is_saved_twice(make) -> None:
    make(2, checkpoint_steps=3).begin().run(6).finish()
    job = make(2, checkpoint_steps=3).begin()
    assert job.finish().saved() == [6, 3]
    assert make(5).begin().finish().saved() == [6, 3]


def test_a_server_that_holds_nothing_is_not_waited_for(make) -> None:
    many = 12  # there are 6 partitions
    job = make(many, checkpoint_steps=2).begin().run(2).finish()
    assert job.saved() == [2]
    assert len(list((job.savers[0]._models[0].folder / "step-000000002").iterdir())) < many
    assert make(2).begin().start.restored == 2


def test_by_seconds_a_step_is_named_that_nobody_has_passed(make) -> None:
    job = make(2, checkpoint_seconds=10, checkpoint_steps=1000).begin().run(50)
    job.obey(job.savepoints.tick(job.now))
    assert job.saved() == [] and not any(job.to_server)
    job.now += 11
    job.obey(job.savepoints.tick(job.now))  # names a step long passed
    job.settle()
    for _ in range(20):
        job.obey(job.savepoints.tick(job.now))
        job.run(1)
    (step,) = job.saved()
    assert 50 < step <= 70
    assert not any("not saved" in note for note in job.notes)
    assert job.finish().saved() == [70, step]


def test_by_seconds_a_step_is_found_also_where_steps_are_faster_than_messages(make) -> None:
    job = make(2, checkpoint_seconds=10).begin()
    job.now += 11
    for _ in range(60):
        for _ in range(5):
            for server in range(2):
                job.step(server)
        job.obey(job.savepoints.tick(job.now))
        for _ in range(sum(map(len, (*job.to_coordinator, *job.to_server)))):
            job.travel()  # what was on its way, and none of the answers
    job.settle()
    assert job.saved(), "no step was ever named that nobody had passed"


@pytest.mark.parametrize("seed", range(40))
def test_in_whatever_order_a_checkpoint_is_of_one_step(tmp_path: Path, no_leftovers, seed) -> None:
    chance = random.Random(seed)
    settings = {"checkpoint_steps": chance.choice([None, 1, 4]), "checkpoint_keep": 100}
    settings["checkpoint_seconds"] = chance.choice([None, 1.0])
    with ExitStack() as stack:
        job = Job(stack, tmp_path, chance.randint(1, 3), **settings).begin()
        for _ in range(300):
            if chance.random() < 0.4:
                job.step(chance.randrange(len(job.steps)))
            elif chance.random() < 0.2:
                job.now += 0.3
                job.obey(job.savepoints.tick(job.now))
            else:
                job.travel(chance)
        # The job ends when all have done the same steps.
        for server, step in enumerate(job.steps):
            if step < max(job.steps):
                job.step(server)
        job.obey(job.savepoints.finish())
        while job.travel(chance):
            pass
        job.settle()
        assert not job.savepoints.busy and not job.savepoints._saves
        assert job.problem is None
        assert job.saved()[:1] == [max(job.steps)] or max(job.steps) == 0
        files = list((tmp_path / "model-0").glob("step-*/*.shard"))
        holders = sum(saver._models[0].holds for saver in job.savers)
        assert len(files) == holders * len(job.saved()), "an incomplete one is left"
        for step in job.saved()[:5]:
            other = Job(stack, tmp_path, 2)
            for server, saver in enumerate(other.savers):
                assert saver.restore(Restore(0, step)).problem == ""
                other.held[server].check(step)


# --- what fails ---


@contextmanager
def full_disk(servers: tuple[str, ...] = ("",)) -> Iterator[None]:
    """No room for files whose names contain one of these."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if any(name in os.readlink(f"/proc/self/fd/{descriptor}") for name in servers):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.mark.parametrize("where", ["server-000", "server-001", "manifest"])
def test_a_full_disk_is_said_and_training_goes_on(make, where: str) -> None:
    job = make(2, checkpoint_steps=2).begin().run(2)
    with full_disk((where,)):
        job.run(2)
    assert job.saved() == [2]
    (note,) = [note for note in job.notes if "not saved" in note]
    assert "step 4 is not saved" in note and "No space left" in note
    assert "the newest checkpoint is that of step 2" in note
    assert len(job.said) == 1 and "training goes on" in job.said[0]
    left = list((job.savers[0]._models[0].folder / "step-000000004").glob("*"))
    assert where == "manifest" or not left, "what was written still takes room"
    assert job.run(2).saved() == [6, 2]
    assert not (job.savers[0]._models[0].folder / "step-000000004").exists()


def test_failures_in_a_row_are_said_once_a_minute_and_that_of_the_last_step_always(make) -> None:
    job = make(2, checkpoint_steps=1).begin()
    with full_disk():
        job.run(3)
        assert len(job.notes) == 1 and len(job.said) == 2
        job.now += 61
        job.run(1)
        assert "and 2 more like this" in job.notes[-1]
        job.run(1).finish()
    assert len(job.notes) == 3
    assert "step 5 is not saved" in job.notes[-1]
    assert "it was the last of this job, and there is no checkpoint yet" in job.notes[-1]
    assert [line for line in job.said if "step 5" in line], job.said


def test_a_step_that_is_due_while_another_is_saved_is_skipped_and_said(make) -> None:
    job = make(2, checkpoint_steps=2).begin()
    for _ in range(4):  # nothing travels: the coordinator cannot say that step 2 has ended
        for server in range(2):
            job.step(server)
    job.settle()
    assert job.saved() == [2]
    (note,) = [note for note in job.notes if "not saved" in note]
    assert "step 4 is not saved: server 0 is still saving step 2" in note
    assert job.run(2).saved() == [6, 2]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_is_said_and_the_previous_taken(make, tmp_path: Path) -> None:
    job = make(2, checkpoint_steps=2).begin().run(6)
    folder = job.savers[0]._models[0].folder
    # One is found by its length, one when it is read, by one of two servers alone.
    flip(folder / "step-000000004" / "server-001-of-002.shard")
    os.truncate(folder / "step-000000006" / "server-000-of-002.shard", 20)
    again = make(2, checkpoint_steps=2).begin()
    assert again.start.restored == 2
    assert len(again.notes) == 2
    assert "a newer one is damaged: " in again.notes[0] and "step-000000004" in again.notes[0]
    assert "other bytes than were written" in again.notes[0] and "20 bytes" in again.notes[1]
    assert again.run(2).saved() == [4, 2]
    assert len(list(folder.iterdir())) == 2, "the damaged ones are still there"


def test_a_job_does_not_begin_anew_because_all_are_damaged(make) -> None:
    job = make(2, checkpoint_steps=2).begin().run(2)
    flip(job.savers[0]._models[0].folder / "step-000000002" / "manifest.json")
    assert "no checkpoint of model 0 can be read" in make(2).begin().problem[1]
    again = make(2, checkpoint_restore="never").begin()
    assert again.start.restored is None
    assert "set aside as" in again.said[0]
    assert again.run(1).finish().saved() == [1]
    kept = job.savers[0]._models[0].folder.with_name("model-0-set-aside-1")
    assert (kept / "step-000000002").exists()


def test_another_model_or_update_is_refused_at_once(make) -> None:
    make(2).begin().run(2).finish()
    with pytest.raises(MismatchError, match="another optax update"):
        make(2, update="v")
    assert make(2, update="v", checkpoint_restore="new-update").begin().start.restored == 2
    with pytest.raises(MismatchError, match="another model: the shape of a leaf"):
        make(2, leaves=[LEAVES[0], LeafSpec("params['b']", (8,), "float32")])


def test_folders_that_are_not_one_are_a_problem(tmp_path: Path) -> None:
    savepoints = Savepoints(0, 2)
    rule = control.SaveRule(2, 0.0)
    savepoints.handle(0, FlowReady(0, True, rule, [4, 2]), 0.0)
    problem = savepoints.handle(1, FlowReady(0, True, rule, []), 0.0).problem
    assert problem is not None and "server 1 does not find the checkpoint of step 4" in problem[1]


def test_servers_that_save_by_other_rules_are_a_problem() -> None:
    savepoints = Savepoints(0, 2)
    savepoints.handle(0, FlowReady(0, True, control.SaveRule(2, 0.0)), 0.0)
    problem = savepoints.handle(1, FlowReady(0), 0.0).problem
    assert problem is not None
    assert "server 1 saves no checkpoints, server 0 saves every 2 steps" in problem[1]


def test_a_folder_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = ClusterSpec(
        "127.0.0.1:1", "server", 0, 1, 1, checkpoint=str(tmp_path / "file" / "below")
    )
    with pytest.raises(ConfigError, match="checkpoint folder .*below: Not a directory"):
        Saver(spec, lambda message: None, print)
