"""The service's commands: run a server, manage its keys, and use a server from another machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import terminal
from service.cli import models as model_commands
from service.cli import node, proxy, ray
from service.cli.audit import audit
from service.cli.gc import gc
from service.cli.options import (
    HomeOption,
    JobArgument,
    JsonOption,
    UrlOption,
    WaitOption,
    connect,
    operator,
)
from service.cli.progress import follow, print_compile, print_job
from service.cli.upload_home import upload_home

if TYPE_CHECKING:
    from service.http.schemas import JobView
    from service.jobs.state import State
    from service.storage.database import Database

app = typer.Typer()
keys = typer.Typer(
    help=(
        "Create, list and revoke API keys in the database of a service on this machine, even while"
        " it runs."
    )
)
app.add_typer(keys, name="keys")
app.add_typer(proxy.app, name="proxy")
app.add_typer(node.app, name="node")
app.add_typer(ray.app, name="ray")
app.command()(gc)
app.command()(upload_home)
app.command()(audit)
app.add_typer(model_commands.app)


@app.command()
def serve(
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on. Default: 127.0.0.1. Other addresses require API keys."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on. Default: 8000. 0: any free port.")
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(help="Folder for models, jobs and reports. Default: $CRUCIBLE_HOME."),
    ] = None,
    shared_memory: Annotated[
        bool | None,
        typer.Option(
            "--shared-memory", help="Let clients on this host pass tensors in shared memory."
        ),
    ] = None,
) -> None:
    """Run the service: it takes models over HTTP, compiles them as jobs, and returns reports and
    engines. docs/reference/settings.md lists all settings.
    """
    from service.server import serve
    from service.settings import settings_from

    settings = settings_from(
        os.environ, host=host, port=port, home=home, shared_memory=shared_memory
    )
    serve(settings)


# -- keys --------------------------------------------------------------------


@keys.command()
def create(
    name: Annotated[str, typer.Option(help="Purpose of the key, shown by `crucible keys list`.")],
    scopes: Annotated[
        list[str],
        typer.Option("--scope", help="Permission: compile, infer, metrics or admin. Repeatable."),
    ],
    owner: Annotated[
        str,
        typer.Option(
            help="Owner of the jobs and reports; keys may share one. Default: the key itself."
        ),
    ] = "",
    home: HomeOption = None,
) -> None:
    """Create a key and print it once: the database stores only its digest."""
    from service.storage.keys import Keys

    key, text = Keys(_database(home)).create(name, scopes, owner, operator())
    scopes_text = ", ".join(key.scopes)
    message = f"key {key.prefix} ({scopes_text}) of {key.owner}; keep it, it is not shown again"
    terminal.console(stderr=True).print(message, highlight=False, soft_wrap=True, markup=False)
    print(text)


@keys.command(name="list")
def list_keys(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List all keys by prefix. Their secrets are not stored."""
    import json

    from service.storage.keys import Keys

    stored = Keys(_database(home)).list()
    if as_json:
        print(json.dumps([key.model_dump() for key in stored]))
        return
    rows = [
        (key.prefix, key.name, key.owner, " ".join(key.scopes), key.created, key.revoked or "")
        for key in stored
    ]
    terminal.console().print(
        terminal.plain_table(("prefix", "name", "owner", "scopes", "created", "revoked"), rows)
    )


@keys.command()
def revoke(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Prefix of the key, from `crucible keys list`.")
    ],
    home: HomeOption = None,
) -> None:
    """Revoke a key. It is refused from the next request on."""
    from service.storage.keys import Keys

    key = Keys(_database(home)).revoke(prefix, operator())
    print(f"key {key.prefix} ('{key.name}') is revoked")


def _database(home: Path | None) -> Database:
    from service import logs
    from service.settings import settings_from
    from service.storage.database import database_from

    settings = settings_from(os.environ, home=home)
    # the lines of the audit are for the log of a server; a command has its own output
    logs.configure(settings.model_copy(update={"log_level": "error"}))
    return database_from(settings)


# -- jobs on a server --------------------------------------------------------


@app.command()
def submit(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help=(
                "ONNX; .tar, .tar.gz or .zip of ONNX with external data; or .safetensors weights."
                " Of a language model: its plan, .gguf, or a folder of Hugging Face."
            ),
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.yaml",
            help="Candidates and limits; docs/reference/plan.md lists the keys.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Samples for the int8 ranges: .npz, or .jsonl of texts."),
    ] = None,
    selection: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Samples for the choice of the winner: .npz, or .jsonl of texts."
        ),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Samples for the final check of the winner: .npz, or .jsonl of texts.",
        ),
    ] = None,
    selection_labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Labels of the selection samples: .json of boxes, or .jsonl."
        ),
    ] = None,
    validation_labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Labels of the validation samples: .json of boxes, or .jsonl."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="tokenizer.json of an encoder, with `serving.text` in the plan."
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Compile one of the server's own plans instead of a model."),
    ] = None,
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            metavar="DIM=MIN:OPT:MAX",
            help="Range of a dynamic dimension, instead of a plan. Repeatable.",
        ),
    ] = None,
    wait: WaitOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a model to a service to compile it there. An equal request gets the existing job. A plan
    with `targets` gets a job for each.

    Ends with one JSON document: the job, or the compile with the jobs of all targets.
    """
    from pipeline.errors import PlanError
    from pipeline.formatting import profiles_text
    from service.cli.language import upload_of_plan
    from service.client import Upload
    from service.http.schemas import JobView

    data = (calibration, selection, validation, selection_labels, validation_labels, tokenizer)
    extras = any((plan, profiles, *data))
    if (model is None) == (config is None) or (config is not None and extras):
        raise PlanError(
            "expected a model with optional plan and data, or --config NAME alone",
            "see `crucible submit --help`",
        )
    upload = None
    if model is not None and model.suffix in (".yaml", ".yml"):
        upload = upload_of_plan(model, is_alone=not extras)
    if plan and profiles:
        raise PlanError(
            "expected --profile or a plan, got both",
            "write `profiles` into the plan",
        )
    with connect(url) as client:
        if upload is not None:
            added = client.compile(upload)
        elif model is not None:
            source = f"profiles: {profiles_text(profiles)}" if profiles else plan
            added = client.compile(Upload(model, source, *data))
        else:
            added = client.submit_config(config or "")
        if isinstance(added, JobView):
            print_job(client, added, wait, as_json)
        else:
            print_compile(client, added, wait, as_json)


@app.command()
def retry(
    job: JobArgument, wait: WaitOption = False, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Retry a job that failed or was cancelled. The new job continues from the artifacts of the old
    one.

    Ends with one JSON document: the new job.
    """
    from service.client.address import place_of

    where, job_id = place_of(job, url)
    with connect(where) as client:
        print_job(client, client.retry(job_id), wait, as_json)


@app.command()
def wait(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Follow a job to its end, over restarts of the server. Exit codes as `crucible compile`: 1 if
    it failed or was cancelled.

    Ends with the table of candidates, the verdict and, as the last line, one JSON document: the
    job.
    """
    from service.client.address import place_of

    where, job_id = place_of(job, url)
    with connect(where) as client:
        follow(client, job_id, as_json)


@app.command()
def cancel(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Cancel a job. All its processes end within 5 s."""
    from service.client.address import place_of

    where, job_id = place_of(job, url)
    with connect(where) as client:
        view = client.cancel(job_id)
    print(view.model_dump_json() if as_json else f"job {view.id} is {view.state}")


@app.command()
def jobs(
    state: Annotated[
        str | None,
        typer.Option(
            help="Only this state: queued, running, cancelling, succeeded, failed or cancelled."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of jobs.", min=1, max=200)] = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the jobs on a service, newest first."""
    with connect(url) as client:
        page = client.jobs(_state(state), limit)
    if as_json:
        print(page.model_dump_json())
        return
    terminal.console().print(
        terminal.plain_table(
            ("job", "name", "what", "state", "stage", "verdict", "winner"), map(_job_row, page.jobs)
        )
    )


@app.command()
def limits(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the limits of your key and its owner on a service, and what is used of them."""
    with connect(url) as client:
        view = client.limits()
    if as_json:
        print(view.model_dump_json())
        return
    rows = [
        (
            limit.setting,
            limit.meaning,
            limit.per,
            f"{limit.used:,}",
            "none" if limit.limit is None else f"{limit.limit:,}",
        )
        for limit in view.limits
    ]
    terminal.console().print(
        terminal.plain_table(("setting", "meaning", "per", "used", "limit"), rows)
    )


@app.command()
def download(
    job: JobArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for the reports and the engine. Default: crucible-out/NAME.",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Download the engine and the reports of a job that has succeeded, into a folder as `crucible
    compile` writes it.

    Ends with one JSON document: the folder and its engine; the engine is null if the model was
    rejected.
    """
    import json

    from pipeline.report.bundle import check_folder
    from service.client.address import place_of

    where, job_id = place_of(job, url)
    with connect(where) as client:
        folder = out or Path("crucible-out") / (Path(client.job(job_id).name).name or "model")
        check_folder(folder)
        client.download(job_id, folder)
    engine = folder / "engine"
    if not as_json:
        print(f"report: {folder / 'report.html'}")
    print(json.dumps({"folder": str(folder), "engine": str(engine) if engine.is_dir() else None}))


@app.command()
def infer(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Input: .npy, .npz, .json, .jpg, .png, .webp, or .bin with raw bytes.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Name of the model. Default: the only deployed one.")
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", help="Return only this output. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Write the outputs to this file.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time limit. Default: the model's own limit.",
            min=0.001,
        ),
    ] = None,
    url: UrlOption = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print only the service's answer as JSON."),
    ] = False,
) -> None:
    """Run inference on a deployed model: print or write its outputs, and print the timing."""
    import numpy as np

    from service.codecs.npy import npz_from_arrays

    body, kind = _body_of(file)
    with connect(url) as client:
        if as_json:
            print(
                client.infer_as("application/json", body, kind, model, outputs or (), timeout).text
            )
            return
        inference = client.infer(body, kind, model, outputs or (), timeout)
    rows = [
        (
            name,
            str(array.dtype),
            str(list(array.shape)),
            np.array2string(array, threshold=8, precision=4),
        )
        for name, array in inference.outputs.items()
    ]
    terminal.console().print(terminal.plain_table(("output", "dtype", "shape", "values"), rows))
    times = ", ".join(
        f"{name.replace('_', ' ')} {time:.3f} ms" for name, time in inference.times_ms.items()
    )
    print(
        f"{inference.model} version {inference.version} on {inference.device}: {times}; batch of"
        f" {inference.batch_size}"
    )
    if out is not None:
        out.write_bytes(npz_from_arrays(inference.outputs))
        print(f"outputs: {out}")


def _body_of(file: Path) -> tuple[bytes, str]:
    """Read a file and derive its Content-Type."""
    from pipeline.errors import PlanError, UserError
    from service.client.client import KINDS

    kind = KINDS.get(file.suffix.lower())
    if kind is None:
        raise PlanError(
            f"'{file}': unknown file suffix", f"give a file that ends in {', '.join(KINDS)}"
        )
    try:
        return file.read_bytes(), kind
    except OSError as error:
        raise UserError(
            f"cannot read '{file}': {error.strerror}", "check the path and its permissions"
        ) from error


def print_report(target: str, url: str | None, as_json: bool) -> None:
    """Run `crucible report` for a job on a service."""
    from rich.markdown import Markdown

    from pipeline.llm.render import any_markdown
    from service.client.address import place_of

    where, job_id = place_of(target, url)
    with connect(where) as client:
        report = client.any_report(job_id)
    if as_json:
        print(report.model_dump_json())
        return
    terminal.console().print(Markdown(any_markdown(report)))
    print(f"report: {client.url}/reports/{job_id}")


def _job_row(job: JobView) -> tuple[str, ...]:
    kind = "compile"
    if job.measures:
        kind = f"benchmark of {job.measures.model} {job.measures.version}"
    if job.recompiles:
        kind = f"recompile of {job.recompiles.model} {job.recompiles.version}"
    return (
        job.id,
        job.name,
        kind,
        job.state,
        job.progress.stage if job.progress else "",
        job.verdict or "",
        job.winner or "",
    )


def _state(text: str | None) -> State | None:
    from typing import get_args

    from pipeline.errors import PlanError
    from service.jobs.state import State

    known: tuple[State, ...] = get_args(State)
    match = next((state for state in known if state == text), None)
    if text is not None and match is None:
        raise PlanError(f"no state '{text}'", f"give one of {', '.join(known)}")
    return match
