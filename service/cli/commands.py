"""The service's commands: to serve, to keep keys beside a running server, and to use a server from
elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import terminal
from service.cli import models as model_commands
from service.cli.gc import gc
from service.cli.options import HomeOption, JobArgument, JsonOption, UrlOption, connect
from service.cli.progress import follow

if TYPE_CHECKING:
    from service.client import Client
    from service.http.schemas import JobView
    from service.jobs.state import State
    from service.storage.database import Database

app = typer.Typer()
keys = typer.Typer(
    help=(
        "Make, list and revoke API keys, in the database of a service on this machine; it may run"
        " meanwhile."
    )
)
app.add_typer(keys, name="keys")
app.command()(gc)
app.add_typer(model_commands.app)

WaitOption = Annotated[
    bool, typer.Option("--wait", help="Follow the job to its end, as `crucible wait` does.")
]


@app.command()
def serve(
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 127.0.0.1 if left out. On others, keys are required."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 8000 if left out, any that is free if 0.")
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(help="Where models, jobs and reports are kept; $CRUCIBLE_HOME if left out."),
    ] = None,
) -> None:
    """Serve: take models over HTTP, compile them as jobs, and give reports and engines.
    docs/service.md lists all settings.
    """
    from service.server import serve
    from service.settings import settings_from

    serve(settings_from(os.environ, host=host, port=port, home=home))


# -- keys --------------------------------------------------------------------


@keys.command()
def create(
    name: Annotated[str, typer.Option(help="What the key is for; shown by `crucible keys list`.")],
    scopes: Annotated[
        list[str],
        typer.Option("--scope", help="What it may do: compile, infer or admin. Repeatable."),
    ],
    owner: Annotated[
        str,
        typer.Option(
            help="Keys of one owner share their jobs and reports; the key alone if left out."
        ),
    ] = "",
    home: HomeOption = None,
) -> None:
    """Make a key and print it, this once: the database keeps only its digest."""
    from service.storage.keys import Keys

    key, text = Keys(_database(home)).create(name, scopes, owner)
    told = (
        f"key {key.prefix} ({', '.join(key.scopes)}) of {key.owner}; keep it, it is not shown again"
    )
    terminal.console(stderr=True).print(told, highlight=False, soft_wrap=True, markup=False)
    print(text)


@keys.command(name="list")
def list_keys(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List all keys, by prefix: the keys themselves are not known."""
    import json

    from service.storage.keys import Keys

    found = Keys(_database(home)).list()
    if as_json:
        print(json.dumps([key.model_dump() for key in found]))
        return
    rows = [
        (key.prefix, key.name, key.owner, " ".join(key.scopes), key.created, key.revoked or "")
        for key in found
    ]
    terminal.console().print(
        terminal.plain_table(("prefix", "name", "owner", "scopes", "created", "revoked"), rows)
    )


@keys.command()
def revoke(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="As `crucible keys list` shows it.")
    ],
    home: HomeOption = None,
) -> None:
    """Let a key work no longer, from the next request on."""
    from service.storage.keys import Keys

    key = Keys(_database(home)).revoke(prefix)
    print(f"key {key.prefix} ('{key.name}') is revoked")


def _database(home: Path | None) -> Database:
    from service.settings import settings_from
    from service.storage.database import Database

    return Database(settings_from(os.environ, home=home).database)


# -- jobs on a server --------------------------------------------------------


@app.command()
def submit(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="ONNX; .tar, .tar.gz or .zip of ONNX with external data; or .safetensors weights.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.yaml", help="What to try and to prove; docs/service.md lists its keys."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="NPZ", help="Samples that choose int8 ranges.")
    ] = None,
    selection: Annotated[
        Path | None, typer.Option(metavar="NPZ", help="Samples that choose the winner.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(metavar="NPZ", help="Samples that the winner is proved on.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Compile one of the server's own plans, in the place of a model."),
    ] = None,
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            metavar="DIM=MIN:OPT:MAX",
            help="In the place of a plan: range of a dimension that varies. Repeatable.",
        ),
    ] = None,
    wait: WaitOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a model to a service to be compiled there. An equal request gets the job that is there
    already.

    Ends with one JSON document: the job.
    """
    from pipeline.errors import PlanError
    from pipeline.formatting import profiles_text
    from service.client import Upload

    data = (calibration, selection, validation)
    if (model is None) == (config is None) or (config is not None and any((plan, profiles, *data))):
        raise PlanError(
            "expected a model, with a plan and data if there are any, or --config NAME alone",
            "see `crucible submit --help`",
        )
    if plan and profiles:
        raise PlanError(
            "--profile stands in the place of a plan, and both are given",
            "write `profiles` into the plan",
        )
    with connect(url) as client:
        asked = f"profiles: {profiles_text(profiles)}" if profiles else plan
        job = (
            client.submit(Upload(model, asked, *data))
            if model is not None
            else client.submit_config(config or "")
        )
        _sent(client, job, wait, as_json)


@app.command()
def retry(
    job: JobArgument, wait: WaitOption = False, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Try a job again that failed or was cancelled: a new job, which goes on from what the old one
    stored.

    Ends with one JSON document: the new job.
    """
    from service.client import place_of

    where, job_id = place_of(job, url)
    with connect(where) as client:
        _sent(client, client.retry(job_id), wait, as_json)


def _sent(client: Client, job: JobView, wait: bool, as_json: bool) -> None:
    if wait:
        follow(client, job.id, as_json)
    if not as_json:
        print(
            f"job {job.id} is {job.state}; follow it with `crucible wait"
            f" {client.url}{job.links.job}`"
        )
    print(job.model_dump_json())


@app.command()
def wait(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Follow a job to its end, over restarts of the server. Exit codes as `crucible compile`: 1 if
    it failed or was cancelled.

    Ends with the table of candidates, the verdict and, as the last line, one JSON document: the
    job.
    """
    from service.client import place_of

    where, job_id = place_of(job, url)
    with connect(where) as client:
        follow(client, job_id, as_json)


@app.command()
def cancel(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Cancel a job; all its processes are gone within 5 s."""
    from service.client import place_of

    where, job_id = place_of(job, url)
    with connect(where) as client:
        view = client.cancel(job_id)
    print(view.model_dump_json() if as_json else f"job {view.id} is {view.state}")


@app.command()
def jobs(
    state: Annotated[
        str | None,
        typer.Option(
            help="Only those that are queued, running, cancelling, succeeded, failed or cancelled."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many, the newest.", min=1, max=200)] = 50,
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
def download(
    job: JobArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where reports and engine go; crucible-out/NAME if left out.",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch the engine and the reports of a job that has succeeded, into a folder as `crucible
    compile` leaves it.

    Ends with one JSON document: the folder, and the engine in it, null if the model was rejected.
    """
    import json

    from pipeline.report.bundle import check_folder
    from service.client import place_of

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
            help="What to send: .npy, .npz, .json, .jpg, .png, .webp, or .bin with raw bytes.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Which model; may be left out where one is deployed.")
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", help="Only this output. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Write the outputs there.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Give up after so long; the model's own limit if left out.",
            min=0.001,
        ),
    ] = None,
    url: UrlOption = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the service's whole answer as JSON, and nothing else."),
    ] = False,
) -> None:
    """Ask a deployed model: prints or writes its outputs, and tells where the time went."""
    import numpy as np

    from service.codecs.npy import npz_from_arrays

    body, kind = _body_of(file)
    with connect(url) as client:
        if as_json:
            print(
                client.infer_as("application/json", body, kind, model, outputs or (), timeout).text
            )
            return
        found = client.infer(body, kind, model, outputs or (), timeout)
    rows = [
        (
            name,
            str(array.dtype),
            str(list(array.shape)),
            np.array2string(array, threshold=8, precision=4),
        )
        for name, array in found.outputs.items()
    ]
    terminal.console().print(terminal.plain_table(("output", "dtype", "shape", "values"), rows))
    times = ", ".join(
        f"{name.replace('_', ' ')} {time:.3f} ms" for name, time in found.times_ms.items()
    )
    print(
        f"{found.model} version {found.version} on {found.device}: {times}; batch of"
        f" {found.batch_size}"
    )
    if out is not None:
        out.write_bytes(npz_from_arrays(found.outputs))
        print(f"outputs: {out}")


def _body_of(file: Path) -> tuple[bytes, str]:
    """A file and its Content-Type."""
    from pipeline.errors import PlanError, UserError
    from service.client import KINDS

    if (kind := KINDS.get(file.suffix.lower())) is None:
        raise PlanError(
            f"'{file}': its name does not tell what it holds",
            f"give a file that ends in {', '.join(KINDS)}",
        )
    try:
        return file.read_bytes(), kind
    except OSError as error:
        raise UserError(
            f"cannot read '{file}': {error.strerror}", "check the path and its permissions"
        ) from error


def print_report(target: str, url: str | None, as_json: bool) -> None:
    """`crucible report`, of a job on a service."""
    from rich.markdown import Markdown

    from pipeline.report.markdown import markdown
    from service.client import place_of

    where, job_id = place_of(target, url)
    with connect(where) as client:
        report = client.report(job_id)
    if as_json:
        print(report.model_dump_json())
        return
    terminal.console().print(Markdown(markdown(report)))
    print(f"report: {client.url}/reports/{job_id}")


def _job_row(job: JobView) -> tuple[str, ...]:
    what = (
        f"benchmark of {job.measures.model} {job.measures.version}" if job.measures else "compile"
    )
    return (
        job.id,
        job.name,
        what,
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
    found = next((state for state in known if state == text), None)
    if text is not None and found is None:
        raise PlanError(f"no state '{text}'", f"give one of {', '.join(known)}")
    return found
