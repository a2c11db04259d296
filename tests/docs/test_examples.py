"""The examples run: the demo to its accuracy, the notebook from top to bottom."""

import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_demo_learns_the_digits_and_ends_with_its_table(no_leftovers: None) -> None:
    command = [
        "-m",
        "jaxrdma",
        "launch",
        "--servers",
        "1",
        "--workers",
        "2",
        str(EXAMPLES / "digits.py"),
    ]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = dict(re.findall(r"│ (.+?)\s+│\s+(\S.*?)\s+│", result.stdout))
    assert float(rows["accuracy on held-out images"]) >= 0.97
    assert rows["gradients accepted"] == rows["steps"]
    assert rows["gradients dropped"] == "0"
    assert rows["transport to server 0"] == "tcp (worker 0 is on loopback)"
    # One gradient up and one set of parameters down for each step, and the chief's parameters at the start.
    pushed, pulled = (int(rows[f"bytes {what}"].replace(",", "")) for what in ("pushed", "pulled"))
    parameters = 4 * (3 * 3 * 32 + 32 + 3 * 3 * 32 * 64 + 64 + 1024 * 128 + 128 + 128 * 10 + 10)
    assert pushed == pulled == parameters * (int(rows["steps"]) + 1)


def test_the_notebook_runs(no_leftovers: None, tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot"
