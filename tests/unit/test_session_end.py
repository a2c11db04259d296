"""What the end of a program makes of an open session: the exit code, and whose fault it says it was."""

import os
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrdma import _native
from jaxrdma.session import Session
from jaxrdma.signals import OrderlyEnd, Terminated


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose end is for the test to say. `done`: what became of the process, in order."""
    session: Any = object.__new__(Session)
    session._cut_by = None
    session.done = []
    monkeypatch.setattr(_native, "exit_with", lambda code: session.done.append(("exits", code)))
    monkeypatch.setattr(os, "kill", lambda _, number: session.done.append(("ends by", number)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    return session


def raises(error: BaseException) -> Any:
    def close(_: BaseException | None) -> None:
        raise error

    return close


def test_a_program_told_to_end_while_it_waits_for_its_last_step_ends_with_the_signals_code(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrderlyEnd, "told", signal.SIGTERM)
    session._close_quietly = raises(Terminated(128 + signal.SIGTERM))
    session._at_exit()
    assert session.done == [("exits", 143)]


def test_a_second_interrupt_of_the_end_changes_no_exit_code(session: Any) -> None:
    session._close_quietly = raises(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        session._at_exit()
    assert session.done == [("ends by", signal.SIGINT)]


def test_what_failed_at_a_prompt_did_not_end_the_program(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_for: list[BaseException | None] = []
    session._close_quietly = closed_for.append
    error = NameError("name 'stpe' is not defined")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    session._at_exit()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    session._at_exit()
    assert closed_for == [error, None]


def test_a_program_that_handles_a_signal_itself_is_not_interrupted_by_it(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session._joined, session._last_step = True, None
    session._progress = lambda: (3, "")
    noted = SimpleNamespace(handler=lambda *_: None)
    monkeypatch.setattr(signal, "getsignal", lambda _: noted.handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        session._on_signal(number)
    assert session._last_step is None
    # Nobody's, once it has come.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    session._on_signal(signal.SIGTERM)
    assert isinstance(session._last_step, threading.Timer)
    session._last_step.cancel()
    session._last_step.join()
