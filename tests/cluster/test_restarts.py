"""Whatever process of a job is killed: `jaxrdma launch --restarts` goes on from the last checkpoint by itself.

With the bits of a run that nothing interrupted, and at most the interval between two checkpoints lost.
"""

import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from jaxrdma.launch import FAILURE_SECONDS
from tests.cluster.job import PATIENCE, SCRIPTS, TRANSPORT, Job, free_address
from tests.cluster.scripts import recover
from tests.cluster.test_checkpoint import steps_in
from tests.cluster.test_numbers import results

LAUNCHER = "launcher"  # its name among the processes of a `Job`
DELEGATE = "jaxrdma.delegate"
FIRST, SECOND = "coordinator,server:0,worker:0", "server:1,worker:1"  # launchers, by their shares
VICTIMS = {
    "chief": "worker 0",
    "worker": "worker 1",
    "server": "server 0",
    "coordinator": "coordinator",
}


@dataclass(frozen=True)
class Recovery:
    """What one restart cost.

    - `killed`: the last step that was done before.
    - `began`: the step that the next attempt went on from.
    - `seconds`: from the kill until the workers had their parameters again.
    """

    killed: int
    began: int
    seconds: float

    @property
    def lost(self) -> int:
        return self.killed - self.began


def launch(
    job: Job,
    *options: object,
    until: int,
    pause: float,
    launcher: str = LAUNCHER,
    on_loss: tuple[str, ...] = (),
) -> None:
    """Start `job` by a launcher, with checkpoints, and `options` of `jaxrdma launch`."""
    command = ("-m", "jaxrdma", "launch", "--servers", job.servers, "--workers", job.workers)
    settings = ("--ordered", "--partition-bytes", 256, "--transport", TRANSPORT)
    checkpoints = ("--checkpoint", job.folder / "checkpoints")
    script = (SCRIPTS / "recover.py", job.folder / "out", until, pause, *on_loss)
    words = (*command, *settings, *checkpoints, *options, *script)
    job.spawn(launcher, [str(word) for word in words], dict(os.environ))


def find(job: Job, name: str, attempt: int, launcher: str = LAUNCHER) -> psutil.Process:
    """A process of the job, by its name."""
    role, _, index = name.partition(" ")
    for process in psutil.Process(job.pid(launcher)).children():
        env = process.environ()
        if env.get("JAXRDMA_ATTEMPT") != str(attempt):
            continue
        if name in process.cmdline():  # the coordinator, or the module of the delegate
            return process
        if DELEGATE in process.cmdline():
            continue
        if (env.get("JAXRDMA_ROLE"), env.get("JAXRDMA_INDEX")) == (role, index):
            return process
    pytest.fail(f"there is no {name} in attempt {attempt}\n{job.outputs()}")


def said_in(job: Job, attempt: int, launcher: str = LAUNCHER) -> str:
    """What was printed from the first step of an attempt on, until the launcher said that it had failed."""
    begin = f"attempt {attempt} begins at "
    return job.output(launcher).partition(begin)[2].partition("starting again: ")[0]


def steps_done(text: str) -> int:
    """The last step that a worker said it had done; -1 if none has."""
    return max(map(int, re.findall(r"^worker \d+ +\| step (\d+)$", text, re.MULTILINE)), default=-1)


def wait_until(job: Job, what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60 * PATIENCE
    while not holds():
        ended = any(process.poll() is not None for process in job.processes.values())
        if ended or time.monotonic() > deadline:
            pytest.fail(f"waited for {what}\n{job.outputs()}")
        # A file has no completion to wait for.
        time.sleep(0.01)


def wait_for_step(job: Job, attempt: int, step: int, launcher: str = LAUNCHER) -> None:
    def done() -> bool:
        return steps_done(said_in(job, attempt, launcher)) >= step

    wait_until(job, f"step {step} of attempt {attempt}", done)


def kill_and_recover(job: Job, victim: str, attempt: int, step: int, saved: int = 0) -> Recovery:
    """Kill a process of this attempt (from 0) once a worker has done `step`; the next one must say whom it is about.

    `saved`: the step of a checkpoint that must be on the disk by then.
    """
    folder = job.folder / "checkpoints"
    wait_for_step(job, attempt, step)
    wait_until(job, f"a checkpoint of {saved}", lambda: max(steps_in(folder), default=0) >= saved)
    whole = max(steps_in(folder), default=0)
    find(job, victim, attempt).kill()
    begin = time.monotonic()
    text = job.wait_for_output(LAUNCHER, f"attempt {attempt + 1} begins at step ")
    seconds = time.monotonic() - begin
    blame = (
        rf"^jaxrdma: {victim} failed first: killed by SIGKILL; (.*)starting again: attempt (\d+)"
    )
    told = re.findall(blame, text, re.MULTILINE)[-1]
    assert told[1] == str(attempt + 2), text
    assert victim == "coordinator" or re.match(rf"{victim} \(.*\) died: ", told[0]), text
    began = int(re.findall(rf"attempt {attempt + 1} begins at step (\d+)", text)[0])
    assert began >= whole, f"the checkpoint of step {whole} was on the disk\n{text}"
    return Recovery(steps_done(said_in(job, attempt)), began, seconds)


def check_numbers(job: Job, until: int) -> None:
    """All ended well, with the bits of a run that nothing interrupted."""
    job.succeed(60)
    expected = recover.reference(job.workers, until)
    for worker in range(job.workers):
        for a, b in zip(results(job.folder / "out", worker), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def recover_at_random_step(job: Job, victim: str, chance: random.Random) -> Recovery:
    """One process is killed at any step of a job, which must end well, with the right bits."""
    interval, until = 5, 60
    options = ("--checkpoint-steps", interval, "--restarts", 1)
    launch(job, *options, until=until, pause=0.05 * PATIENCE)
    recovery = kill_and_recover(job, victim, 0, chance.randrange(1, until - 5))
    # What was done while a checkpoint was being written is lost too, if that did not end.
    assert 0 <= recovery.lost < 2 * interval, job.outputs()
    check_numbers(job, until)
    return recovery


def recover_without_loss(job: Job, victim: str, chance: random.Random) -> Recovery:
    """As `recover_at_random_step`, without any checkpoint, of servers that keep copies: no step is lost.

    That is: the next attempt goes on from what a worker saw complete, or from one step later, which the servers had
    made and no worker had received.
    """
    # Within a step, or between two.
    pause, until = chance.choice([(0.0, 1500), (0.05 * PATIENCE, 60)])
    launch(job, "--replicate", 1, "--restarts", 1, until=until, pause=pause)
    recovery = kill_and_recover(job, victim, 0, chance.randrange(1, min(until - 5, 400)))
    assert recovery.lost in (0, -1), job.outputs()
    check_numbers(job, until)
    return recovery


def recover_on_two_machines(job: Job) -> float:
    """Two launchers share a job, as on two machines, and lose a part of it after the other.

    **Returns:** the seconds from the first loss to the end of the job, which must have the right bits.
    """
    interval, address = 4, free_address()
    victims = ((FIRST, "coordinator"), (SECOND, "worker 1"), (SECOND, DELEGATE), (SECOND, ""))
    until = interval * (len(victims) + 2)

    def start(share: str, launcher: str) -> None:
        options = ("--coordinator", address, "--here", share, "--restarts", len(victims))
        launch(
            job,
            *("--checkpoint-steps", interval, *options),
            until=until,
            pause=0.1 * PATIENCE,
            launcher=launcher,
        )

    for share in (FIRST, SECOND):
        start(share, share)
    begin = 0.0
    for attempt, (launcher, victim) in enumerate(victims):
        step = interval * (attempt + 1) + 2
        for share in (FIRST, SECOND):
            wait_for_step(job, attempt, step, share)
        begin = begin or time.monotonic()
        if victim:
            find(job, victim, attempt, launcher).kill()
        else:
            job.kill(launcher)
            job.processes.pop(launcher).wait()
            # As somebody does by hand, who knows nothing of attempts.
            start(launcher, "again")
    last = f"attempt {len(victims) + 1} of"
    job.wait_for_output(FIRST, f"starting again: {last} {len(victims) + 1}")
    job.wait_for_output("again", f"jaxrdma: the coordinator is at {last} the job")
    check_numbers(job, until)
    return time.monotonic() - begin


@pytest.mark.timeout(200)  # it starts four times
def test_with_copies_no_step_is_lost(make_job: Callable[..., Job]) -> None:
    """Nor with the second loss, of a server that goes on from what its copy had become."""
    job, victims = make_job(2, 2), ("server 1", "server 0", "worker 1")
    until = 15 * (len(victims) + 1)
    options = ("--replicate", 1, "--restarts", len(victims))
    launch(job, *options, until=until, pause=0.05 * PATIENCE)
    for attempt, victim in enumerate(victims):
        recovery = kill_and_recover(job, victim, attempt, 15 * (attempt + 1) - 5)
        assert recovery.lost in (0, -1), job.outputs()
    check_numbers(job, until)
    saved = r"the servers that are left have saved step \d+ of model 0; starting again"
    assert len(re.findall(saved, job.output(LAUNCHER))) == len(victims)


@pytest.mark.timeout(200)
def test_with_copies_every_model_goes_on_from_its_own_last_step(
    make_job: Callable[..., Job],
) -> None:
    job, until = make_job(3, 2), 24
    command = ["-m", "jaxrdma", "launch", "--servers", "3", "--workers", "2", "--ordered"]
    command += ["--partition-bytes", "256", "--transport", TRANSPORT]
    script = str(SCRIPTS / "two_models.py")
    copies = ["--checkpoint", str(job.folder / "saved"), "--replicate", "1", "--restarts", "1"]
    job.spawn(
        "copies", [*command, *copies, script, str(job.folder / "a"), str(until)], dict(os.environ)
    )
    job.succeed(90)
    text = job.output("copies")
    done = re.findall(r"done (\d+) and (\d+)\n", text.partition("starting again")[0])
    began = re.findall(r"begin at (\d+) and (\d+)\n", text)[-1]
    for last, begin in zip(max((int(a), int(b)) for a, b in done), map(int, began), strict=True):
        assert begin in (last, last + 1), text
    assert re.search(r"have saved step \d+ of model 0 and step \d+ of model 2; starting", text)
    job.spawn("whole", [*command, script, str(job.folder / "b"), str(until)], dict(os.environ))
    job.succeed(60)
    for worker in range(2):
        for a, b in zip(
            results(job.folder / "a", worker), results(job.folder / "b", worker), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_no_worker_is_answered_before_the_copy_is_made(make_job: Callable[..., Job]) -> None:
    """Of four servers the last holds nothing of so few leaves, and is the mirror of the third."""
    job, until = make_job(4, 1), 100
    options = ("--partition-bytes", 1 << 16, "--replicate", 1)
    launch(job, *options, until=until, pause=0.02 * PATIENCE)
    wait_for_step(job, 0, 5)
    mirror = find(job, "server 3", 0)
    mirror.suspend()
    time.sleep(0.5)  # for the step that it may have copied already
    before = steps_done(said_in(job, 0))
    time.sleep(0.5)  # there is no event for what does not happen
    assert steps_done(said_in(job, 0)) == before < until, job.outputs()
    mirror.resume()
    check_numbers(job, until)


@pytest.mark.parametrize("policy", ["async", "sync:1", "bounded:1", "sync:2:shrink", "average"])
def test_what_no_copy_helps_is_refused_with_what_to_do_instead(
    make_job: Callable[..., Job], tmp_path: Path, policy: str
) -> None:
    job = make_job(2, 2, replicate=1, checkpoint=tmp_path / "saved")
    if policy == "average":
        job.start("train.py", job.folder / "out", "adam", 5, "average")
    else:
        job.start("policies.py", policy, 5)
    job.wait_for_output("coordinator", "the job failed")
    assert 0 not in job.wait(30).values()
    text = job.output("worker 0") + job.output("worker 1")
    assert "ConfigError: replicate=1 with " in text
    assert "JAXRDMA_REPLICATE=0" in text


@pytest.mark.timeout(200)
def test_servers_that_save_for_long_are_not_stopped(make_job: Callable[..., Job]) -> None:
    job, until = make_job(2, 2), 60
    launch(job, "--replicate", 1, "--restarts", 1, until=until, pause=0.05 * PATIENCE)
    wait_for_step(job, 0, 5)
    survivor = find(job, "server 0", 0)
    survivor.suspend()
    find(job, "server 1", 0).kill()
    time.sleep(FAILURE_SECONDS + 1.5)  # as long as it may take, and more, where nothing is saved
    assert "starting again" not in job.output(LAUNCHER)
    survivor.resume()
    text = job.wait_for_output(LAUNCHER, "attempt 1 begins at step ")
    assert "the servers that are left have saved step " in text
    assert f"attempt 1 begins at step {steps_done(said_in(job, 0))}\n" in text
    check_numbers(job, until)


@pytest.mark.timeout(200)
def test_a_server_and_its_copy_lost_at_once_cost_what_came_after_the_last_checkpoint(
    make_job: Callable[..., Job],
) -> None:
    job, until = make_job(2, 2), 30
    options = ("--replicate", 1, "--restarts", 1, "--checkpoint-steps", 10)
    launch(job, *options, until=until, pause=0.1 * PATIENCE)
    wait_for_step(job, 0, 14)
    for victim in [find(job, name, 0) for name in ("server 0", "server 1")]:
        victim.kill()
    text = job.wait_for_output(LAUNCHER, "attempt 1 begins at step ")
    assert "attempt 1 begins at step 10\n" in text
    assert "what came after the last checkpoint is lost: " in text
    check_numbers(job, until)


@pytest.mark.timeout(200)
def test_on_two_machines_no_step_is_lost_either(make_job: Callable[..., Job]) -> None:
    job, until, address = make_job(2, 2), 30, free_address()
    for share in (FIRST, SECOND):
        options = ("--coordinator", address, "--here", share, "--replicate", 1, "--restarts", 1)
        launch(job, *options, until=until, pause=0.1 * PATIENCE, launcher=share)
    wait_for_step(job, 0, 9, FIRST)
    find(job, "server 1", 0, SECOND).kill()
    began = re.findall(
        r"attempt 1 begins at step (\d+)",
        job.wait_for_output(FIRST, "attempt 1 begins at step "),
    )
    assert int(began[0]) - steps_done(said_in(job, 0, FIRST)) in (0, 1), job.outputs()
    for share in (FIRST, SECOND):
        assert "the servers that are left have saved step " in job.output(share)
    check_numbers(job, until)


@pytest.mark.timeout(200)  # it starts five times
def test_a_job_survives_the_loss_of_each_of_its_processes(make_job: Callable[..., Job]) -> None:
    job, interval = make_job(1, 2), 4
    options = ("--checkpoint-steps", interval, "--restarts", len(VICTIMS))
    until = interval * (len(VICTIMS) + 1)
    launch(job, *options, until=until, pause=0.1 * PATIENCE)
    for attempt, victim in enumerate(VICTIMS.values()):
        saved = interval * (attempt + 1)
        recovery = kill_and_recover(job, victim, attempt, saved + 2, saved)
        assert 0 <= recovery.lost <= interval, job.outputs()
    check_numbers(job, until)
    output = job.output(LAUNCHER)
    assert f"starting again: attempt {len(VICTIMS) + 1} of {len(VICTIMS) + 1}" in output
    assert "is not saved" not in output
