"""What the tests of failures check: who ended how, and whom they name."""

import re
import time

import pytest

from tests.cluster.job import Job

# How an uncaught exception of a worker ends its output. What the package raises itself has a name of its own; what
# comes out of a compiled program has JAX's.
_LAST_LINE = re.compile(
    r"^(?:jax\.errors\.JaxRuntimeError|jaxrdma\.errors\.\w+): (.*)$", re.MULTILINE
)

# What processes print at their start. Over verbs: which device they take, and how much memory is locked.
PROGRESS = r"jaxrdma: (?:model|have|waiting|worker \d+: verbs, |worker \d+ locks )"


def check_all_name(
    job: Job, causes: str | tuple[str, ...], timeout: float, names: list[str] | None = None
) -> float:
    """Within `timeout` s every process in `names` (default: who lives) has failed, and its error matches `causes`.

    **Returns:** the seconds until the last one had ended.
    """
    begin = time.monotonic()
    names = names or [name for name, process in job.processes.items() if process.poll() is None]
    codes = job.wait(timeout, names)
    seconds = time.monotonic() - begin
    causes = (causes,) if isinstance(causes, str) else causes
    for name in names:
        told = error_of(job, name)
        if codes[name] != 1 or not all(re.search(cause, told) for cause in causes):
            pytest.fail(
                f"{name}: exit code {codes[name]}, error {told!r}, wanted {causes}\n{job.outputs()}"
            )
    return seconds


def error_of(job: Job, name: str) -> str:
    """The error that a process ended with: of a worker the exception, of a server or coordinator its report."""
    output = job.output(name)
    if name.startswith("worker"):
        raised = _LAST_LINE.findall(output)
        return raised[-1] if "Traceback (most recent call last)" in output and raised else ""
    lines = [
        line
        for line in output.splitlines()
        if "the job failed: " in line or re.search(r"server \d: (?!verbs, )", line)
    ]
    return lines[0] if lines else ""
