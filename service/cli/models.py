"""Commands for the models on a server: promote, load, measure and recompile them."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli import terminal
from pipeline.formatting import date, shape_text
from service.cli.options import JsonOption, UrlOption, WaitOption, connect
from service.cli.progress import follow, print_job, promote_text
from service.registry.models import (
    DeploymentOptions,
    ModelPage,
    ModelView,
    Version,
    devices_from_text,
)
from service.registry.traffic import MAX_SHAPES, ShapesView, Suggestion, profile_text

DEFAULTS = DeploymentOptions()
MOST_ROWS = 20  # of a table of shapes

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
    from service.client.address import place_of

    where, job_id = place_of(report, url)
    with connect(where) as client:
        print_model(client.promote(name, job_id, override), as_json)


@app.command()
def rollback(name: ModelArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Make the previous version of a model current again."""
    with connect(url) as client:
        print_model(client.rollback(name), as_json)


@app.command()
def load(
    name: ModelArgument,
    version: Annotated[
        int | None,
        typer.Option(help="Keep this version. Default: the current one, even after promotions."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, gpu:0, ..., several as gpu:0,gpu:1, or all: every GPU of the kind that the"
            " engine was built for. Default: the first device that the engine runs on."
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            help="Batches that run at the same time on each device: on a GPU in one process, else"
            " in a process each. Default: as the compile found it best, else 1."
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
    answer_timeout_s: Annotated[
        float, typer.Option(help="Time limit of a whole answer of a language model.")
    ] = DEFAULTS.answer_timeout_s,
    drain_s: Annotated[
        float,
        typer.Option(
            help="Longest time for which a version that is replaced or unloaded finishes its"
            " requests."
        ),
    ] = DEFAULTS.drain_s,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            help="Language models: tokens of all answers together in the cache of keys and values."
            " Default: as the largest batch needs, or fewer if they do not fit."
        ),
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(help="Language models: read the same beginning of a prompt only once."),
    ] = DEFAULTS.prefix_caching,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a model on a service, or change how it is served. It answers requests when this ends."""
    from pydantic import ValidationError

    from pipeline.errors import PlanError
    from pipeline.plan.files import explain

    try:
        options = DeploymentOptions(
            version=version,
            device=None if device is None else devices_from_text(device),
            instances=instances,
            max_batch=max_batch,
            max_delay_s=max_delay_ms / 1e3,
            queue_limit=queue_limit,
            timeout_s=timeout_s,
            answer_timeout_s=answer_timeout_s,
            drain_s=drain_s,
            cache_tokens=cache_tokens,
            prefix_caching=prefix_caching,
        )
    except ValidationError as error:
        raise PlanError(explain(error, DeploymentOptions), "see `crucible load --help`") from error
    with connect(url) as client:
        print_model(client.load(name, options), as_json)


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
def shapes(name: ModelArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the shapes that a loaded model has run, what padding cost, and the profiles that they
    suggest. The counts begin when the model is loaded.
    """
    with connect(url) as client:
        view = client.shapes(name)
    if as_json:
        print(view.model_dump_json())
    else:
        _print_shapes(name, view)


@app.command()
def recompile(
    name: ModelArgument,
    from_traffic: Annotated[
        bool,
        typer.Option(
            "--from-traffic",
            help="Take the profiles from the shapes that the loaded version has run.",
        ),
    ] = False,
    same_plan: Annotated[
        bool,
        typer.Option(
            "--same-plan",
            help="Keep the plan: for libraries or a driver that have changed since.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the new profiles, and compile nothing.")
    ] = False,
    wait: WaitOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a model again on the service, from the model, plan and data of the job that built it.
    `crucible promote` makes the result the next version.

    Ends with one JSON document: the job. With --dry-run and --json: the profiles.
    """
    from pipeline.errors import PlanError

    if from_traffic == same_plan:
        raise PlanError(
            "expected --from-traffic or --same-plan, which say what profiles the engine gets",
            "`crucible submit` compiles a model with profiles of your own",
        )
    with connect(url) as client:
        result = client.recompile(name, dry_run, profiles="same" if same_plan else "traffic")
        if not as_json:
            print(f"version {result.version} of '{name}', built by job {result.built_by}")
            if result.suggestion is not None:
                _print_suggestion(result.suggestion)
        if result.job is not None:
            if not (wait or as_json):
                print(f"when it has succeeded, {promote_text(name, result.job)}")
            print_job(client, result.job, wait, as_json)
        elif as_json:
            print(result.model_dump_json())


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


def _print_shapes(name: str, view: ShapesView) -> None:
    """Print the most frequent shapes as tables, and the suggested profiles."""
    requests = sum(seen.requests for seen in view.shapes) + view.other_requests
    runs = sum(batch.runs for batch in view.batches) + view.other_runs
    request_rows = [
        (shape_text(seen.sizes), str(seen.requests), f"{seen.requests / requests:.1%}")
        for seen in view.shapes[:MOST_ROWS]
    ]
    batch_rows = [
        (
            shape_text(batch.sizes),
            str(batch.runs),
            f"{batch.runs / runs:.1%}",
            str(batch.requests),
            f"{batch.padding:.1%}",
        )
        for batch in view.batches[:MOST_ROWS]
    ]
    console = terminal.console()
    console.print(terminal.plain_table(("request", "requests", "share"), request_rows))
    console.print(
        terminal.plain_table(("batch", "runs", "share", "requests", "padding"), batch_rows)
    )
    print(
        f"version {view.version} of '{name}' since {date(view.since)}: requests: {requests}, runs:"
        f" {runs}, padding: {view.padding:.1%} of the input values; with each batch at the largest"
        f" length: {view.padding_at_max:.1%}"
    )
    if len(view.shapes) > MOST_ROWS or len(view.batches) > MOST_ROWS:
        print(f"the tables show the {MOST_ROWS} most frequent shapes, --json shows more")
    if view.other_requests or view.other_runs:
        print(
            f"{view.other_requests} requests and {view.other_runs} runs had other shapes, after the"
            f" first {MAX_SHAPES}"
        )
    if view.suggestion is not None:
        _print_suggestion(view.suggestion)


def _print_suggestion(suggestion: Suggestion) -> None:
    for title, profiles, distance in (
        ("profiles now", suggestion.current, suggestion.current_distance),
        ("from traffic", suggestion.profiles, suggestion.distance),
    ):
        texts = ", ".join(map(profile_text, profiles))
        print(f"{title}: {texts}; a run is {distance:.2f} doublings from opt on average")
    print(f"to be measured at: {'; '.join(map(shape_text, suggestion.sizes))}")


def print_model(model: ModelView, as_json: bool) -> None:
    """Print what a model serves, and the devices on which it does not."""
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
    for server in model.servers if len(model.servers) > 1 else ():
        version = "no version" if server.version is None else f"version {server.version}"
        reason = f": {server.reason}" if server.reason else ""
        print(f"server {server.server} on {server.host}: {server.state}, {version}{reason}")
    for device in serving.devices:
        if device.state != serving.state:
            print(f"{device.device} is {device.state}: {device.reason}")
    if serving.note:
        print(serving.note)
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
    if version.language is not None:
        together = "answers"
    elif version.batch.proved:
        together = f"up to {version.batch.maximum}"
    return (number, version.job, version.label, verdict, together, version.created)
