"""`jaxrdma coordinator`: run the coordinator of a job by hand."""

import argparse
import contextlib
import json
import os
from typing import Any

from jaxrdma.cli import EXIT_CODES, read_secret
from jaxrdma.cluster import (
    HEARTBEAT_TIMEOUT,
    STALL_WARNING,
    STEP_TIMEOUT,
    jaxrdma_settings,
    metrics_address,
    tls_files,
)
from jaxrdma.control import JobFailed
from jaxrdma.coordinator import run_coordinator
from jaxrdma.delegate import lost_fact
from jaxrdma.errors import ConfigError

DESCRIPTION = "Run the coordinator of one job. It ends when the job does."
EPILOG = f"""examples:
  jaxrdma coordinator --listen 127.0.0.1:7000 --workers 2 --servers 1
  JAXRDMA_SECRET=... jaxrdma coordinator --listen 10.0.0.1:7000 --workers 8 --servers 4

The secret comes from JAXRDMA_SECRET or a file, never from the command line, which others can read. Beyond loopback it
must be there. JAXRDMA_JOB, JAXRDMA_CONNECT_TIMEOUT, JAXRDMA_HEARTBEAT_TIMEOUT, JAXRDMA_STALL_WARNING and
JAXRDMA_STEP_TIMEOUT are read as well. With JAXRDMA_TLS_CERT, JAXRDMA_TLS_KEY and JAXRDMA_TLS_CA it speaks TLS, and lets
in who has a certificate of that CA. Its own must name the host, or IP address, by which the others know it.

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `jaxrdma coordinator`."""
    parser.add_argument(
        "--listen", default="127.0.0.1:7000", metavar="HOST:PORT", help="default: %(default)s"
    )
    parser.add_argument("--workers", type=int, metavar="W", help="how many workers the job has")
    parser.add_argument(
        "--most-workers",
        type=int,
        metavar="M",
        help="how many it may have: more than W may come while it runs; default: W",
    )
    parser.add_argument("--servers", type=int, metavar="S", help="how many servers the job has")
    parser.add_argument("--job", help="the job's name")
    parser.add_argument("--secret-file", metavar="FILE", help="a file with the job's secret")
    parser.add_argument(
        "--connect-timeout", type=float, metavar="S", help="seconds until all must be there"
    )
    parser.add_argument(
        "--heartbeat-timeout", type=float, metavar="S", help="seconds of silence until one is lost"
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="answer Prometheus there, on loopback if no host is given; default: JAXRDMA_METRICS",
    )
    parser.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Coordinate, until the job is over."""
    settings = jaxrdma_settings(os.environ)
    given: dict[str, Any] = {
        "num_workers": args.workers,
        "num_servers": args.servers,
        "most_workers": args.most_workers,
        "secret": read_secret(args.secret_file),
        "job": args.job,
        "connect_timeout": args.connect_timeout,
        "heartbeat_timeout": args.heartbeat_timeout,
        "metrics": args.metrics,
    }
    values = settings | {name: value for name, value in given.items() if value is not None}
    for name, option in (("num_workers", "--workers"), ("num_servers", "--servers")):
        if values.get(name, 0) < 1:
            raise ConfigError(f"how many? Give {option}, at least 1, or JAXRDMA_{name.upper()}.")
    most = values.get("most_workers", values["num_workers"])
    if most < values["num_workers"]:
        raise ConfigError(
            f"--most-workers {most}: expected at least --workers, {values['num_workers']}, with which the job begins"
        )

    def report(fact: dict[str, Any]) -> None:
        if args.report_fd is not None:
            with contextlib.suppress(
                OSError
            ):  # the launcher is gone; the job goes on or ends without it
                os.write(args.report_fd, json.dumps(fact).encode() + b"\n")

    def report_failure(failure: JobFailed) -> None:
        report(
            {
                "kind": failure.kind,
                "text": failure.text,
                "role": failure.role,
                "index": failure.index,
            }
        )

    if args.report_fd is not None:
        os.set_inheritable(args.report_fd, False)
    return run_coordinator(
        args.listen,
        values["num_workers"],
        values["num_servers"],
        most_workers=most,
        secret=values.get("secret", ""),
        job=values.get("job", "jaxrdma"),
        attempt=values.get("attempt", 0),
        connect_timeout=values.get("connect_timeout", 300.0),
        heartbeat_timeout=values.get("heartbeat_timeout", HEARTBEAT_TIMEOUT),
        stall_warning=values.get("stall_warning", STALL_WARNING),
        step_timeout=values.get("step_timeout", STEP_TIMEOUT),
        report=lambda address: report({"address": address}),
        on_failure=report_failure,
        on_saving=lambda seconds: report({"saving": seconds}),
        on_lost=lambda lost: report(lost_fact(lost)),
        on_rescue=lambda seconds: report({"rescuing": seconds}),
        metrics=metrics_address(values["metrics"]) if "metrics" in values else None,
        tls=tls_files(values),
    )
