"""Dumps come back from files as they were, only the newest of each process; clocks are compared by the best answer."""

import os
import resource
import signal
from pathlib import Path

import msgspec
import pytest

from jaxrdma import dump, trace
from jaxrdma.clocks import Offset
from jaxrdma.dump import Dumper
from jaxrdma.errors import ConfigError
from tests.unit.records import MS, job

RECORDS = job(steps=5)[0].dump().records


class Engine:
    def records(self) -> bytes:
        return RECORDS

    def record_counts(self) -> tuple[int, int]:
        return 1000, 3


def dumper(folder: Path | None, said: list[str], clock: Offset | None = None) -> Dumper:
    where = None if folder is None else str(folder)
    made = Dumper("worker", 1, 7, where, clock or Offset(), said.append)
    made.record(Engine())
    return made


def test_a_dump_comes_back_from_its_file(tmp_path):
    said: list[str] = []
    folder = tmp_path / "new" / "traces"
    made = dumper(folder, said)
    made.save("SIGUSR1")
    made.save("the job failed")
    (found,) = dump.read_folder(folder)
    assert (found.name, found.reason, found.added, found.lost) == (
        "worker 1",
        "the job failed",
        1000,
        3,
    )
    assert found.records == RECORDS
    assert found.error_ns == -1
    assert len(list(folder.iterdir())) == 2
    assert len(said) == 2 and str(folder) in said[0]


def test_without_a_folder_nothing_is_written():
    said: list[str] = []
    dumper(None, said).save("SIGUSR1")
    assert said == []


def test_a_folder_that_cannot_be_written_is_said_and_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    said: list[str] = []
    dumper(tmp_path / "file", said).save("SIGUSR1")
    assert "cannot be written" in said[0]


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
def test_a_file_is_not_written_through_a_link(tmp_path, plant):
    said: list[str] = []
    mine = tmp_path / "mine"
    mine.write_text("precious")
    folder = tmp_path / "traces"
    (tmp_path / "scratch").mkdir()
    folder.symlink_to(tmp_path / "scratch")  # as the user wants it
    made = dumper(folder, said)
    made.save("SIGUSR1")
    (name,) = [path.name for path in folder.iterdir()]
    second = name.replace("-0.trace", "-1.trace")
    plant((folder / second).with_suffix(".part"), mine)
    plant(folder / second, mine)
    made.save("SIGUSR1")
    assert mine.read_text() == "precious"
    assert sorted(path.name for path in folder.iterdir()) == [name, second]
    assert len(said) == 2 and dump.read(folder / second).records == RECORDS


def test_of_a_file_that_cannot_be_written_nothing_is_left(tmp_path):
    said: list[str] = []
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        dumper(tmp_path, said).save("SIGUSR1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert "cannot be written" in said[0] and "File too large" in said[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(20)  # who opens a FIFO waits for somebody who writes
def test_a_fifo_is_no_dump_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.trace")
    with pytest.raises(ConfigError, match=r"a\.trace is no dump.*not a file"):
        dump.read_folder(tmp_path)


def test_only_the_last_steps_are_taken():
    found = trace.decode(dumper(None, []).take("asked for", 2).records)
    assert set(found["step"].tolist()) == {3, 4}
    assert len(found) * 5 == len(trace.decode(RECORDS)) * 2


def test_a_process_that_has_no_engine_yet_has_nothing_to_tell():
    made = Dumper("server", 0, 7, None, Offset(), print)
    assert made.take("asked for").records == b""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: b"no such thing", "is no dump"),
        (lambda d: msgspec.msgpack.encode(msgspec.structs.replace(d, format=2)), "has format 2"),
        (
            lambda d: msgspec.msgpack.encode(msgspec.structs.replace(d, records=b"half")),
            "middle of a record",
        ),
    ],
)
def test_what_is_no_dump_is_refused_by_name(tmp_path, change, text):
    (tmp_path / "a.trace").write_bytes(change(job(steps=1)[0].dump()))
    with pytest.raises(ConfigError, match=rf"a\.trace.*{text}"):
        dump.read_folder(tmp_path)


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_folder_without_dumps_says_how_there_come_to_be_some(tmp_path, name):
    with pytest.raises(ConfigError, match="JAXRDMA_TRACE_DIR"):
        dump.read_folder(tmp_path / name)


def test_every_life_of_a_process_counts():
    (one, other) = [job(steps=1)[0].dump(incarnation=i, time_ns=i) for i in (1, 2)]
    assert dump.latest([other, one]) == [one, other]
    newer = msgspec.structs.replace(one, time_ns=9)
    assert dump.latest([newer, one]) == [newer]


def test_the_answer_that_came_soonest_says_how_late_it_is_there():
    clock = Offset()
    assert (clock.known, clock.offset) == (False, 0)
    clock.heard(1000 * MS, 5040 * MS, 1100 * MS)  # 3990, by at most 50
    clock.heard(2000 * MS, 6004 * MS, 2010 * MS)  # 3999, by at most 5
    clock.heard(3000 * MS, 7090 * MS, 3100 * MS)
    assert (clock.known, clock.offset, clock.error) == (True, 3999 * MS, 5 * MS)


def test_an_old_answer_gives_way_as_clocks_drift():
    clock = Offset()
    clock.heard(0, 1000 * MS, 2 * MS)
    clock.heard(600_000 * MS, 601_030 * MS, 600_020 * MS)  # ten minutes: 60 ms
    assert (clock.offset, clock.error) == (1020 * MS, 10 * MS)


def test_a_difference_that_the_way_explains_is_none():
    clock = Offset()
    clock.heard(0, 8 * MS, 10 * MS)
    assert clock.offset == 0


def test_a_clock_that_was_set_back_meanwhile_tells_nothing():
    clock = Offset()
    clock.heard(10 * MS, 8 * MS, 5 * MS)
    assert not clock.known
