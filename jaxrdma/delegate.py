"""A launcher's place in a job on several machines, as a process of its own: `python -m jaxrdma.delegate`.

It attends the coordinator like any other process of the job. To the launcher it tells why the job failed, wherever that
was, or that it ended well; to the coordinator, which processes of this machine ended before they could speak for
themselves. The launcher itself has one thread, and nothing in it may wait for the network.
"""

import json
import os
import secrets
import selectors
import signal
import sys
from typing import Any

from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import (
    ControlClient,
    Ended,
    Failed,
    FlowRejected,
    JobFailed,
    MemberLost,
    Message,
    Rescuing,
    Shutdown,
    say_on_stderr,
)
from jaxrdma.errors import JaxRdmaError
from jaxrdma.signals import do_nothing, ending_signals


class _Delegate:
    """Facts go to the launcher through `reports`, and come from it through `ends`, as lines of JSON.

    `spare`: as of `Hello`.
    """

    def __init__(self, spec: ClusterSpec, reports: int, ends: int, *, spare: bool) -> None:
        self._reports = reports
        self._ends = ends
        self._wake, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._outcome: int | None = None
        self._joined = False
        self._notice = (
            False  # the launcher waits to hear that the coordinator knows of its interrupt
        )
        self._received = b""
        self._client = ControlClient(
            spec,
            "launcher",
            0,
            secrets.randbits(63),
            on_message=self._on_message,
            say=self._say,
            spare=spare,
        )

    def run(self) -> int:
        """The exit code: 0 if the job ended well, 1 if it failed, 128+n on signal n."""
        outcome = self._attend()
        if self._notice:
            # Closing has waited for the coordinator to have read everything.
            self._report({"noticed": True})
        return outcome

    def _attend(self) -> int:
        with self._client:
            try:
                self._client.reach()
            except JaxRdmaError as error:
                late = self._client.refusal == "failed"
                if late:
                    # Of a job that has just failed there may be another attempt.
                    self._report({"attempt": self._client.attempt})
                self._report_cause("died" if late else "refused", str(error), "launcher", -1)
                return 1
            self._joined = True
            self._report({"joined": True, "attempt": self._client.attempt})
            # Not before: who has not joined may be ended by any signal.
            for number in ending_signals():
                signal.signal(number, do_nothing)
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ, self._woken)
                selector.register(self._ends, selectors.EVENT_READ, self._told)
                while self._outcome is None:
                    for key, _ in selector.select():
                        key.data()
            if self._outcome == 0:
                self._client.leave(-1)
            return self._outcome

    def _say(self, text: str) -> None:
        if not self._joined:  # then the processes beside it are started, and say the same
            say_on_stderr(text)

    def _woken(self) -> None:
        """A signal came, or, for a 0, the outcome."""
        for number in os.read(self._wake, 64):
            if number:
                self._interrupted(signal.Signals(number))

    def _interrupted(self, number: signal.Signals) -> None:
        if self._outcome is None:
            self._client.send(Failed("interrupted", f"ended by {number.name}"))
            self._outcome = 128 + number

    def _told(self) -> None:
        """The launcher says who ended, that it is interrupted itself, or that the job cannot go on."""
        data = os.read(self._ends, 1 << 16)
        if not data:
            self._outcome = 1  # the launcher is gone; that the stream ends says so
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            fact = json.loads(line)
            if "interrupted" in fact:
                self._interrupted(signal.Signals[fact["interrupted"]])
                self._notice = True
            elif "gives_up" in fact:
                self._client.send(Failed(fact["kind"], fact["gives_up"]))
            else:
                self._client.send(Ended(**fact))

    def _on_message(self, message: Message) -> None:
        """On the client's thread."""
        if self._outcome is not None:
            return  # such as the end of a coordinator that has just said that the job is over
        match message:
            case JobFailed():
                self._report_cause(message.kind, message.text, message.role, message.index)
                outcome = 1
            case FlowRejected():
                self._report_cause("mismatch", message.text, "coordinator", -1)
                outcome = 1
            case Shutdown():
                outcome = 0
            case MemberLost():
                self._report(lost_fact(message))
                return
            case Rescuing():
                self._report({"rescuing": message.seconds})
                return
            case _:
                return
        self._outcome = outcome
        os.write(self._wakeup, b"\0")

    def _report_cause(self, kind: str, text: str, role: str, index: int) -> None:
        self._report({"kind": kind, "text": text, "role": role, "index": index})

    def _report(self, fact: dict[str, Any]) -> None:
        try:
            os.write(self._reports, json.dumps(fact).encode() + b"\n")
        except OSError:
            pass  # the launcher is gone


def lost_fact(lost: MemberLost) -> dict[str, Any]:
    """What a launcher is told of a loss that the job bears."""
    name = f"{lost.role} {lost.index}"
    return {"lost": name, "kind": lost.kind, "waits": lost.waits, "text": lost.text}


def main() -> int:
    """Serve the launcher that started this process. Arguments: the two file descriptors, and perhaps "spare"."""
    reports, ends = map(int, sys.argv[1:3])
    for descriptor in (reports, ends):
        os.set_inheritable(descriptor, False)
    spare = "spare" in sys.argv[3:]
    return _Delegate(ClusterSpec.from_environment(), reports, ends, spare=spare).run()


if __name__ == "__main__":
    sys.exit(main())
