"""`crucible node`: run the jobs of a service on another host, and list who runs them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import terminal
from pipeline.errors import PlanError
from service.cli.options import JsonOption, UrlOption, connect

app = typer.Typer(help="Run the jobs of a service on this host too, and list who runs them.")


@app.command()
def start(
    devices: Annotated[
        str,
        typer.Option(metavar="DEVICE,...", help="Only these devices: cpu, gpu:0. Default: all."),
    ] = "",
    labels: Annotated[
        str,
        typer.Option(
            metavar="NAME[=VALUE],...",
            help="Labels of its devices, for targets, besides those of `crucible doctor`.",
        ),
    ] = "",
    home: Annotated[
        Path | None,
        typer.Option(help="That of the servers, unless files are in S3. Default: $CRUCIBLE_HOME."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Write the node's id and process to this file. The node ends once a newer node is"
                " in it."
            ),
        ),
    ] = None,
) -> None:
    """Run jobs of the database CRUCIBLE_SERVICE_DATABASE_URL, without HTTP, until SIGTERM or
    Ctrl-C. Then its jobs are queued again, for other nodes.
    """
    from service.cli.node_process import run_node
    from service.settings import settings_from

    names = [name.strip() for name in devices.split(",") if name.strip()]
    settings = settings_from(os.environ, home=home)
    run_node(settings, names, labels_from(labels), record=record)


@app.command(name="list")
def list_nodes(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the servers and nodes that run the jobs of a service. Needs an admin key."""
    from pipeline.host.labels import labels_text

    with connect(url) as client:
        page = client.nodes()
    if as_json:
        print(page.model_dump_json())
        return
    rows = [
        (
            node.id,
            f"{node.name} ({node.kind})",
            "live" if node.live else f"gone for {node.silent_s:.0f} s",
            device,
            labels_text(labels),
            " ".join(node.jobs),
        )
        for node in page.nodes
        for device, labels in node.labels.items()
    ]
    headings = ("node", "host", "state", "device", "labels", "jobs of the node")
    terminal.console().print(terminal.plain_table(headings, rows))


def labels_from(text: str) -> dict[str, str]:
    """Read `rack=a,fast`. PlanError if a label has another form."""
    from pipeline.plan.sections.targets import checked_label

    labels = dict[str, str]()
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        try:
            checked_label(f"{name}=={value}" if "=" in part else name)
        except ValueError:
            raise PlanError(
                f"expected --labels as NAME or NAME=VALUE, separated by commas, got '{part}'",
                "for example --labels rack=a,fast",
            ) from None
        labels[name] = value
    return labels
