"""Every snippet and command of the README runs."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrdma.cli import trace
from jaxrdma.cli.coordinator import add_arguments
from jaxrdma.cluster import _PARSERS, ClusterSpec, VerbsSettings
from jaxrdma.devices import kernel_devices
from tests.cluster.job import Job, free_address

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

# What the snippets leave to the reader.
PREAMBLE = """
import jax, jax.numpy as jnp, jaxrdma, numpy as np, optax

params = {"w": jnp.zeros((4, 2)), "b": jnp.zeros((2,))}

def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - 1.0) ** 2)

def my_batches(index, count):
    rng = np.random.default_rng(index)
    return [jnp.asarray(rng.normal(size=(8, 4)), jnp.float32) for _ in range(20)]

def something_else(batch):
    return batch.sum()
"""


def blocks(language: str) -> list[str]:
    # All fences are matched, so that the end of one is not taken for the beginning of another.
    fences = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


def commands() -> list[str]:
    lines = [line for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if re.match(r"(JAXRDMA_\S+ )*(jaxrdma|python) ", line)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The ten lines, as the file that the commands name."""
    path = tmp_path / "train.py"
    path.write_text(
        PREAMBLE + blocks("python")[0] + "\nprint('trained to', float(loss), int(state.step))\n"
    )
    return path


def test_the_ten_lines_train(script: Path, no_leftovers: None) -> None:
    (launch, *_) = [command for command in commands() if command.startswith("jaxrdma launch")]
    check_training(launch, script, 20)


def run_launch(launch: str, script: Path) -> "subprocess.CompletedProcess[str]":
    """Runs the command where the script lies; it must end well."""
    result = subprocess.run(
        [sys.executable, "-m", *shlex.split(launch)],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def check_training(launch: str, script: Path, until: int) -> str:
    """Runs the command; both workers must have trained to this step. Returns what it said beside their output."""
    result = run_launch(launch, script)
    trained = re.findall(rf"trained to (\S+) {until}", result.stdout)
    assert len(trained) == 2, result.stdout
    assert all(float(loss) < 1.0 for loss in trained)
    return result.stderr


def test_several_devices_of_a_process_are_one_worker(script: Path, no_leftovers: None) -> None:
    (launch, *_) = [command for command in commands() if command.startswith("jaxrdma launch")]
    (mesh,) = [block for block in blocks("python") if "mesh=mesh" in block]
    *init, split = textwrap.indent(mesh, "    ").splitlines(keepends=True)
    text = script.read_text()
    begin = "    state = session.init(params, update=optax.adam(1e-3))    # the same state on every worker\n"
    step = "        state, loss = train_step(state, batch)\n"
    assert begin in text
    assert step in text
    wait = "        jax.block_until_ready(state)\n"
    text = text.replace(begin, "".join(init)).replace(step, f"    {split}{step}{wait}")
    flag = "--xla_force_host_platform_device_count=4"
    script.write_text(f"import os\nos.environ['XLA_FLAGS'] = '{flag}'\n{text}")
    check_training(launch, script, 20)


def test_the_commands_with_checkpoints_go_on_where_they_were(
    script: Path, no_leftovers: None
) -> None:
    launches = [command for command in commands() if "--checkpoint" in command]
    first, again = [launch for launch in launches if "--restarts" not in launch]
    assert "step 20 is saved, the last of this job" in check_training(first, script, 20)
    assert "goes on from the checkpoint of step 20" in check_training(again, script, 40)
    assert len(list((script.parent / "runs" / "one" / "model-0").iterdir())) == 2


@pytest.mark.parametrize("copies", [False, True], ids=["checkpoints", "copies"])
def test_the_commands_with_restarts_survive_the_loss_of_a_worker(
    script: Path, no_leftovers: None, copies: bool
) -> None:
    launches = [command for command in commands() if "--restarts" in command]
    (launch,) = [launch for launch in launches if ("--replicate" in launch) == copies]
    lost = "[os.environ[f'JAXRDMA_{name}'] for name in ('ATTEMPT', 'INDEX')] == ['0', '1']"
    text = f"import os\nif {lost}:\n    os.kill(os.getpid(), 9)\n{script.read_text()}"
    script.write_text(text)
    said = check_training(launch, script, 20)
    assert "worker 1 failed first: killed by SIGKILL; starting again: attempt 2 of 4" in said


def test_the_command_with_worker_restarts_brings_a_lost_worker_back(
    script: Path, no_leftovers: None
) -> None:
    (launch,) = [command for command in commands() if "--worker-restarts" in command]
    (waiting,) = [block for block in blocks("python") if 'on_loss="wait"' in block]
    begin = "    state = session.init(params, update=optax.adam(1e-3))    # the same state on every worker\n"
    text = script.read_text()
    assert begin in text
    text = text.replace(
        begin, textwrap.indent(waiting, "    ") + "    first = int(state.step) == 0\n"
    )
    step = "        state, loss = train_step(state, batch)\n"
    assert step in text
    die = "        if session.index == 1 and first and state.step == 5:\n            os.kill(os.getpid(), 9)\n"
    script.write_text("import os\n" + text.replace(step, die + step))
    result = run_launch(launch, script)
    assert "worker 1 killed by SIGKILL; starting it again, 1 of 5" in result.stderr
    assert "worker 1: takes part in model 0 from step 5 on" in result.stderr
    # Each ran through all of its data.
    assert sorted(re.findall(r"trained to \S+ (\d+)", result.stdout)) == ["20", "25"]


def test_the_commands_for_two_machines_make_a_job(
    script: Path, make_job: Callable[..., Job]
) -> None:
    launches = [command for command in commands() if "--here" in command]
    launches = [launch for launch in launches if "--most-workers" not in launch]
    assert len(launches) == 2
    job, address = make_job(1, 2), free_address()
    for launch in launches:
        words = shlex.split(launch.replace("10.0.0.1:7000", address))
        words[words.index("train.py")] = str(script)
        job.spawn(words[words.index("--here") + 1], ["-m", *words], dict(os.environ))
    job.succeed()


@pytest.mark.timeout(100)
def test_the_commands_that_add_a_worker_make_a_job_of_three(
    script: Path, make_job: Callable[..., Job]
) -> None:
    first, added = [command for command in commands() if "--most-workers" in command]
    (shrinking,) = [block for block in blocks("python") if 'on_loss="shrink"' in block]
    begin = "    state = session.init(params, update=optax.adam(1e-3))    # the same state on every worker\n"
    step = "        state, loss = train_step(state, batch)\n"
    text = script.read_text()
    assert begin in text and step in text
    wait = "        while state.step == 5 and len(session.active_workers) < 3:\n            time.sleep(0.01)\n"
    text = text.replace(begin, textwrap.indent(shrinking, "    ")).replace(step, wait + step)
    script.write_text("import time\n" + text)
    job, address = make_job(1, 2), free_address()
    for name, launch in (("first", first), ("added", added)):
        words = shlex.split(launch.replace("127.0.0.1:7000", address))
        words[words.index("train.py")] = str(script)
        job.spawn(name, ["-m", *words], dict(os.environ))
    job.succeed()
    assert "worker 2: takes part in model 0 from step" in job.output("added"), job.outputs()
    # Each ran through all of its data.
    ends = re.findall(r"trained to \S+ (\d+)", job.outputs())
    assert len(ends) == 3 and min(map(int, ends)) == 20, job.outputs()


def test_the_other_ways_to_step_run(tmp_path: Path, make_job: Callable[..., Job]) -> None:
    other = textwrap.indent(blocks("python")[1], "    ")
    script = tmp_path / "other.py"
    script.write_text(
        PREAMBLE
        + "with jaxrdma.connect() as session:\n"
        + "    state = session.init(params, update=optax.adam(1e-3))\n"
        + "    batch = my_batches(session.index, 1)[0]\n"
        + "    grads = jax.grad(loss_fn)(state.params, batch)\n"
        + other
        + "\n    optimizer_state = optimizer.init(params)\n"
        + "    updates, optimizer_state = jax.jit(optimizer.update)(grads, optimizer_state, params)\n"
        + "    assert int(state.step) == 1 and jax.tree.structure(updates) == jax.tree.structure(params)\n"
    )
    make_job(1, 2).start(script).succeed()


def test_reading_is_of_one_version_or_refused_as_it_says(
    tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    read = textwrap.indent(blocks("python")[2], "        ")
    script = tmp_path / "read.py"
    script.write_text(
        PREAMBLE
        + "with jaxrdma.connect() as session:\n"
        + "    state = session.init(params, update=optax.adam(1e-3))\n"
        + "    over_verbs = session.stats().transport[0][1].startswith('verbs')\n"
        + "    state = jaxrdma.ps_step(state, state.params)\n"
        + "    try:\n"
        + read
        + "        assert over_verbs and int(newest.step) == 1\n"
        + "    except jaxrdma.TransportError:\n"
        + "        assert not over_verbs\n"
        + "    state = jaxrdma.ps_step(state, state.params)\n"
        + "    assert int(state.step) == 2\n"
    )
    make_job(1, 2).start(script).succeed()


def test_rows_of_a_table_are_trained(tmp_path: Path, make_job: Callable[..., Job]) -> None:
    (snippet,) = [block for block in blocks("python") if "session.embedding" in block]
    path = tmp_path / "rows.py"
    path.write_text(
        PREAMBLE
        + "my_batches_of_ids = [np.array([[3, 4_999_999], [3, number]]) for number in range(30)]\n"
        + "session = jaxrdma.connect()\n"
        + snippet
        + "print('loss', float(jnp.mean((table.lookup([3]) - 1.0) ** 2)), int(table.step))\n"
        + "session.leave()\n"
    )
    job = make_job(2, 2).start(path)
    job.succeed(60)
    for worker in range(2):
        _, loss, step = job.output(f"worker {worker}").splitlines()[-1].split()
        assert float(loss) < 0.9, job.outputs()
        assert int(step) == 30


def test_a_follower_takes_versions_until_the_job_ends(
    tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    loop, once = [block for block in blocks("python") if "follow" in block]
    script = tmp_path / "follower.py"
    script.write_text(
        PREAMBLE
        + "seen = []\ndef evaluate(params, step):\n    seen.append(step)\n"
        + "with jaxrdma.follow() as follower:\n"
        + textwrap.indent(once, "    ")
        + loop
        + "print('followed to', snapshot.step)\n"
        + "assert seen == sorted(set(seen)) and len(seen) > 1, seen\n"
    )
    trained = tmp_path / "train.py"
    trained.write_text(
        PREAMBLE
        + "import time\nbatches = my_batches\ndef my_batches(*which):\n"
        + "    for batch in batches(*which):\n        time.sleep(0.1)\n        yield batch\n"
        + blocks("python")[0]
    )
    job = make_job(1, 1)
    job.start_coordinator()
    job.start_follower(script)
    job.start_server(0)
    job.start_worker(0, trained)
    job.succeed()
    assert "followed to" in job.output("follower")


def test_the_commands_by_hand_make_a_job(script: Path, make_job: Callable[..., Job]) -> None:
    by_hand = [command for command in commands() if not command.startswith("jaxrdma launch")]
    assert len(by_hand) == 3
    job = make_job(1, 2)
    address = job.start_coordinator()  # as the first command, on a port that is free
    for line in by_hand[1:]:
        words = shlex.split(line.replace("127.0.0.1:7000", address))
        settings = dict(word.split("=", 1) for word in words if word.startswith("JAXRDMA_"))
        words = words[len(settings) :]
        settings |= {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
        words = ["-m", *words] if words[0] == "jaxrdma" else [str(script)]
        job.spawn("server 0" if "server" in words else "worker 0", words, settings)
    job.start_worker(1, script)
    job.succeed()


def test_the_first_command_by_hand_is_understood() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    (line,) = [command for command in commands() if command.startswith("jaxrdma coordinator")]
    args = parser.parse_args(shlex.split(line)[2:])
    assert (args.listen, args.workers, args.servers) == ("127.0.0.1:7000", 2, 1)


@pytest.mark.parametrize("name", ["devices", "doctor"])
def test_the_commands_about_this_machine_print_what_stands_there(name: str) -> None:
    shown = dict(block.removeprefix("$ jaxrdma ").split("\n", 1) for block in blocks("console"))
    result = subprocess.run(
        [sys.executable, "-m", "jaxrdma", name],
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode in (0, 1) and result.stdout, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    expected = shown[name].splitlines()
    if kernel_devices():
        return  # what stands there is of a machine without
    assert result.returncode == 1
    if (
        name == "doctor"
    ):  # what is found differs from machine to machine; what is looked at does not
        cells = [
            [line.split("│")[1].strip() for line in t if "│" in line] for t in (lines, expected)
        ]
        assert list(filter(None, cells[0])) == list(filter(None, cells[1]))
    elif "could not be opened" not in result.stdout and "built without" not in result.stdout:
        assert lines == expected


@pytest.mark.timeout(60)
def test_the_status_shown_looks_like_that_of_a_job(make_job: Callable[..., Job]) -> None:
    (shown,) = [block for block in blocks("console") if block.startswith("$ jaxrdma status")]
    command, *expected = shown.splitlines()
    address = make_job(1, 2).start_coordinator()
    words = shlex.split(command.removeprefix("$ jaxrdma ").replace("127.0.0.1:7000", address))
    result = subprocess.run(
        [sys.executable, "-m", "jaxrdma", *words],
        env=os.environ | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("job jaxrdma: starting for")
    columns = [[cell.strip() for cell in table[2].split("┃")] for table in (lines, expected)]
    assert columns[0] == columns[1]


def test_the_trace_shown_has_the_columns_of_the_command() -> None:
    (shown,) = [block for block in blocks("console") if block.startswith("$ jaxrdma trace")]
    command, *expected = shown.splitlines()
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    args = parser.parse_args(shlex.split(command)[3:])
    assert (args.coordinator, args.steps) == ("127.0.0.1:7000", 4)
    columns = [cell.strip() for cell in expected[1].strip("┃").split("┃")]
    assert columns == [column.header for column in trace.render([]).columns]


def test_the_table_of_settings_names_what_the_code_reads() -> None:
    table = README[README.index("## Settings") : README.index("## How fast")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {
        name if name.startswith("JAXRDMA_") else f"JAXRDMA{name}"
        for row in rows
        for name in re.findall(r"`(\w+)`", row)
    }
    read_by_python = set(_PARSERS) | {"ibverbs_lib"}
    read = {f"JAXRDMA_{name.upper()}" for name in read_by_python}
    fields = set(ClusterSpec.__dataclass_fields__) | set(VerbsSettings.__dataclass_fields__)
    assert fields - {"verbs"} == set(_PARSERS)
    assert named == read


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_links_lead_somewhere() -> None:
    headings = {f"#{h.lower().replace(' ', '-')}" for h in re.findall(r"^#+ (.+)$", README, re.M)}
    for link in re.findall(r"\]\(([^)]+)\)", README):
        known = link in headings if link.startswith("#") else (ROOT / link).exists()
        assert known or link.startswith("https://"), link
