"""The picture has a row for each process and says what made steps late; without matplotlib it says what to install."""

import sys
from pathlib import Path

import matplotlib as mpl
import pytest

from jaxrdma.critical import critical_paths
from jaxrdma.errors import ConfigError
from jaxrdma.picture import draw
from jaxrdma.timeline import merge, slices
from tests.unit.records import job


def drawn(file: Path) -> None:
    timeline = merge(life.dump() for life in job(steps=3, compute_1=40))
    steps = timeline.steps()
    draw(slices(timeline, steps), critical_paths(timeline, steps), str(file))


def test_every_process_has_a_row_and_every_late_step_its_reason(tmp_path, monkeypatch):
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")  # texts stay texts
    drawn(tmp_path / "stall.svg")
    picture = (tmp_path / "stall.svg").read_text()
    for text in ("worker 0", "worker 1", "server 0", "server 1", "step 2, 58.0 ms"):
        assert f">{text}<" in picture
    assert picture.count(">worker 1: compute<") == 3


@pytest.mark.parametrize("name", ["stall", "stall.jpeg", "nowhere/stall.png"])
def test_a_file_that_cannot_be_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="--picture"):
        drawn(tmp_path / name)


def test_without_matplotlib_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        drawn(tmp_path / "stall.png")
