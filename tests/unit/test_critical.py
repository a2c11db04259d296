"""What made a step late is named, whoever and whatever it was: on records that are made up."""

import itertools
import json

import pytest

from jaxrdma import perfetto, trace
from jaxrdma.critical import Step, critical_paths
from jaxrdma.dump import FORMAT, Dump
from jaxrdma.timeline import merge, slices
from tests.unit.records import MS, Life, job


def paths_of(lives: list[Life]) -> list[Step]:
    timeline = merge(life.dump() for life in lives)
    return critical_paths(timeline, timeline.steps())


def last_path(**late: int) -> Step:
    paths = paths_of(job(steps=3, **late))
    assert [path.step for path in paths] == [0, 1, 2]
    return paths[-1]


def test_a_worker_that_comes_late_is_named_with_how_much_later_than_the_first():
    path = last_path(compute_1=40)
    assert path.text == "worker 1: compute"
    assert path.late_seconds == pytest.approx(0.040)
    # 10 + 40 of compute, 2 of push, 1 of reduce, 3 of update, 2 of pull.
    assert path.parts == pytest.approx(
        {"compute": 0.050, "push": 0.002, "reduce": 0.001, "update": 0.003, "pull": 0.002}
    )
    assert path.seconds == pytest.approx(0.058)


def test_a_slow_update_is_named_with_its_server():
    path = last_path(update_1=40)
    assert path.text == "server 1: update"
    assert path.late_seconds == pytest.approx(0.043)
    assert path.parts["compute"] == pytest.approx(0.010)


def test_a_slow_push_is_named_with_worker_server_and_partition():
    path = last_path(push_1_2=40)
    assert path.text == "worker 1, server 0, partition 2: push"
    assert path.late_seconds == pytest.approx(0.042)


def test_a_slow_sum_is_named_with_its_partition():
    path = last_path(reduce_3=40)
    assert path.text == "server 1, partition 3: reduce"


def test_a_slow_pull_is_named_with_who_got_it_late():
    path = last_path(pull_0_1=40)
    assert path.text == "worker 0, server 1, partition 1: pull"
    assert path.late_seconds == pytest.approx(0.042)


def test_all_that_compute_for_equally_long_are_not_late():
    assert last_path(compute_0=500, compute_1=500).late != "compute"


def test_one_worker_alone_is_late_by_its_own_time():
    path = paths_of(job(steps=2, workers=1))[-1]
    assert (path.text, path.late_seconds) == ("worker 0: compute", pytest.approx(0.010))


def test_of_means_each_partition_counts_by_itself():
    """No update holds them together: the slow one is on the way of its own alone."""
    path = paths_of(job(steps=2, average=True, push_1_2=40))[-1]
    assert path.text == "worker 1, server 0, partition 2: push"
    assert path.parts["update"] == 0


@pytest.mark.parametrize("stage", ["landed", "reduced", "published"])
def test_a_step_of_which_something_is_forgotten_is_left_out(stage):
    lives = job(steps=3)
    for life in lives:
        life.forget(stage, step=1 if stage != "published" else 2)
    assert [path.step for path in paths_of(lives)] == [0, 2]


def test_clocks_of_two_machines_are_brought_together():
    far = job(steps=3, compute_1=40)
    far[1].ahead(7_000 * MS)
    assert paths_of(far) == paths_of(job(steps=3, compute_1=40))


def test_only_the_last_steps_are_looked_at():
    timeline = merge(life.dump() for life in job(steps=5))
    assert timeline.steps(2) == [(0, 3), (0, 4)]
    assert timeline.steps() == [(0, step) for step in range(5)]


def test_the_chrome_trace_has_every_process_and_every_slice_on_a_track_of_its_own():
    dumps = [life.dump() for life in job(steps=3, compute_1=40)]
    timeline = merge(dumps)
    steps = timeline.steps()
    found = slices(timeline, steps)
    written = json.loads(
        json.dumps(perfetto.trace_events(dumps, found, critical_paths(timeline, steps)))
    )
    events = written["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"critical path", "worker 1 (host, pid 11)", "server 0 (host, pid 20)"} <= names
    by_track: dict[int, list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            by_track.setdefault(event["tid"], []).append(event)
    shown = [e for track in by_track.values() for e in track if e["cat"] != "step"]
    # By worker 4 pushes and 4 pulls a step, and compute after the first; by partition a sum; by server an update.
    assert len(shown) == len(found) == 2 * 3 * 8 + 2 * 2 + 4 * 3 + 2 * 3
    for track in by_track.values():
        track.sort(key=lambda e: e["ts"])
        assert len({e["pid"] for e in track}) == 1
        for one, next_one in itertools.pairwise(track):
            assert one["ts"] + one["dur"] <= next_one["ts"] + 1e-3
    (late,) = [e for e in shown if e["name"] == "compute 2" and e["dur"] > 20e3]
    assert late["dur"] == pytest.approx(50e3)
    (step,) = [e for e in events if e["ph"] == "X" and e["name"].startswith("step 2:")]
    assert step["name"] == "step 2: worker 1: compute"


def test_records_of_stages_that_are_not_known_are_passed_over():
    life = Life("worker", 0)
    life.add(len(trace.STAGES) + 3, 0, 0, 0, 0)
    assert merge([life.dump()]).steps() == []
    assert Dump.__struct_fields__[0] == "format"
    assert FORMAT == 1
