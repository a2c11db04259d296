"""Drives the engines without JAX, which takes long to import in a guest: one server, or one worker.

  engines.py server INDEX                   says "listening ADDRESS", then what happens, until it is ended
  engines.py worker INDEX ADDRESS...        averages with the others, checks every mean, says "step N" and "done"

Every process of a job is given the same --servers, --workers, --elements and --partition-bytes. With --update on all of
them, servers keep parameters and leave them as they are: a worker with --init gives them, one with --read reads them in
the servers' memory. With --coordinator HOST:PORT the device is chosen as a job does it, by the route to its peer and
JAXRDMA_*, and said in a line that begins with "verbs, "; nobody needs to listen there. --verbs device=A,B stripes over
several. A failure is said as "failed CODE: MESSAGE", with exit status 3.
"""

import argparse
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

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


def pinned() -> str:
    """Memory of this process that devices have locked, as the kernel counts it."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("VmPin:")]
    return line.split()[1]


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


def chosen(args: argparse.Namespace, listen: str | None) -> dict[str, Any]:
    """How the bytes travel, as a worker or server of a job would find it."""
    if args.coordinator is None:
        return {
            "transport": args.transport,
            "verbs": with_settings(args, _native.VerbsOptions()),
        }
    # Not for those who do not need it: modules take their time in a guest.
    from jaxrdma import transport
    from jaxrdma.cluster import ClusterSpec
    from jaxrdma.errors import JaxRdmaError
    from jaxrdma.memory import Locked, connections_bytes
    from jaxrdma.native import transport_options

    spec = ClusterSpec.from_environment(
        role=args.role,
        index=args.index,
        coordinator=args.coordinator,
        num_workers=args.workers,
        num_servers=args.servers,
        transport=args.transport,
    )
    try:
        ranking = transport.choose(spec, transport.place(spec, listen, args.address))
        say(transport.describe(ranking))
        peers = args.workers if listen is not None else args.servers
        need = connections_bytes(peers, args.partition_bytes)
        locked = Locked(f"{args.role} {args.index}", say, devices=len(ranking.choices))
        locked.add("its connections", need)
    except JaxRdmaError as error:
        say(f"failed {type(error).__name__}: {error}")
        sys.exit(3)
    made = transport_options(spec, "verbs", ranking.choices)
    with_settings(args, made["verbs"])
    return {**made}


def with_settings(args: argparse.Namespace, options: _native.VerbsOptions) -> _native.VerbsOptions:
    values = dict(setting.split("=", 1) for setting in args.verbs)
    sources = options.sources
    if "device" in values:
        sources = [_native.VerbsSource(device=name) for name in values.pop("device").split(",")]
    for name, value in values.items():
        for target in sources if name in ("port", "gid_index") else [options]:
            setattr(target, name, int(value))
    options.sources = sources
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
        **chosen(args, args.listen),
    )
    checked(engine)
    assert isinstance(engine, _native.ServerEngine)
    for worker in range(args.workers):
        checked(engine.admit(worker, worker + 1, token(worker, args.index)))
    checked(engine.add_flow(flow(args)))
    say(f"transport {engine.transport}")
    say(f"pinned {pinned()} KiB")
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
        **chosen(args, None),
    )
    checked(engine)
    assert isinstance(engine, _native.WorkerEngine)
    tokens = [token(args.index, server) for server in range(args.servers)]
    checked(engine.connect(args.address, tokens, 20_000))
    spec = flow(args)
    checked(engine.add_flow(spec))
    say(f"transport {engine.transport}")
    if engine.notice:
        say(f"notice {engine.notice}")
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
    say(f"pinned {pinned()} KiB")
    say("done")
    engine.close()


def forked(arguments: tuple[str, ...], environment: dict[str, str], output: Connection) -> None:
    """`main` in a process that was forked from one which has the modules."""
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    main(arguments)


def main(arguments: tuple[str, ...] | None = None) -> None:
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
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="choose the device as a job does"
    )
    parser.add_argument("--verbs", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(arguments)
    if args.role == "server":
        serve(args)
    else:
        work(args)


if __name__ == "__main__":
    main()
