"""`crucible ray`: nodes on the hosts of a Ray cluster, as many as the waiting jobs need."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from pipeline.cli import terminal
from pipeline.errors import PlanError
from service.cli.node import labels_from
from service.cli.options import JsonOption

app = typer.Typer(
    help="Run the jobs of a service on a Ray cluster: start nodes there, list them, stop them."
)

AddressOption = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="The head of the Ray cluster. This host must belong to it. auto: its own cluster.",
    ),
]
SelectOption = Annotated[
    str,
    typer.Option(
        metavar="NAME=VALUE,...",
        help="Only Ray nodes with these labels (`ray start --labels`). Default: all.",
    ),
]
GraceOption = Annotated[
    float,
    typer.Option(min=1, help="Seconds for a node to queue its jobs again, before it is killed."),
]


@app.command()
def start(
    address: AddressOption = "auto",
    select: SelectOption = "",
    labels: Annotated[
        str,
        typer.Option(
            metavar="NAME[=VALUE],...",
            help="Labels of the devices, for targets, besides those of `crucible doctor`.",
        ),
    ] = "",
    min_nodes: Annotated[
        int, typer.Option("--min", min=0, help="Nodes that run also if no job waits.")
    ] = 0,
    max_nodes: Annotated[
        int, typer.Option("--max", min=1, help="Nodes that run at once, one on each Ray node.")
    ] = 8,
    idle_s: Annotated[
        float, typer.Option(min=0, help="Seconds without a job until a node ends.")
    ] = 300,
    grace_s: GraceOption = 60,
    once: Annotated[
        bool, typer.Option("--once", help="End when Ray cannot be reached, instead of waiting.")
    ] = False,
) -> None:
    """Start a node on each Ray node that a waiting job needs, and end those that are idle, until
    Ctrl-C. The nodes then go on: `crucible ray stop` ends them.

    A Ray node runs as many jobs at once as it has of the resource `measure`: `ray start --resources
    '{"measure": 1}'`, 1 for each device. Its environment needs CRUCIBLE_SERVICE_DATABASE_URL and,
    unless all hosts share a home, CRUCIBLE_SERVICE_FILES_URL.
    """
    from service.cluster.operations import check_requirements, supervise, supervise_again
    from service.cluster.scaling import Limits
    from service.cluster.supervisor import SupervisorOptions
    from service.settings import settings_from

    if min_nodes > max_nodes:
        raise PlanError(
            f"expected --min to be at most --max, got {min_nodes} and {max_nodes}",
            "lower --min, or raise --max",
        )
    limits = Limits(min_nodes, max_nodes, idle_s)
    extra = labels_from(labels)
    options = SupervisorOptions(limits, selector_from(select), labels, extra, grace_s)
    settings = settings_from(os.environ)
    check_requirements(settings)
    if not once:
        supervise_again([sys.executable, "-m", "pipeline.cli", *sys.argv[1:], "--once"])
    supervise(settings, address, options)


@app.command()
def status(
    address: AddressOption = "auto", select: SelectOption = "", as_json: JsonOption = False
) -> None:
    """List the Ray nodes, the node that runs on each, and why one cannot run there."""
    import dataclasses
    import json

    from service.cluster.operations import statuses

    found = statuses(address, selector_from(select))
    if as_json:
        print(json.dumps({"nodes": [dataclasses.asdict(each) for each in found]}))
        return
    rows = [
        (
            f"{each.host} ({each.address})",
            ", ".join(each.devices),
            each.node,
            each.fault or _state_of(each.node, each.has_actor),
        )
        for each in found
    ]
    head = ("Ray node", "devices", "node", "state")
    terminal.console().print(terminal.plain_table(head, rows))


@app.command()
def stop(
    address: AddressOption = "auto", select: SelectOption = "", grace_s: GraceOption = 60
) -> None:
    """End the nodes on Ray nodes. Their jobs are queued again. Stop `crucible ray start` first,
    which would start others.
    """
    from service.cluster.operations import stop_all

    hosts = stop_all(address, selector_from(select), grace_s)
    print(f"no node runs on Ray any more; they ran on: {', '.join(hosts) or 'no host'}")


def selector_from(text: str) -> dict[str, str]:
    """Read `pool=crucible,zone=a`. PlanError if it has another form."""
    selector = dict[str, str]()
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        if not name or not value or "=" in value:
            raise PlanError(
                f"expected --select as NAME=VALUE, separated by commas, got '{part}'",
                "for example --select pool=crucible",
            )
        selector[name] = value
    return selector


def _state_of(node: str, has_actor: bool) -> str:
    if node:
        return "runs" if has_actor else "runs, without an actor"
    return "starts" if has_actor else "free"
