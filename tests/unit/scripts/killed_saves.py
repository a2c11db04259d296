"""Kills a process that saves, with SIGKILL, before each thing it asks of the system, and in the middle of each write.

Usage: killed_saves.py FOLDER. Prints how often the previous checkpoint was the newest after that, and how often the new
one. Fails if it was ever neither, or if what was left got in the way of the next.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.unit import checkpoints


def die(how: str) -> Any:
    def act(name: str, real: Any, args: tuple) -> None:
        if how == "in" and name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def main() -> None:
    model = Path(sys.argv[1]) / "model-0"
    newest = {1: 0, 2: 0}
    number, going = 0, True
    while going:
        for how in ("before", "in"):
            shutil.rmtree(model, ignore_errors=True)
            checkpoints.save(model, 1, keep=1)
            child = os.fork()
            if child == 0:
                checkpoints.on_call(number, die(how))
                checkpoints.save(model, 2, keep=1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            going = os.WIFSIGNALED(status)
            assert going or os.WEXITSTATUS(status) == 0
            steps = checkpoints.check_all(model)
            assert steps in ([1], [2], [2, 1]), (number, how, steps)
            newest[steps[0]] += 1
            checkpoints.save(model, 3, keep=1)
            assert checkpoints.check_all(model) == [3]
            assert [path.name for path in model.iterdir()] == ["step-000000003"], number
            assert len(list((model / "step-000000003").iterdir())) == 3, number
        number += 1
    print(newest[1], newest[2])


if __name__ == "__main__":
    main()
