"""`.ci/system-packages` where apt is not free: a machine that has just booted updates itself."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "system-packages"
LOCKED = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 17 (apt-get)"
UNKNOWN = "E: Unable to locate package doctest-dev"
WARNING = "W: Some index files failed to download."


def run_with_apt(folder: Path, *errors: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Asks for what the tests need, as root and without a compiler, of an apt that first ends with each of `errors`.

    Returns what the script did, and what apt was called with."""
    (folder / "errors").write_text("".join(f"{error}\n" for error in errors))
    apt = f"""
        echo "$*" >>{folder}/calls
        error=$(head -n 1 {folder}/errors)
        sed -i 1d {folder}/errors
        [ -z "$error" ] || echo "$error" >&2
        case $error in E:*) exit 100 ;; esac
    """
    for name, body in {"apt-get": apt, "id": "echo 0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "CXX": "false"}
    ended = subprocess.run(
        [SCRIPT, "python3", "test"], env=env, text=True, capture_output=True, timeout=30
    )
    return ended, (folder / "calls").read_text().splitlines()


def test_it_waits_for_another_apt(tmp_path: Path) -> None:
    ended, calls = run_with_apt(tmp_path, LOCKED, LOCKED)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("waiting for another apt: " + LOCKED) == 1
    assert [call.split()[1] for call in calls[:3]] == ["update"] * 3
    assert calls[3].split()[1] == "install" and "doctest-dev" in calls[3]
    assert len(calls) == 4


def test_a_warning_is_passed_on(tmp_path: Path) -> None:
    ended, calls = run_with_apt(tmp_path, WARNING)
    assert ended.returncode == 0
    assert ended.stderr == WARNING + "\n"
    assert len(calls) == 2


@pytest.mark.parametrize("before", [(), (LOCKED,)], ids=["at once", "after a wait"])
def test_another_error_ends_it(tmp_path: Path, before: tuple[str, ...]) -> None:
    ended, calls = run_with_apt(tmp_path, *before, UNKNOWN)
    assert ended.returncode == 1
    assert UNKNOWN in ended.stderr
    assert len(calls) == len(before) + 1
