"""The `crucible` command: the pipeline's commands, the service's, and those that read the results
of both.

Exit codes: 0 accepted, keep or unproven, 2 rejected, 1 user or environment error, 3 our bug, 130
Ctrl-C.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape
from typer.exceptions import TyperException

from pipeline import distribution
from pipeline.cli import terminal
from pipeline.cli.app import app as pipeline_app
from pipeline.cli.browser import open_page
from pipeline.cli.commands import host
from pipeline.cli.inputs import delivered_engine
from pipeline.cli.options import JsonOption
from pipeline.cli.running import command_line
from pipeline.errors import CrucibleError, PlanError
from pipeline.execution.exit_causes import crucible_error
from pipeline.plan import files as config
from service.cli import commands as service_commands
from service.cli.options import UrlOption

INTERRUPTED = 130  # 128 + SIGINT, as in shells

app = typer.Typer(
    name="crucible",
    help="The fastest engine that still gives the right answers on your data, with the evidence.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
results = typer.Typer()
app.add_typer(pipeline_app)
app.add_typer(results)
app.add_typer(service_commands.app)


def _sandbox_lines() -> tuple[str, ...]:
    """Try the sandbox on a home of its own."""
    from service.sandbox.layers import Sandbox
    from service.sandbox.proof import prove
    from service.storage.database import Database

    with tempfile.TemporaryDirectory(prefix="crucible-doctor-") as folder:
        home = Path(folder)
        Database(home / "crucible.db").close()
        sandbox = Sandbox(home)
        sandbox.find()
        return prove(sandbox, home / "crucible.db").lines


host.sandbox_lines = _sandbox_lines


def _print_version(requested: bool) -> None:
    if requested:
        print(distribution.version_line())
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
]


@app.callback()
def options(version: VersionOption = False) -> None:
    """Accept the options that belong to no command."""


@results.command()
def report(
    result: Annotated[
        str,
        typer.Argument(
            metavar="DIR|JOB",
            help="A folder from `crucible compile`, or a job of a service, by id or address.",
        ),
    ],
    url: UrlOption = None,
    show: Annotated[
        bool, typer.Option("--open", help="Open the HTML form of a folder's report in a browser.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the report of a compile. For a folder, also write the Markdown and HTML forms again
    from report.json.
    """
    from rich.markdown import Markdown

    from pipeline.llm.render import any_markdown, write_language_report
    from pipeline.llm.results import load_any_report
    from pipeline.report.files import write_report
    from pipeline.results.report import Report
    from service.client.address import is_remote

    folder = Path(result)
    if not folder.exists() and is_remote(result):
        if show:
            raise PlanError(
                f"--open needs a folder with a report, got the job '{result}'",
                f"download it first: crucible download {result}",
            )
        service_commands.print_report(result, url, as_json)
        return
    loaded = load_any_report(folder)
    place = folder if folder.is_dir() else folder.parent
    if isinstance(loaded, Report):
        files = write_report(loaded, place)
    else:
        files = write_language_report(loaded, place)
    if as_json:
        print(loaded.model_dump_json())
    else:
        console = terminal.console()
        console.print(Markdown(any_markdown(loaded)))
        terminal.print_text(console, f"report: {files.html_file}", markup=False)
    if show:
        open_page(files.html_file)


@results.command()
def export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Triton's model repository. Its other models stay."),
    ],
    triton_name: Annotated[
        str,
        typer.Option(
            "--triton", metavar="NAME/VERSION", help="Name and version of the model in Triton."
        ),
    ],
    result: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RESULT",
            help="A folder from `crucible compile`. Default: the promoted version.",
        ),
    ] = None,
) -> None:
    """Write an engine as a model of Triton Inference Server: model.plan or model.onnx, and
    config.pbtxt.

    The engine is version VERSION of the model NAME that was promoted in the home ($CRUCIBLE_HOME)
    of a service, or the one in the folder of --from. The service may run meanwhile. The engine runs
    here once, to prove which requests may share a batch.
    """
    from pipeline.benchmark.batch_invariance import prove_batch
    from pipeline.execution.child_process import call_in_child
    from pipeline.report import triton
    from service.registry.repository import promoted_engine

    model = triton.parse_name(triton_name)
    home = config.home()
    engine = (
        delivered_engine(result) if result else promoted_engine(home, model.name, model.version)
    )
    triton.check_target(engine, model, folder)  # before an engine is loaded
    batch = call_in_child(prove_batch, engine, (), name="batch proof")  # Triton pads nothing
    print(triton.export_triton(engine, batch, model, folder))
    terminal.print_text(
        terminal.console(stderr=True), "\n".join(triton.remarks(engine, batch)), markup=False
    )


def _command_of(error: TyperException) -> str:
    """The command whose arguments are wrong, such as `crucible keys create`."""
    names, context = list[str](), getattr(error, "ctx", None)
    while context and context.parent:
        names.insert(0, context.info_name)
        context = context.parent
    return " ".join(["crucible", *names])


def main() -> NoReturn:
    """Entry point of the `crucible` command."""
    # exit in order, so that children are stopped and folders removed
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except CrucibleError as error:
        code = _fail(error)
    except typer.Exit as finished:
        code = finished.exit_code
    except TyperException as error:
        code = _fail(PlanError(error.format_message(), f"see `{_command_of(error)} --help`"))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # the reader has closed the pipe: discard the rest of the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except Exception as error:  # noqa: BLE001  edge of the process
        code = _fail(crucible_error(error))
    if code == INTERRUPTED:  # typer turns Ctrl-C into this exit code by itself
        print(
            "interrupted; finished artifacts are kept, run the same command to continue",
            file=sys.stderr,
        )
    sys.exit(code or 0)


def _fail(error: CrucibleError) -> int:
    console = terminal.console(stderr=True)
    terminal.print_text(console, f"[bold red]error[/] [dim]{error.code}[/] {escape(error.message)}")
    if error.next_step:
        terminal.print_text(console, f"[bold]next[/] {escape(error.next_step)}")
    if error.exit_code == 3:
        terminal.print_text(
            console, f"This is a bug in Crucible. Please report it with {_write_log(error)}"
        )
    return error.exit_code


def _write_log(error: CrucibleError) -> str:
    folder = config.home() / "logs"
    file = folder / f"bug-{dt.datetime.now(dt.UTC):%Y%m%d-%H%M%S}.log"
    text = "".join(
        [
            f"{command_line()}\n{platform.platform()} Python {platform.python_version()}\n",
            *traceback.format_exception(error),
        ]
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError:
        return f"this text:\n{text}"
    return str(file)
