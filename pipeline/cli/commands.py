"""The pipeline's commands. Each is a short script over the pipeline; terminal.py prints the
results.

Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pipeline.api import MAX_WORKERS, read_plan
from pipeline.cli import terminal
from pipeline.cli.options import (
    JsonOption,
    OutOption,
    PlanArgument,
    PluginOption,
    ProfileOption,
    ResultArgument,
    SetOption,
)
from pipeline.core import Engine
from pipeline.errors import PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.formatting import profiles_text
from pipeline.host.environment import usable_cores
from pipeline.plan import schema as config
from pipeline.report import bundle as deliver
from pipeline.results.report import Report, Verdict

app = typer.Typer()


@app.command(name="compile")
def compile_(
    plan: PlanArgument,
    overrides: SetOption,
    profiles: ProfileOption,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a model: try candidates, prove their accuracy, measure them against today's baseline,
    and keep the best.

    Ends with a table, the verdict, the path of the HTML report and, as the last line, one JSON
    document.
    """
    from pipeline.compiler.compile import compile_plan, publish_report

    parsed = _plan(plan, overrides, profiles)
    folder = out or Path("crucible-out") / (parsed.name or "model")
    deliver.check_folder(folder)
    with _runner(as_json, parsed.name) as runner:
        report = compile_plan(parsed, runner, command_line())
        files = publish_report(report, folder)
    if not as_json:
        terminal.print_compiled(terminal.console(), report, files.html_file)
    summary = {
        "verdict": report.verdict,
        "winner": report.winner,
        "ratio": report.ratio.model_dump() if report.ratio else None,
        **({"ratio_missing": report.ratio_missing} if report.ratio is None else {}),
        "reasons": report.reasons,
        "reports": {
            "json": str(files.json_file),
            "markdown": str(files.markdown_file),
            "html": str(files.html_file),
        },
        "engine": str(files.folder / "engine") if report.has_engine else None,
    }
    print(json.dumps(summary))
    raise typer.Exit(exit_code(report.verdict))


def exit_code(verdict: Verdict) -> int:
    """What a compile with this verdict ends with."""
    return 2 if verdict == "rejected" else 0


@app.command()
def validate(result: ResultArgument, overrides: SetOption, as_json: JsonOption = False) -> None:
    """Check a compiled engine again, on the validation set of its plan or on another: --set
    data.validation=NEW.npz.
    """
    from pipeline.compiler.remeasure import validate_again
    from pipeline.report.files import load_report

    engine, compiled = delivered_engine(result), load_report(result)
    with _runner(as_json, compiled.plan.name) as runner:
        report = validate_again(
            compiled, config.override_plan(compiled.plan, overrides), engine, runner
        )
    if not as_json:
        terminal.console().print(
            "\n".join(terminal.validation_lines(report)), highlight=False, soft_wrap=True
        )
    print(report.model_dump_json())
    raise typer.Exit(0 if report.passed else 2)


@app.command()
def bench(
    result: ResultArgument,
    overrides: SetOption,
    batch: Annotated[
        str,
        typer.Option(
            metavar="1,2,4,...",
            help="Measure the engine alone at each batch: throughput against latency.",
        ),
    ] = "",
    limit_ms: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="With --batch: mark the best batch with a latency up to this."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --batch: where sweep.svg and sweep.json go; DIR if left out."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a compiled engine again beside its baseline: --set benchmark.duration_s=10 --set
    'benchmark.sizes=[{batch: 1}]'.

    Prints a summary of every shape with warnings, as trtexec does; with --batch, the throughput of
    each batch instead. Where the compile's host was too busy to tell how fast the engine is, and
    this run can tell, the report in DIR is completed.
    """
    from pipeline.report.files import load_report

    engine, compiled = delivered_engine(result), load_report(result)
    plan = config.override_plan(compiled.plan, overrides)
    if batch:
        _sweep(
            engine,
            compiled,
            plan,
            _batches(batch),
            limit_ms,
            out or (result if result.is_dir() else result.parent),
            as_json,
        )
        return
    if limit_ms is not None or out is not None:
        raise PlanError(
            "--limit-ms and --out belong to a sweep", "name the batches too: --batch 1,2,4,8"
        )
    folder = result if result.is_dir() else result.parent
    _bench(engine, compiled, plan, folder, as_json, completes=not overrides and not compiled.ratio)


def _bench(
    engine: Engine,
    compiled: Report,
    plan: config.Plan,
    folder: Path,
    as_json: bool,
    completes: bool,
) -> None:
    """`completes`: the report lacks a ratio, and figures of the same plan may give it one."""
    from pipeline.compiler.remeasure import benchmark_again, renewed_report
    from pipeline.report.performance_summary import summary_of
    from pipeline.results.report import BenchmarkReport

    with _runner(as_json, plan.name) as runner:
        remeasured = benchmark_again(compiled, plan, engine, runner)
        renewed = (
            renewed_report(compiled, remeasured, runner.steps, command_line())
            if completes
            else None
        )
    found = remeasured.found
    measured = [result for result in found.results if isinstance(result, BenchmarkReport)]
    summaries = [summary_of(measured[-1].label, row, engine.profiles) for row in measured[-1].rows]
    if not as_json:
        console = terminal.console()
        console.print(terminal.benchmark_table(measured))
        terminal.print_limits(
            console, [(report.label, row) for report in measured for row in report.rows]
        )
        for row, summary in zip(measured[-1].rows, summaries, strict=True):
            console.print(terminal.summary_table(summary))
            console.print(
                "\n".join(terminal.summary_notes(summary, row, found)),
                highlight=False,
                soft_wrap=True,
            )
    phases = {"upload", "enqueue", "compute", "download", "latency"}
    engines = [
        report.model_dump(mode="json", exclude={"rows": {"__all__": phases}}) for report in measured
    ]
    use = found.gpu_use.model_dump() if found.gpu_use else None
    if renewed and renewed.ratio:
        _complete(renewed, compiled.verdict, folder, as_json)
    verdict = (
        {"verdict": renewed.verdict, "ratio": renewed.ratio.model_dump()}
        if renewed and renewed.ratio
        else {}
    )
    print(
        json.dumps(
            {
                "engines": engines,
                "summary": [each.model_dump() for each in summaries],
                "gpu_use": use,
                **verdict,
            }
        )
    )


def _complete(renewed: Report, before: Verdict, folder: Path, as_json: bool) -> None:
    """Write a report that has a ratio now, and its engine, in the place of one that had none."""
    from pipeline.compiler.compile import publish_report

    publish_report(renewed, folder)
    if as_json:
        return
    console = terminal.console()
    for line in terminal.verdict_lines(renewed):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"the report in {folder} said {before}, because the host could not tell; it is completed",
        highlight=False,
        soft_wrap=True,
    )


def _sweep(
    engine: Engine,
    compiled: Report,
    plan: config.Plan,
    batches: list[int],
    limit_ms: float | None,
    out: Path,
    as_json: bool,
) -> None:
    from pipeline.benchmark.batch_sweep import conclusion, write_sweep
    from pipeline.compiler.remeasure import sweep_again

    deliver.check_folder(out)
    with _runner(as_json, plan.name) as runner:
        sweep = sweep_again(
            compiled, plan, engine, runner, batches, None if limit_ms is None else limit_ms / 1e3
        )
    _, plot = write_sweep(sweep, out)
    if not as_json:
        console = terminal.console()
        console.print(terminal.sweep_table(sweep))
        console.print(
            f"{conclusion(sweep)}\nplot: {plot}", highlight=False, soft_wrap=True, markup=False
        )
    print(sweep.model_dump_json())


def _batches(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise PlanError(
            f"expected --batch as numbers from 1 on, got '{text}'", "for example --batch 1,2,4,8"
        )
    return [int(part) for part in parts]


@app.command()
def inspect(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL|DIR", help="An ONNX model, or a folder that `crucible compile` wrote."
        ),
    ],
    plugins: PluginOption,
    backend: Annotated[
        str | None, typer.Option(help="List every node that this backend cannot run.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a model or an engine; with --backend, every node that the backend cannot run,
    before any build.
    """
    from pipeline.cli.inspect import (
        engine_lines,
        model_lines,
        plugin_libraries,
        quantised_lines,
        read_model,
        refusals_of,
    )

    plugin_libraries(plugins, backend)  # what is wrong with them is said whatever is inspected
    console = terminal.console()
    if target.is_dir():
        if backend:
            raise PlanError(
                "--backend looks at models, and this is a folder", "give the .onnx file"
            )
        engine = deliver.read_engine(target)
        print(engine.model_dump_json(indent=1)) if as_json else console.print(
            "\n".join(engine_lines(engine)), highlight=False
        )
        return
    if backend is None:
        print(read_model(target).model_dump_json(indent=1)) if as_json else console.print(
            "\n".join(model_lines(target)), highlight=False
        )
        return
    refusals = refusals_of(target, backend, plugins)
    if as_json:
        print(json.dumps([refusal.model_dump() for refusal in refusals]))
    elif refusals:
        console.print(terminal.refusal_table(refusals))
    else:
        console.print(f"{backend} runs every node of this model")
    for line in [] if as_json else quantised_lines(target, backend):
        console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if refusals else 0)


@app.command("onnx")
def write_onnx(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(metavar="OUT.onnx", help="The file to write.")],
    overrides: SetOption,
    profiles: ProfileOption,
    simplify: Annotated[
        bool,
        typer.Option(help="The graph as candidates are made from it, or as the exporter wrote it."),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a plan as ONNX, checked and simplified as `crucible compile` does it: what
    `crucible lint` and other tools take.
    """
    from pipeline.cli.inspect import model_lines
    from pipeline.compiler.compile import export_plan

    parsed = _plan(plan, overrides, profiles)
    deliver.check_model_file(out, parsed.model.path)
    with _runner(as_json, parsed.name) as runner:
        model = export_plan(parsed, runner, simplify)
        deliver.deliver_model(model, out)
    if not as_json:
        console = terminal.console()
        console.print("\n".join(model_lines(out)), highlight=False, soft_wrap=True)
        console.print(
            "\n".join(f"note: {note.text}" for note in model.notes),
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    print(
        json.dumps(
            {"model": str(out), "opset": model.opset, "notes": [note.text for note in model.notes]}
        )
    )


@app.command()
def lint(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX model that holds Q/DQ already.")
    ],
    profiles: ProfileOption,
    overrides: SetOption,
    backend: Annotated[
        str | None,
        typer.Option(help="Only what matters to this backend; needed for --fix and --measure."),
    ] = None,
    fix: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.onnx",
            help="Write the model, mended where that leaves the arithmetic as it is.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Print how much faster mending makes it here.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which Q/DQ pairs of a quantised model keep a backend from running it in 8 bits or cost
    accuracy; --fix mends what it can.
    """
    from pipeline.cli import lint as linting

    found = linting.findings_of(model, backend)
    if as_json:
        print(
            json.dumps(
                {
                    name: [finding.model_dump() for finding in findings]
                    for name, findings in found.items()
                }
            )
        )
    lines = [] if as_json else linting.finding_lines(found)
    if backend is None and (fix or measure):
        raise PlanError(
            "--fix and --measure need to know for which backend",
            "add --backend, for example --backend onnxruntime",
        )
    if backend and (fix or measure):
        plan = _plan(model, overrides, profiles)
        lines += (
            linting.fixed_lines(linting.fix_model(model, fix, backend, plan.profiles))
            if fix
            else []
        )
        if measure:
            with _runner(as_json, plan.name) as runner, tempfile.TemporaryDirectory() as folder:
                lines += linting.gain_lines(
                    linting.measure_fixes(plan, backend, Path(folder), runner), found[backend]
                )
    terminal.console(stderr=as_json).print(
        "\n".join(lines), highlight=False, soft_wrap=True, markup=False
    )


@app.command()
def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure this CPU's peaks first, and keep them: what reports take shares of.",
        ),
    ] = False,
    threads: Annotated[
        int,
        typer.Option(
            min=0, help="With --measure: threads, as in benchmark.threads; 0 = all cores."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Say what this host can build and run, with versions and CPU flags, and what to install for
    the rest.
    """
    from pipeline.benchmark.cpu_peaks import keep_peaks, measure_peaks
    from pipeline.cli.doctor import examine, lines

    if measure:
        with _runner(as_json, "doctor") as runner:
            keep_peaks(
                runner.run(measure_peaks, threads, name="peaks", progress=runner.progress("peaks")),
                threads,
            )
    found = examine(config.home())
    if as_json:
        print(found.model_dump_json())
    else:
        terminal.console().print(
            "\n".join(lines(found)), highlight=False, soft_wrap=True, markup=False
        )


def delivered_engine(folder: Path) -> Engine:
    """The engine of a result, whose files are what they were; or said to be unchecked."""
    engine = deliver.load_engine(folder)
    if not deliver.has_manifest(engine):
        text = "note: this engine has no artifact.json, so nobody can say whether its files changed"
        console = terminal.console(stderr=True)
        console.print(f"{text}: compile the model again to have one", soft_wrap=True)
    return engine


def _plan(path: Path, overrides: list[str], profiles: list[str]) -> config.Plan:
    if profiles:
        overrides = [*overrides, f"profiles={profiles_text(profiles)}"]
    return read_plan(path, overrides)


@contextlib.contextmanager
def _runner(quiet: bool, plan: str) -> Iterator[Runner]:
    console = terminal.console(stderr=True)
    with terminal.StageProgress(console, quiet) as progress:
        store = Store(
            config.home(),
            on_wait=lambda text: (
                None if quiet else console.print(f"[yellow]{escape(text)}", highlight=False)
            ),
        )
        yield Runner(store, progress, plan=plan, workers=min(usable_cores(), MAX_WORKERS))


def command_line() -> str:
    """The command as it was given, for reports."""
    return shlex.join(["crucible", *sys.argv[1:]])
