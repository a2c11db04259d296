"""`jaxrdma launch`: start a job on this machine, or this machine's share of one."""

import argparse
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxrdma.cli import EXIT_CODES, read_secret
from jaxrdma.cluster import RESTORES, TRANSPORTS, ClusterSpec, VerbsSettings, jaxrdma_settings
from jaxrdma.errors import ConfigError
from jaxrdma.hosts import listen_address, parse_share
from jaxrdma.launch import LaunchPlan, launch
from jaxrdma.restarts import WORKER_RESTARTS

DESCRIPTION = (
    "Start a coordinator, servers, and workers that run a script, and wait for the end of the job. All of them run on "
    "this machine, or, with --coordinator and --here, on several, on each of which the same command is run."
)
EPILOG = f"""examples:
  jaxrdma launch --servers 1 --workers 2 train.py --epochs 3
  jaxrdma launch --servers 2 --workers 2 --transport tcp --ordered -m my_package.train
  jaxrdma launch --workers 2 --checkpoint run1 --checkpoint-steps 1000 train.py   # again: goes on from the last
  jaxrdma launch --workers 2 --checkpoint run1 --checkpoint-steps 1000 --restarts 3 train.py   # by itself, 3 times

on two machines, of which the first is 10.0.0.1, in any order, with the same JAXRDMA_SECRET in both environments:
  jaxrdma launch --coordinator 10.0.0.1:7000 --servers 1 --workers 2 --here coordinator,server:0,worker:0 train.py
  jaxrdma launch --coordinator 10.0.0.1:7000 --servers 1 --workers 2 --here worker:1 train.py

that begins with two workers and may have four, of which the third comes later, from a machine of its own:
  jaxrdma launch --coordinator 10.0.0.1:7000 --workers 2 --most-workers 4 \\
      --here coordinator,server:0,worker:0-1 train.py
  jaxrdma launch --coordinator 10.0.0.1:7000 --workers 2 --most-workers 4 --here worker:2 train.py

Output lines carry the name of the process they come from. Standard input is empty for all. Ctrl-C reaches the workers
first; nothing is left 3 seconds later. If one process fails, the others have 5 seconds to tell their own side of it.
The settings in the environment (JAXRDMA_..., see the README) reach every process, but for those that the launcher says
itself: which process it is, and, of a job on one machine, the secret and the name. Options go before them; TF_CONFIG is
not read. Servers never see a GPU.

With TLS all processes of one machine show the same certificate. On one machine it must name 127.0.0.1, where the
coordinator is then; on several, that of the coordinator's machine names the host of --coordinator.

With --checkpoint the same command, given again after whatever ended the job, goes on from the last checkpoint, also
with another number of servers. All servers need one folder: on several machines, on a network file system.

With --restarts N the launcher does that itself, at most N times: when a process of the job was killed, died, fell
silent or raised an error, all end as they would without, and are started anew. Each finds in JAXRDMA_ATTEMPT which
attempt it belongs to, from 0. Not started again is a job that somebody interrupted; whose processes differ, or whose
settings, devices or checkpoints cannot be used; that a process left early; that is not complete, or over, in time.

With --replicate 1 such a restart costs no step: see the README on recovery. A lost server's part is saved by the server
that keeps the copy of it; without --replicate all begin from the last checkpoint.

A worker whose loss the job bears, by its policy's on_loss, can be started again alone, while the others go on or wait:
each up to --worker-restarts N times. If the others wait for one that is not started again, the job ends.

With --most-workers M the job begins with W workers, and indices up to M - 1 may come while it runs, if its policy has
on_loss='shrink' or 'wait': by the same command with their --here, from any machine, at any time. Nobody waits for them,
and a launcher that starts nothing else may fail, or be stopped by Ctrl-C, without harm to the others.

On several machines: the totals are the same everywhere, and every process stands in exactly one --here. All have
JAXRDMA_CONNECT_TIMEOUT to come. The secret comes from JAXRDMA_SECRET or a file, never from the command line, which
others can read; without one, the coordinator must be at a loopback address. JAXRDMA_JOB gives the job another name.
If a process fails that the job cannot do without (see on_loss of its policy), all on all machines end, and every
launcher says whose fault it was. Give --restarts alike on every machine: each launcher starts its share again, and
waits for the coordinator as at the first start.

{EXIT_CODES}
A process that fails first gives the launcher of its machine its own exit code; with --restarts, in the last attempt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `jaxrdma launch`."""
    parser.add_argument("--servers", type=int, default=1, metavar="S", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=1, metavar="W", help="default: %(default)s")
    parser.add_argument(
        "--most-workers",
        type=int,
        metavar="M",
        help="begin with W workers, and let up to M have a part: more may come while the job runs; default: W",
    )
    parser.add_argument("--transport", choices=TRANSPORTS, help="how tensors travel; default: auto")
    parser.add_argument(
        "--ordered",
        action="store_true",
        default=None,
        help="sum in the workers' order: the same bits on every run",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        default=None,
        help="print which server holds what of each model",
    )
    parser.add_argument(
        "--partition-bytes", type=int, metavar="N", help="upper bound of a partition"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="the servers save parameters and optimizer state there, and a job goes on from what it finds there",
    )
    parser.add_argument(
        "--checkpoint-steps", type=int, metavar="N", help="save every N steps, and at the end"
    )
    parser.add_argument(
        "--checkpoint-seconds", type=float, metavar="S", help="save every S seconds, and at the end"
    )
    parser.add_argument(
        "--checkpoint-keep", type=int, metavar="K", help="how many are kept; default: 3"
    )
    parser.add_argument(
        "--checkpoint-restore",
        choices=RESTORES,
        help="auto (default): go on from the newest; never: set what is there aside and begin anew; new-update: as "
        "auto, also with another update, if its state has the same arrays",
    )
    parser.add_argument(
        "--replicate",
        type=int,
        choices=(0, 1),
        help="1: each server's part is kept by another server too; with --checkpoint and --restarts, the loss of a "
        "process, but for the coordinator, costs no step. Needs 2 servers; default: 0",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the job again, up to N times, when a process of it is lost; default: %(default)s",
    )
    parser.add_argument(
        "--worker-restarts",
        type=int,
        metavar="N",
        help="start a worker again, up to N times each, when the job bears its loss; default: "
        f"{WORKER_RESTARTS} if its policy has on_loss='wait', else 0",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="the coordinator answers Prometheus there, server i at the port plus i + 1; without a host on loopback",
    )
    parser.add_argument(
        "--trace-dir",
        metavar="DIR",
        help="workers and servers leave files for `jaxrdma trace` there, on SIGUSR1 and when they or the job fail",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where the coordinator of a job on several machines listens",
    )
    parser.add_argument(
        "--here",
        metavar="LIST",
        help="what of such a job runs on this machine: coordinator,server:0,worker:0-3",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST",
        help="where its servers listen for data; default: this machine's address on its way to the coordinator",
    )
    parser.add_argument(
        "--secret-file", metavar="FILE", help="a file with the secret of such a job"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="run a module"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="script.py ...", help="run a script"
    )


def run(args: argparse.Namespace) -> int:
    """Launch, and wait for the end."""
    if args.module:
        command = ["-m", *args.module]
    else:
        command = [a for i, a in enumerate(args.script) if i or a != "--"]
        if not command:
            raise ConfigError("which script? Give script.py, or -m module, after the options.")
        if not Path(command[0]).exists():
            raise ConfigError(f"there is no script {command[0]!r} in {Path.cwd()}")
    given: dict[str, Any] = {
        "transport": args.transport,
        "ordered": args.ordered,
        "show_plan": args.plan,
        "partition_bytes": args.partition_bytes,
        "checkpoint": None if args.checkpoint is None else str(Path(args.checkpoint).absolute()),
        "checkpoint_steps": args.checkpoint_steps,
        "checkpoint_seconds": args.checkpoint_seconds,
        "checkpoint_keep": args.checkpoint_keep,
        "checkpoint_restore": args.checkpoint_restore,
        "replicate": args.replicate,
        "most_workers": args.most_workers,
        "metrics": args.metrics,
        "trace_dir": None if args.trace_dir is None else str(Path(args.trace_dir).absolute()),
    }
    several = args.coordinator is not None or args.here is not None
    # What the launcher says itself, of each process; alone, it makes a secret too.
    own = {"coordinator", "role", "index", "num_workers", "num_servers", "attempt"}
    if several:
        given["secret"] = read_secret(args.secret_file)
    else:
        own |= {"secret", "job"}
    environment = jaxrdma_settings(os.environ)
    settings = {name: value for name, value in environment.items() if name not in own}
    settings |= {name: value for name, value in given.items() if value is not None}
    verbs = [f.name for f in fields(VerbsSettings) if f.name in settings]
    settings["verbs"] = VerbsSettings(**{name: settings.pop(name) for name in verbs})
    _check_restarts(args.restarts, settings)
    if not several and settings.get("most_workers", 0) > args.workers:
        raise ConfigError(
            "--most-workers needs --coordinator HOST:PORT and --here: without, nobody else can find the job"
        )
    if settings.get("replicate"):
        # As its servers would, once they are started.
        ClusterSpec("127.0.0.1:1", "server", 0, args.workers, args.servers, **settings)
    if args.worker_restarts is not None and args.worker_restarts < 0:
        raise ConfigError(f"--worker-restarts {args.worker_restarts}: expected at least 0")
    plan = LaunchPlan(
        args.servers,
        args.workers,
        tuple(command),
        settings,
        restarts=args.restarts,
        worker_restarts=args.worker_restarts,
    )
    if not several:
        return launch(_alone(args, plan))
    return launch(replace(plan, **_several(args, settings.get("most_workers"))))


def _check_restarts(restarts: int, settings: dict[str, Any]) -> None:
    """Refuse what cannot go on, and say once what does not."""
    if restarts < 0:
        raise ConfigError(f"--restarts {restarts}: expected at least 0")
    if restarts == 0:
        return
    if settings.get("checkpoint_restore") == "never":
        raise ConfigError(
            "--restarts with --checkpoint-restore never: each attempt would set aside what the one before it has "
            "saved. Give --checkpoint another folder instead"
        )
    if "checkpoint" not in settings:
        text = "jaxrdma: --restarts without --checkpoint: each attempt begins at step 0 again"
        print(text, file=sys.stderr, flush=True)


def _several(args: argparse.Namespace, most_workers: int | None) -> dict[str, Any]:
    """What a plan says of a job on several machines."""
    if args.coordinator is None:
        raise ConfigError("--here needs --coordinator HOST:PORT, the same on every machine")
    if args.here is None:
        raise ConfigError("--coordinator needs --here: what of the job runs on this machine?")
    for name in ("servers", "workers"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected at least 1")
    return {
        "coordinator": args.coordinator,
        "share": parse_share(args.here, args.servers, max(args.workers, most_workers or 0)),
        "listen": None if args.listen is None else listen_address(args.listen),
    }


def _alone(args: argparse.Namespace, plan: LaunchPlan) -> LaunchPlan:
    """`plan`, if nothing was said that only concerns several machines."""
    for name in ("listen", "secret_file"):
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} is for a job on several machines: give --coordinator and --here"
            )
    return plan
