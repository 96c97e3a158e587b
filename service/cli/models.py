"""Commands for the models on a server: which are current, which are loaded, and how fast they
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import terminal
from service.cli.options import JsonOption, UrlOption, connect
from service.cli.progress import follow

if TYPE_CHECKING:
    from service.registry.models import ModelView, Version

app = typer.Typer()

ModelArgument = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]


@app.command()
def promote(
    name: ModelArgument,
    report: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="The job whose engine it is to be: its id, or its address."
        ),
    ],
    override: Annotated[
        bool,
        typer.Option(
            "--override",
            help="Take an unproven one too, which is logged. A rejected one is never taken.",
        ),
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a report's engine the current version of a model. Where the model is loaded, the new
    version answers when this ends.
    """
    from service.client import place_of

    where, job_id = place_of(report, url)
    with connect(where) as client:
        _print_model(client.promote(name, job_id, override), as_json)


@app.command()
def rollback(name: ModelArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Make the version current again that was before this one."""
    with connect(url) as client:
        _print_model(client.rollback(name), as_json)


@app.command()
def load(
    name: ModelArgument,
    version: Annotated[
        int | None,
        typer.Option(help="Stay on this one; the current one, also after promotions, if left out."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, gpu:0, ...; the first that the engine runs on if left out."),
    ] = None,
    instances: Annotated[
        int | None, typer.Option(help="Processes, each with an engine of its own; 1 if left out.")
    ] = None,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap", help="Copy a batch while another one computes; takes more memory."
        ),
    ] = False,
    max_batch: Annotated[
        int | None,
        typer.Option(help="Rows that may run together; as many as were proved if left out."),
    ] = None,
    max_delay_ms: Annotated[
        float | None,
        typer.Option(help="How long a request waits for others while all are busy; 2 if left out."),
    ] = None,
    queue_limit: Annotated[
        int | None, typer.Option(help="Requests that may wait; 256 if left out.")
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(help="Of a request, which may bring a shorter one; 30 if left out."),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a model on a service, or serve it in another way; it answers when this ends."""
    from pydantic import ValidationError

    from pipeline.errors import PlanError
    from pipeline.plan.schema import explain
    from service.registry.models import DeploymentOptions

    given = {
        "version": version,
        "device": device,
        "instances": instances,
        "max_batch": max_batch,
        "queue_limit": queue_limit,
        "timeout_s": timeout_s,
    }
    given |= {
        "max_delay_s": None if max_delay_ms is None else max_delay_ms / 1e3,
        "overlap": overlap or None,
    }
    try:
        options = DeploymentOptions.model_validate(
            {name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        raise PlanError(explain(error, DeploymentOptions), "see `crucible load --help`") from error
    with connect(url) as client:
        _print_model(client.load(name, options), as_json)


@app.command()
def benchmark(
    name: ModelArgument,
    version: Annotated[
        int | None,
        typer.Option(
            min=1, help="This one; the one that is loaded, or else the current one, if left out."
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's engine again on the service, beside the baselines of its compile, and
    follow the job as `crucible wait` does.

    Ends with the latencies, the verdict and, as the last line, one JSON document: the job.
    """
    with connect(url) as client:
        follow(client, client.benchmark(name, version).id, as_json)


@app.command()
def unload(name: ModelArgument, url: UrlOption = None) -> None:
    """Answer what waits, and free the device."""
    with connect(url) as client:
        client.unload(name)
    print(f"model {name} is unloaded")


@app.command()
def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this one, with all its versions.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the models on a service, or the versions of one."""
    from service.registry.models import ModelPage

    with connect(url) as client:
        found = client.models() if name is None else client.model(name)
    if as_json:
        print(found.model_dump_json())
        return
    if not isinstance(found, ModelPage):
        heads, rows = (
            ("version", "report", "candidate", "verdict", "together", "created"),
            [_version_row(found, each) for each in found.versions],
        )
    else:
        heads, rows = (
            ("model", "current", "candidate", "state", "answers", "device"),
            [_model_row(each) for each in found.models],
        )
    terminal.console().print(terminal.plain_table(heads, rows))


def _print_model(model: ModelView, as_json: bool) -> None:
    if as_json:
        print(model.model_dump_json())
        return
    serving = model.deployment
    how = (
        f"version {serving.version} answers on {serving.device}"
        if serving.version is not None
        else f"the model is {serving.state}"
    )
    print(
        f"model {model.name}: version {model.current.version} ({model.current.label}) is current,"
        f" {how}"
    )
    if model.current.verdict == "keep":
        print("this serves the model as given: no engine was measurably faster")
    if model.current.batch.reason:
        print(
            f"requests run {'together' if model.current.batch.proved else 'alone'}:"
            f" {model.current.batch.reason}"
        )


def _model_row(model: ModelView) -> tuple[str, ...]:
    serving = model.deployment
    return (
        model.name,
        str(model.current.version),
        model.current.label,
        serving.state,
        str(serving.version or ""),
        serving.device or "",
    )


def _version_row(model: ModelView, version: Version) -> tuple[str, ...]:
    number = f"{version.version}{' (current)' if version.version == model.current.version else ''}"
    verdict = f"{version.verdict}{', taken by override' if version.override else ''}"
    together = (
        f"up to {version.batch.maximum}" if version.batch.proved else f"no: {version.batch.reason}"
    )
    return (number, version.job, version.label, verdict, together, version.created)
