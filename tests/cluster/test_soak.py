"""A job that lives long, whose workers are killed and started again: right at the end, and nothing leaks."""

import itertools
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.job import PATIENCE, Job
from tests.cluster.leaks import Leaks
from tests.cluster.scripts import soak
from tests.cluster.test_follow import stop_at

BACK = "takes part in model 0 from step "


def last_step(job: Job, names: list[str]) -> int:
    """Of those processes, as they have said so far."""
    steps = re.findall(r"^step (\d+)$", "\n".join(map(job.output, names)), re.MULTILINE)
    return max(map(int, steps), default=0)


def live_long(
    job: Job, out: Path, steps: int, kills: int, pause: float, chance: random.Random
) -> Leaks:
    """Train for so many steps and kills: `pause` seconds after the last is made good a worker is killed again."""
    end = out.with_suffix(".end")
    job.start("soak.py", out, end)
    names = [f"worker {index}" for index in range(job.workers)]
    for name in names:
        job.wait_for_output(name, "step 100\n")
    with Leaks(job, min(5.0, pause / 8)) as leaks:
        seen = 0
        for number in itertools.count(1):
            moved = time.monotonic()
            strike = moved + pause
            while time.monotonic() < strike:
                time.sleep(0.1)
                step = last_step(job, names)
                if step > seen:
                    moved, seen = time.monotonic(), step
                stuck = time.monotonic() - moved
                assert stuck < 60 * PATIENCE, f"no progress for {stuck:.0f} s\n{job.outputs()}"
            if number > kills and seen >= steps:
                break
            index = chance.randrange(job.workers)
            job.kill(names[index])
            names[index] = f"worker {index} life {number}"
            job.start_worker(index, "soak.py", out, end, name=names[index])
            job.wait_for_output(names[index], BACK)
        # Far enough ahead for all of them to see it.
        until = last_step(job, names) + 500
        stop_at(end, until)
        codes = job.wait(100, [*names, "coordinator", *(f"server {i}" for i in range(job.servers))])
    assert set(codes.values()) == {0}, job.outputs()
    for index in range(job.workers):
        with np.load(f"{out}-{index}.npz") as got:
            for name in got.files:
                assert set(got[name].reshape(-1)) == {soak.expected(until, job.workers)}, name
    return leaks


def check_leaks(job: Job, leaks: Leaks) -> None:
    """Those who live from the beginning to the end."""
    lasting = ["coordinator", *(f"server {index}" for index in range(job.servers))]
    assert not [text for name in lasting if (text := leaks.grown(name))], leaks.table()


@pytest.mark.timeout(115)
def test_workers_that_are_killed_and_replaced_leave_nothing_behind(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2, 3)
    leaks = live_long(job, tmp_path / "out", 0, 3, 3.0 * PATIENCE, random.Random(5))
    check_leaks(job, leaks)
