"""Ctrl-C while JAX lowers a program: one traceback, that of KeyboardInterrupt."""

import subprocess
import sys

SCRIPT = """
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


def test_an_interrupt_while_jax_lowers_a_program_has_one_traceback() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    assert run.stderr.rstrip().endswith("\nKeyboardInterrupt"), run.stderr
