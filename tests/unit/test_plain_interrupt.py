"""Ctrl-C in the midst of a library's own doings: one traceback, that of KeyboardInterrupt."""

import subprocess
import sys

LOWERING = """
import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxrdma.signals import tell_interrupts_plainly

def interrupt(*_, **__):
    raise KeyboardInterrupt

slow = Primitive("slow")
slow.def_abstract_eval(lambda x: x)
mlir.register_lowering(slow, interrupt)
tell_interrupts_plainly()
jax.jit(lambda x: slow.bind(x))(1.0)
"""

# `setdefault` sets what is missing in the clause that handles that there is no such key.
MISSING = """
from collections import UserDict
from jaxrdma.signals import tell_interrupts_plainly

class Slow(UserDict):
    def __setitem__(self, key, value):
        raise KeyboardInterrupt

tell_interrupts_plainly()
try:
    {}["of the program"]
except KeyError:
    Slow().setdefault("of the library")
"""


def ended(script: str) -> str:
    """What the program says when it ends."""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stderr.rstrip().endswith("\nKeyboardInterrupt"), run.stderr
    return run.stderr


def test_an_interrupt_while_jax_lowers_a_program_has_one_traceback() -> None:
    said = ended(LOWERING)
    assert said.count("Traceback (most recent call last)") == 1, said


def test_an_interrupt_while_a_library_handles_an_error_does_not_tell_of_that() -> None:
    said = ended(MISSING)
    assert "KeyError: 'of the library'" not in said, said
    # What the program was handling may be why somebody pressed Ctrl-C.
    assert said.count("Traceback (most recent call last)") == 2, said
    assert "KeyError: 'of the program'" in said, said
