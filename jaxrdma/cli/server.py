"""`jaxrdma server`: run one server of a job by hand."""

import argparse

from jaxrdma.cli import EXIT_CODES, read_secret
from jaxrdma.cluster import ClusterSpec, check_listen, metrics_address
from jaxrdma.control import say_on_stderr
from jaxrdma.hosts import route_address

DESCRIPTION = "Run one server of a job. It ends when the job does."
EPILOG = f"""examples:
  jaxrdma server --coordinator 127.0.0.1:7000 --index 0 --num-workers 2 --num-servers 1
  JAXRDMA_SECRET=... jaxrdma server --coordinator 10.0.0.1:7000 --index 3 --num-workers 8 --num-servers 4
  JAXRDMA_SECRET=... jaxrdma server --coordinator 10.0.0.1:7000 --index 3 --num-workers 8 --num-servers 4 \\
      --listen 10.1.0.4:0                        # data by another network than the coordinator's

What is not given is read from JAXRDMA_COORDINATOR, JAXRDMA_INDEX and so on, or from TF_CONFIG; JAXRDMA_CHECKPOINT and
what belongs to it, alike on every server, say where and when checkpoints are saved. The secret comes from
JAXRDMA_SECRET or a file, never from the command line, which others can read. Beyond loopback it must be there. With
JAXRDMA_TLS_CERT, JAXRDMA_TLS_KEY and JAXRDMA_TLS_CA it speaks TLS with the coordinator.

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `jaxrdma server`."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the coordinator listens")
    parser.add_argument("--index", type=int, metavar="I", help="which server this is, from 0")
    parser.add_argument("--num-workers", type=int, metavar="W", help="how many workers the job has")
    parser.add_argument(
        "--most-workers", type=int, metavar="M", help="how many it may have; default: W"
    )
    parser.add_argument("--num-servers", type=int, metavar="S", help="how many servers the job has")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="for the workers' data; default: this machine's address on its way to the coordinator, any free port",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="answer Prometheus there, on loopback if no host is given; default: JAXRDMA_METRICS, its port plus I + 1",
    )
    parser.add_argument("--job", help="the job's name")
    parser.add_argument("--secret-file", metavar="FILE", help="a file with the job's secret")


def run(args: argparse.Namespace) -> int:
    """Serve, until the job is over."""
    spec = ClusterSpec.from_environment(
        role="server",
        coordinator=args.coordinator,
        index=args.index,
        num_workers=args.num_workers,
        most_workers=args.most_workers,
        num_servers=args.num_servers,
        job=args.job,
        secret=read_secret(args.secret_file),
    )
    listen = args.listen or route_address(spec.coordinator, spec.connect_timeout, say_on_stderr)
    check_listen(listen, spec.secret)
    from jaxrdma.server import run_server  # after the checks: it imports JAX

    metrics = None
    if args.metrics is not None:
        metrics = metrics_address(args.metrics)
    elif spec.metrics is not None:
        metrics = metrics_address(spec.metrics, 1 + spec.index)
    return run_server(spec, listen, metrics)
