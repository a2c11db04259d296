"""On a process's module path: says so, on standard error, when an object is made by unpickling."""

import sys
from typing import Any


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        print(f"unpickles {'.'.join(arguments)}", file=sys.stderr, flush=True)


sys.addaudithook(_watch)
