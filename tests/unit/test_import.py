"""`import jaxrdma` does no work, and its names are what it says."""

import subprocess
import sys

import jaxrdma


def test_importing_loads_neither_jax_nor_the_native_module() -> None:
    code = "import sys, jaxrdma; print([m for m in ('jax', 'numpy', 'grpc', 'jaxrdma._native') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_every_public_name_is_there() -> None:
    for name in jaxrdma.__all__:
        assert getattr(jaxrdma, name) is not None


def test_the_versions_are_one() -> None:
    from importlib.metadata import version

    from jaxrdma import control

    assert jaxrdma.__version__ == control.VERSION == version("jaxrdma")
