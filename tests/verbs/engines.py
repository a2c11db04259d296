"""Drives the engines without JAX, which takes long to import in a guest: one server, or one worker.

  engines.py server INDEX                   says "listening ADDRESS", then what happens, until it is ended
  engines.py worker INDEX ADDRESS...        averages with the others, checks every mean, says "step N" and "done"

Every process of a job is given the same --servers, --workers, --elements and --partition-bytes. With --update on all of
them, servers keep parameters and leave them as they are: a worker with --init gives them, one with --read reads them in
the servers' memory. A failure is said as "failed CODE: MESSAGE", with exit status 3.
"""

import argparse
import sys
import time

import numpy as np
from numpy.typing import NDArray

from jaxrdma import _native

JOB = "engines"
PARAMETERS_OF = 50  # the "worker" whose gradient of step 0 the parameters are


def token(worker: int, server: int) -> bytes:
    return bytes([worker + 1, server + 1]) + bytes(_native.TOKEN_BYTES - 2)


def gradient(elements: int, worker: int, step: int) -> NDArray[np.float32]:
    """Differs by element, worker and step; sums of a few are exact in float32."""
    places = np.arange(elements, dtype=np.int64)
    return ((places * 13 + worker * 7 + step) % 97 / 8.0).astype(np.float32)


def say(text: str) -> None:
    print(text, flush=True)


def checked(status: object) -> None:
    if isinstance(status, _native.Status) and not status.ok:
        say(f"failed {status.code.name}: {status.message}")
        sys.exit(3)


def flow(args: argparse.Namespace) -> _native.FlowSpec:
    """One float32 leaf, its partitions on the servers in turn."""
    piece = args.partition_bytes // 4
    partitions = [
        (0, i % args.servers, begin, min(piece, args.elements - begin))
        for i, begin in enumerate(range(0, args.elements, piece))
    ]
    return _native.FlowSpec(
        id=0,
        mode=_native.FlowMode.UPDATE if args.update else _native.FlowMode.AVERAGE,
        dtypes=[_native.DType.float32],
        elements=[args.elements],
        partitions=partitions,
    )


def verbs_options(args: argparse.Namespace) -> _native.VerbsOptions:
    options = _native.VerbsOptions()
    for setting in args.verbs:
        name, _, value = setting.partition("=")
        setattr(options, name, value if name == "device" else int(value))
    return options


def serve(args: argparse.Namespace) -> None:
    engine = _native.ServerEngine.create(
        server=args.index,
        servers=args.servers,
        workers=args.workers,
        job=JOB,
        listen=args.listen,
        partition_bytes=args.partition_bytes,
        ordered=True,
        transport=args.transport,
        verbs=verbs_options(args),
    )
    checked(engine)
    assert isinstance(engine, _native.ServerEngine)
    for worker in range(args.workers):
        checked(engine.admit(worker, worker + 1, token(worker, args.index)))
    checked(engine.add_flow(flow(args)))
    say(f"transport {engine.transport}")
    say(f"listening {engine.address}")
    while True:
        event = engine.wait_event()
        if event.kind == _native.ServerEvent.Kind.INITIALISED:
            checked(engine.publish(event.flow, event.step))
        say(f"{event.kind.name} worker {event.worker}: {event.text}")


def work(args: argparse.Namespace) -> None:
    engine = _native.WorkerEngine.create(
        args.index,
        JOB,
        args.index + 1,
        transport=args.transport,
        verbs=verbs_options(args),
    )
    checked(engine)
    assert isinstance(engine, _native.WorkerEngine)
    tokens = [token(args.index, server) for server in range(args.servers)]
    checked(engine.connect(args.address, tokens, 20_000))
    spec = flow(args)
    checked(engine.add_flow(spec))
    say(f"transport {engine.transport}")
    if args.init:
        given = gradient(args.elements, PARAMETERS_OF, 0).view(np.uint8)
        kind = _native.OperationKind.INIT
        checked(engine.run_operation(kind, 0, 0, [given], [np.empty_like(given)], spec))
        say("initialised")
    if args.read:
        read = np.empty(args.elements, np.float32)
        kind = _native.OperationKind.READ
        checked(engine.run_operation(kind, 0, 0, [None], [read.view(np.uint8)], spec))
        np.testing.assert_array_equal(read, gradient(args.elements, PARAMETERS_OF, 0))
        say(f"read step {engine.stats().last_read}")
    mean = np.empty(args.elements, np.float32)
    for step in range(0 if args.update else args.steps):
        mine = gradient(args.elements, args.index, step)
        checked(
            engine.run_operation(
                _native.OperationKind.EXCHANGE,
                0,
                step,
                [mine.view(np.uint8)],
                [mean.view(np.uint8)],
                spec,
            )
        )
        everybody = [
            gradient(args.elements, w, step).astype(np.float64) for w in range(args.workers)
        ]
        np.testing.assert_allclose(mean, sum(everybody) / args.workers, rtol=1e-6)
        say(f"step {step}")
        time.sleep(args.pause)
    if args.idle:
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(args.idle)
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        say(f"idle {share:.5f} of a core")
    say("done")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["server", "worker"])
    parser.add_argument("index", type=int)
    parser.add_argument("address", nargs="*")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--elements", type=int, default=50_000)
    parser.add_argument("--partition-bytes", type=int, default=1 << 16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds at the end, measured")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--init", action="store_true")
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--transport", default="verbs")
    parser.add_argument("--verbs", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    if args.role == "server":
        serve(args)
    else:
        work(args)


if __name__ == "__main__":
    main()
