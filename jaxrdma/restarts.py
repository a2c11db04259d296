"""Whether a job that failed, or a worker that was lost, is started again: pure functions of how it ended."""

from dataclasses import dataclass

# By kind of failure (those of `JobFailed`, and the launcher's own), why another attempt would end in the same way. All
# launchers of a job hear the same kind, and so decide alike.
_LASTING = {
    "interrupted": "somebody ended it",
    "config": "the same settings would fail again",
    "mismatch": "what differs would differ again",
    "transport": "the same devices would be found again",
    "checkpoint": "the same checkpoints would be found again",
    "left": "whoever ended early would do so again",
    "timeout": "who is missing has had its time",
    "refused": "the coordinator would refuse again, or be missing again",
    "stuck": "what is left of it could disturb another attempt",
}

# How often a worker is started again by itself whose place is kept, if nobody says how often.
WORKER_RESTARTS = 3


@dataclass(frozen=True)
class Ending:
    """How one attempt of a job ended.

    - `code`: the exit code; 0 if all went well.
    - `text`: what failed, and who, on one line. Empty if all went well.
    - `kind`: as `JobFailed` has it; also "refused": this machine's launcher was not let in; "stuck": a process does not
      end. "died" if nothing but an exit code is known. Empty if nothing failed, or the launcher was told to end.
    """

    code: int
    text: str = ""
    kind: str = ""


def is_lasting(kind: str) -> bool:
    """Whether a failure of this kind is none that another attempt helps against."""
    return kind in _LASTING


def judge(ending: Ending, attempt: int, restarts: int) -> tuple[bool, str]:
    """Whether the job is started again, and the line that says so and what failed.

    **Arguments:**

    - `ending`: of the last attempt.
    - `attempt`: which that was, from 0. In texts they count from 1.
    - `restarts`: how many attempts may follow the first.
    """
    if not ending.kind or restarts == 0:
        return False, ending.text
    text = ending.text.rstrip(".")
    if ending.kind in _LASTING:
        return False, f"{text}; not started again, for {_LASTING[ending.kind]}"
    if attempt >= restarts:
        return False, f"{text}; attempt {attempt + 1} of {restarts + 1} was the last"
    return True, f"{text}; starting again: attempt {attempt + 2} of {restarts + 1}"


@dataclass(frozen=True)
class Loss:
    """A worker was lost, and the job bears it.

    - `kind`: as `JobFailed` has it.
    - `waits`: its place is kept, and the others may be able to do nothing without it.
    """

    kind: str
    waits: bool


def judge_worker(loss: Loss, done: int, restarts: int | None) -> tuple[bool, str]:
    """Whether a lost worker is started again, and a text, as in "worker 1 was lost: `text`".

    **Arguments:**

    - `done`: how often it was started again already.
    - `restarts`: how often it may be; `None`: `WORKER_RESTARTS` times if its place is kept, else never.
    """
    most = (WORKER_RESTARTS if loss.waits else 0) if restarts is None else restarts
    if loss.kind in _LASTING:
        return False, f"not started again, for {_LASTING[loss.kind]}"
    if done >= most:
        return False, f"not started again, that was done {done} times of {most}"
    return True, f"starting it again, {done + 1} of {most}"
