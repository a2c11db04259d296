"""`jaxrdma devices`: the RDMA devices of this machine, and which of them would be used."""

import argparse
import json
import os
from dataclasses import asdict, fields
from typing import Any

from rich.table import Table
from rich.text import Text

from jaxrdma import devices
from jaxrdma.cli import make_console
from jaxrdma.cluster import MOST_DEVICES, VerbsSettings, jaxrdma_settings, setting_text

DESCRIPTION = (
    "Show the RDMA devices of this machine, their ports and addresses (GIDs), best first, and why."
)
EPILOG = """examples:
  jaxrdma devices
  jaxrdma devices --peer 10.0.0.2                  # best for this peer: by the route to it, and its family
  JAXRDMA_DEVICE=mlx5_1 jaxrdma devices            # what is left to choose from, if one is named
  JAXRDMA_DEVICE=mlx5_0,mlx5_1 jaxrdma devices     # striped over both
  jaxrdma devices --json | jq .choices

JAXRDMA_DEVICE, JAXRDMA_PORT and JAXRDMA_GID_INDEX restrict the choice. The peer is not spoken to; only the resolver and
this machine's routing table are asked.

exit codes:
  0      there is a device to use
  1      there is none; the reason is printed
  2      the arguments or the environment are wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `jaxrdma devices`."""
    parser.add_argument("--peer", metavar="HOST", help="rank for this peer")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--reader",
        choices=devices.READERS,
        default="auto",
        help="what reads them; both give the same; default: pyverbs where it can be imported",
    )


def run(args: argparse.Namespace) -> int:
    """Read, rank, show."""
    survey = devices.survey(args.peer, verbs_settings(), args.reader)
    ranking = survey.ranking
    if args.json:
        print(json.dumps(as_json(survey), indent=2))
    else:
        show(survey.inventory, ranking)
    return 0 if ranking.choices and ranking.down is None else 1


def verbs_settings() -> VerbsSettings:
    """The part of the environment that is about RDMA devices."""
    values = jaxrdma_settings(os.environ)
    return VerbsSettings(
        **{f.name: values[f.name] for f in fields(VerbsSettings) if f.name in values}
    )


def as_json(survey: devices.Survey) -> dict[str, Any]:
    """What `--json` prints."""
    inventory, ranking = survey.inventory, survey.ranking

    def place(candidate: devices.Candidate) -> dict[str, Any]:
        return {
            "device": candidate.device,
            "port": candidate.port.number,
            "gid_index": candidate.gid.index,
            "address": str(candidate.gid.address),
            "type": candidate.gid.type,
            "net_device": candidate.gid.net_device,
        }

    listed: list[dict[str, Any]] = []
    for device in inventory.devices:
        listed.append(asdict(device))
        for port, made in zip(device.ports, listed[-1]["ports"], strict=True):
            for gid, entry in zip(port.gids, made["gids"], strict=True):
                entry |= {"address": str(gid.address), "kind": gid.kind}
    return {
        "reader": inventory.reader,
        "peer": None if survey.peer is None else str(survey.peer),
        "route_source": None if survey.source is None else str(survey.source),
        "devices": listed,
        "choice": None if ranking.choice is None else place(ranking.choice),
        "choices": [place(candidate) for candidate in ranking.choices],
        "reason": ranking.reason,
        "others": [place(candidate) | {"why": why} for candidate, why in ranking.others],
        "unusable": [{"where": where, "why": why} for where, why in ranking.unusable],
    }


def show(inventory: devices.Inventory, ranking: devices.Ranking) -> None:
    """Print a table, best first, and the choice below it."""
    console = make_console()
    if not inventory.devices:
        console.print(ranking.reason)
        return
    table = Table(title=f"RDMA devices, read by {inventory.reader}")
    for name in ("device", "port", "state", "MTU"):
        table.add_column(name, no_wrap=True)
    table.add_column("GID", justify="right", no_wrap=True)
    for name in ("address", "type", "net device"):
        table.add_column(name, no_wrap=True)
    table.add_column("why not", min_width=20)
    chosen = [(choice, Text("chosen", "green")) for choice in ranking.choices]
    for candidate, why in [*chosen, *ranking.others]:
        port, gid = candidate.port, candidate.gid
        table.add_row(
            candidate.device,
            str(port.number),
            port.state,
            str(port.active_mtu),
            str(gid.index),
            str(gid.address),
            gid.type,
            gid.net_device,
            why,
        )
    for where, why in ranking.unusable:
        device, _, port = where.partition(" port ")
        table.add_row(device, port, *[""] * 6, why)
    console.print(table)
    if ranking.choices:
        console.print(f"chosen: {ranking.name}: {ranking.reason}")
        spare = devices.spare_devices(ranking)
        if spare:
            names = (ranking.choices[0].device, *spare)[:MOST_DEVICES]
            console.print(
                f"to stripe over several, name them: JAXRDMA_DEVICE={setting_text(names)}. The first of one machine "
                "is joined to the first of another, and so on: in the same order everywhere"
            )
    else:
        console.print(f"none can be used: {ranking.reason}")
