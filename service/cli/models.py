"""Commands for the models on a server: promote, load and measure them."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli import terminal
from service.cli.options import JsonOption, UrlOption, connect
from service.cli.progress import follow
from service.registry.models import DeploymentOptions, ModelPage, ModelView, Version

DEFAULTS = DeploymentOptions()

app = typer.Typer()

ModelArgument = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]


@app.command()
def promote(
    name: ModelArgument,
    report: Annotated[
        str,
        typer.Argument(metavar="JOB", help="The job that built the engine, by id or address."),
    ],
    override: Annotated[
        bool,
        typer.Option(
            "--override",
            help="Accept an unproven engine, which is logged. A rejected one is never accepted.",
        ),
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a report's engine the current version of a model. If the model is loaded, the new
    version answers when this ends.
    """
    from service.client import place_of

    where, job_id = place_of(report, url)
    with connect(where) as client:
        _print_model(client.promote(name, job_id, override), as_json)


@app.command()
def rollback(name: ModelArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Make the previous version of a model current again."""
    with connect(url) as client:
        _print_model(client.rollback(name), as_json)


@app.command()
def load(
    name: ModelArgument,
    version: Annotated[
        int | None,
        typer.Option(help="Keep this version. Default: the current one, even after promotions."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, gpu:0, ... Default: the first device that the engine runs on."),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            help="Batches that run at the same time: on a GPU in one process, else in a process"
            " each. Default: as the compile found it best, else 1."
        ),
    ] = DEFAULTS.instances,
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Maximum rows in a batch. Default: as the compile found it best, else the proved"
            " maximum."
        ),
    ] = None,
    max_delay_ms: Annotated[
        float,
        typer.Option(help="Longest wait for a fuller batch while all instances are busy."),
    ] = DEFAULTS.max_delay_s * 1e3,
    queue_limit: Annotated[
        int, typer.Option(help="Maximum number of waiting requests.")
    ] = DEFAULTS.queue_limit,
    timeout_s: Annotated[
        float, typer.Option(help="Time limit of a request; a request may set a shorter one.")
    ] = DEFAULTS.timeout_s,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a model on a service, or change how it is served. It answers requests when this ends."""
    from pydantic import ValidationError

    from pipeline.errors import PlanError
    from pipeline.plan.schema import explain

    try:
        options = DeploymentOptions(
            version=version,
            device=device,
            instances=instances,
            max_batch=max_batch,
            max_delay_s=max_delay_ms / 1e3,
            queue_limit=queue_limit,
            timeout_s=timeout_s,
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
            min=1, help="Version to measure. Default: the loaded one, else the current one."
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's engine again on the service, beside the baselines of its compile, and
    follow the job like `crucible wait`.

    Ends with the latencies, the verdict and, as the last line, one JSON document: the job.
    """
    with connect(url) as client:
        follow(client, client.benchmark(name, version).id, as_json)


@app.command()
def unload(name: ModelArgument, url: UrlOption = None) -> None:
    """Answer the waiting requests, then free the device."""
    with connect(url) as client:
        client.unload(name)
    print(f"model {name} is unloaded")


@app.command()
def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show only this model, with all its versions."),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the models on a service, or the versions of one model."""
    with connect(url) as client:
        listing = client.models() if name is None else client.model(name)
    if as_json:
        print(listing.model_dump_json())
        return
    if isinstance(listing, ModelPage):
        columns = ("model", "current", "candidate", "state", "answers", "device")
        rows = [_model_row(model) for model in listing.models]
    else:
        columns = ("version", "report", "candidate", "verdict", "together", "created")
        rows = [_version_row(listing, version) for version in listing.versions]
    terminal.console().print(terminal.plain_table(columns, rows))


def _print_model(model: ModelView, as_json: bool) -> None:
    if as_json:
        print(model.model_dump_json())
        return
    serving = model.deployment
    status = f"the model is {serving.state}"
    if serving.version is not None:
        status = f"version {serving.version} answers on {serving.device}"
    print(
        f"model {model.name}: version {model.current.version} ({model.current.label}) is current,"
        f" {status}"
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
    number = str(version.version)
    if version.version == model.current.version:
        number += " (current)"
    verdict = str(version.verdict)
    if version.override:
        verdict += ", taken by override"
    together = f"no: {version.batch.reason}"
    if version.batch.proved:
        together = f"up to {version.batch.maximum}"
    return (number, version.job, version.label, verdict, together, version.created)
