"""All workers of a job in one process and without JAX, which takes long to import in a guest; else as `Session` is.

Usage: drill.py [STEPS [INDEX:FAULT]...], with the settings of a worker in the environment: its index is not looked at.
Each exchanges means of one model, step after step, until the job ends, and then says "worker N: why"; or leaves after
so many, and says "worker N: left" and what it saw. A FAULT is that of one worker: a job's setting is for one process.
"""

import itertools
import os
import secrets
import sys
import threading
import time

import numpy as np

from jaxrdma import _native, transport
from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import (
    IN_STEP,
    JOINS,
    ControlClient,
    FlowProposal,
    FlowStart,
    JobFailed,
    LeafSpec,
    Message,
    Wait,
)
from jaxrdma.native import flow_spec, raise_for
from jaxrdma.plan import assign_partitions
from jaxrdma.policy import SyncReplicas, to_wire

# Of 4 KiB, as the tests cut it, the larger one is four partitions.
LEAVES = [LeafSpec("b", (8,), "float32"), LeafSpec("w", (64, 64), "float32")]


def say(text: str) -> None:
    """A whole line, whatever other threads say."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


class Worker:
    """One of them, on a thread of its own."""

    def __init__(self, index: int, steps: int | None, fault: str) -> None:
        self._steps = steps
        self._fault = fault
        self._spec = ClusterSpec.from_environment(index=index)
        self._incarnation = secrets.randbits(63)
        self._engine: _native.WorkerEngine | None = None
        self._client = ControlClient(
            self._spec,
            "worker",
            index,
            self._incarnation,
            on_message=self._on_message,
            progress=self._progress,
            details=self._details,
            offer=lambda: transport.offer(self._spec, transport.place(self._spec)),
        )

    def _on_message(self, message: Message) -> None:
        if isinstance(message, JobFailed) and self._engine is not None:
            self._engine.fail(_native.Status(_native.Code.PEER_FAILED, message.text))

    def _progress(self) -> tuple[int, str]:
        if self._engine is None:
            return -1, JOINS
        return self._engine.stats().last_step, IN_STEP if self._engine.in_flight() else "computing"

    def _details(self) -> tuple[Wait | None, str]:
        for each in self._engine.pending(1) if self._engine is not None else ():
            return Wait(each.flow, each.step, each.server, each.partition, each.stage), ""
        return None, ""

    def run(self) -> None:
        spec, index = self._spec, self._spec.index
        with self._client:
            roster = self._client.join()
            addresses = [entry.address for entry in roster.servers]
            where = transport.place(spec, servers=addresses)
            options, _ = transport.prepare(spec, roster.transport, where, "what is on its way")
            options = {**options, "fault": self._fault or options["fault"]}
            engine = raise_for(
                _native.WorkerEngine.create(index, spec.job, self._incarnation, **options)
            )
            tokens = [entry.tokens[index] for entry in roster.servers]
            raise_for(engine.connect(addresses, tokens, int(spec.connect_timeout * 1000)))
            self._engine = engine

            plan = assign_partitions(LEAVES, spec.num_servers, spec.partition_bytes)
            policy = to_wire(SyncReplicas().complete(spec.num_workers))
            self._client.send(FlowProposal(0, LEAVES, plan.digest, "average", policy, "none"))
            self._client.wait(lambda message: isinstance(message, FlowStart), spec.connect_timeout)
            flow = flow_spec(0, "average", plan, 0)
            raise_for(engine.add_flow(flow))
            mine = [np.full(leaf.shape, 4.0**index, np.float32) for leaf in LEAVES]
            means = [np.empty_like(each) for each in mine]
            mean = sum(4.0**each for each in range(spec.num_workers)) / spec.num_workers
            longest = 0.0
            for step in itertools.count():
                if step == self._steps:
                    self._leave(engine, step, longest)
                    return
                began = time.monotonic()
                status = engine.run_operation(
                    _native.OperationKind.EXCHANGE,
                    0,
                    step,
                    [each.view(np.uint8).reshape(-1) for each in mine],
                    [each.view(np.uint8).reshape(-1) for each in means],
                    flow,
                )
                if not status.ok:
                    say(f"worker {index}: {status.message}")
                    break
                assert all((each == mean).all() for each in means)
                longest = max(longest, time.monotonic() - began)
            engine.close()

    def _leave(self, engine: _native.WorkerEngine, steps: int, longest: float) -> None:
        """As `Session.leave` does."""
        began = time.monotonic()
        self._client.leave(steps)
        told = time.monotonic()
        engine.close()
        say(
            f"worker {self._spec.index}: left after {steps} steps, the longest of {longest:.2f} s, "
            f"told in {told - began:.2f} s, closed in {time.monotonic() - told:.2f} s; {engine.transport}"
        )


def main() -> None:
    """Until the job is over for each."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else None
    faults = dict(each.split(":", 1) for each in sys.argv[2:])
    count = ClusterSpec.from_environment().num_workers
    workers = [Worker(index, steps, faults.get(str(index), "")) for index in range(count)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
