"""The pipeline's commands: record, compile, validate, bench, inspect, onnx, lint and doctor.

Each command is a short script over the pipeline; terminal.py prints its results. Progress goes to
stderr, results to stdout.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

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
from pipeline.cli.record import record
from pipeline.cli.stage_progress import StageProgress
from pipeline.cli.trace import check_trace_file
from pipeline.core import Engine, Profile
from pipeline.errors import PlanError
from pipeline.execution.remote_store import open_store
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import bytes_of
from pipeline.formatting import profiles_text
from pipeline.host.environment import usable_cores
from pipeline.plan import files as config
from pipeline.plan.schema import ONNX_SUFFIXES, Plan, TargetConfig
from pipeline.report import bundle as deliver
from pipeline.results.benchmarks import Benchmarks
from pipeline.results.report import Report, ReportFiles, Verdict

if TYPE_CHECKING:
    from pipeline.compiler.remeasure import RaceRecord

FILE_BACKENDS = ("onnxruntime", "openvino", "tensorrt")  # that run an ONNX file as it is
ENGINE_SUFFIXES = (".plan", ".engine", ".trt")
MEASURING_TIME = ("benchmark.budget_s", "benchmark.duration_s")

app = typer.Typer()
# what follows the script's name belongs to the script, with or without `--`
app.command(context_settings={"allow_interspersed_args": False})(record)


@app.command(name="compile")
def compile_(
    plan: PlanArgument,
    overrides: SetOption,
    profiles: ProfileOption,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build, check and measure engines for a model, and keep the best.

    Every candidate (a backend with a precision) is built, checked for accuracy on your data and
    measured side by side with the baseline. The output ends with a table of candidates, the
    verdict, the path of the HTML report and, as the last line, one JSON document.

    A plan with `language_model` compiles a decoder language model, checked on your texts.

    A plan with `targets` is compiled for each one that this host has, in a folder of its name, and
    the output ends with a table of the targets. The exit code is that of the worst.

    Exit codes: 0 accepted, keep or unproven; 2 rejected; 1 error in the plan or on this host.

    Example: crucible compile plan.yaml --set benchmark.duration_s=10
    """
    from pipeline.compiler.compile import compile_plan, publish_report

    if (document := _language_document(plan)) is not None:
        if profiles:
            raise PlanError("--profile is not for language models", "set `context` in the plan")
        _compile_language_model(plan, document, overrides, out, as_json)
    parsed = _plan(plan, overrides, profiles)
    folder = out or Path("crucible-out") / (parsed.name or "model")
    deliver.check_folder(folder)
    if parsed.targets:
        _compile_targets(parsed, folder, as_json)
    with _runner(as_json, parsed.name) as runner:
        report = compile_plan(parsed, runner, command_line())
        files = publish_report(report, folder)
    if not as_json:
        terminal.print_compiled(terminal.console(), report, files.html_file)
    summary: dict[str, object] = {
        "verdict": report.verdict,
        "winner": report.winner,
        "ratio": report.ratio.model_dump() if report.ratio else None,
    }
    if report.ratio is None:
        summary["ratio_missing"] = report.ratio_missing
    summary |= {"reasons": report.reasons, **_written(files, report.has_engine)}
    print(json.dumps(summary))
    raise typer.Exit(exit_code(report.verdict))


def _written(files: ReportFiles, has_engine: bool) -> dict[str, object]:
    """Return where the results of a compile are, for its JSON document."""
    return {
        "reports": {
            "json": str(files.json_file),
            "markdown": str(files.markdown_file),
            "html": str(files.html_file),
        },
        "engine": str(files.folder / "engine") if has_engine else None,
    }


def _language_document(plan: Path) -> dict[str, object] | None:
    """Return the parsed plan of a language model; None for another one."""
    from pipeline.llm.plan import is_language_plan

    if plan.suffix not in (".yaml", ".yml") or not plan.is_file():
        return None
    document = config.read_document(plan)
    return document if isinstance(document, dict) and is_language_plan(document) else None


def _compile_language_model(
    plan: Path, document: dict[str, object], overrides: list[str], out: Path | None, as_json: bool
) -> NoReturn:
    """Compile a language model, print its table, and end with the exit code of the verdict."""
    from pipeline.llm.compile import compile_language_model
    from pipeline.llm.plan import language_plan_from_document
    from pipeline.llm.render import accuracy_table, failures, publish, speed_table

    parsed = language_plan_from_document(document, plan.resolve().parent, plan.stem, overrides)
    folder = out or Path("crucible-out") / (parsed.name or "model")
    deliver.check_folder(folder)
    with _runner(as_json, parsed.name) as runner:
        report = compile_language_model(parsed, runner, command_line())
        files = publish(report, folder)
    if not as_json:
        terminal.print_language_model(
            terminal.console(),
            report,
            (accuracy_table(report), speed_table(report)),
            failures(report),
            str(files.html_file),
        )
    summary = {
        "verdict": report.verdict,
        "winner": report.winner,
        "headline": report.headline,
        "reasons": report.reasons,
        **_written(files, report.has_engine),
    }
    print(json.dumps(summary))
    raise typer.Exit(exit_code(report.verdict))


def _compile_targets(plan: Plan, folder: Path, as_json: bool) -> NoReturn:
    """Compile for each target, print all side by side, and end with the exit code of the worst."""
    from pipeline.compiler.targets import compile_targets
    from pipeline.report.files import TARGETS_HTML
    from pipeline.results import targets

    errors = terminal.console(stderr=True)

    def open_runner(target: TargetConfig) -> contextlib.AbstractContextManager[Runner]:
        deliver.check_folder(folder / target.title)
        if not as_json:
            errors.print(f"target {target.title}", highlight=False)
        return _runner(as_json, plan.name)

    summary = compile_targets(plan, folder, open_runner, command_line())
    if not as_json:
        terminal.console().print(terminal.target_table(summary.targets))
        print(f"report: {folder / TARGETS_HTML}")
    print(summary.model_dump_json())
    outcomes = [target.outcome for target in summary.targets]
    raise typer.Exit(targets.exit_code(targets.worst(outcomes)))


def exit_code(verdict: Verdict) -> int:
    """Return the exit code of a compile with this verdict."""
    return 2 if verdict == "rejected" else 0


@app.command()
def validate(result: ResultArgument, overrides: SetOption, as_json: JsonOption = False) -> None:
    """Check the accuracy of a compiled engine again.

    Uses the validation set of the engine's plan, or another one: --set data.validation=NEW.npz

    Exit codes: 0 passed; 2 failed; 1 error in the plan or on this host.

    Example: crucible validate crucible-out/resnet50
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
    result: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|MODEL.onnx", help="Output folder of `crucible compile`, or an ONNX model."
        ),
    ],
    overrides: SetOption,
    profiles: ProfileOption,
    batch: Annotated[
        str,
        typer.Option(
            metavar="1,2,4,...",
            help="Sweep: measure the engine alone at each of these batch sizes.",
        ),
    ] = "",
    limit_ms: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="With --batch: find the best batch size up to this latency in ms."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --batch: folder for sweep.svg and sweep.json; DIR if left out.",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(help="Of MODEL.onnx: onnxruntime, openvino or tensorrt measures it."),
    ] = FILE_BACKENDS[0],
    against: Annotated[
        Path | None,
        typer.Option(metavar="OTHER.onnx", help="Of MODEL.onnx: the model to compare it with."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Then trace a few runs into this file, for ui.perfetto.dev.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the speed of a compiled engine again, beside its baseline; or that of an ONNX model.

    Prints the times of every shape with warnings, as trtexec does. With --batch, it measures the
    engine alone and prints latency and throughput of each batch size instead.

    If the compile could not measure a ratio because its host was too busy, and this run can, then
    the report in DIR is completed.

    Example: crucible bench crucible-out/resnet50 --set 'benchmark.sizes=[{batch: 1}]'

    A model that somebody else built is measured as it is, with `--profile` for its sizes that vary
    and `--set` for keys of `benchmark`. With --against, the ratio of both has an interval.

    Example: crucible bench crucible-out/resnet50 --batch 1,2,4,8 --limit-ms 20

    Example: crucible bench new.onnx --against old.onnx --profile batch=8 --backend openvino

    With --trace, every engine then runs a few times more, with the recording of its library. That
    costs time, so the figures are without it, and the file says how much.

    Example: crucible bench crucible-out/resnet50 --trace trace.json
    """
    if trace is not None:
        check_trace_file(trace, sweeps=bool(batch))
    if result.suffix in ONNX_SUFFIXES:
        if batch or limit_ms is not None or out is not None:
            raise PlanError(
                "--batch, --limit-ms and --out are for the output folder of a compile",
                "give each size with --profile, for example --profile batch=8",
            )
        if backend not in FILE_BACKENDS:
            raise PlanError(
                f"expected --backend {', '.join(FILE_BACKENDS)}, got '{backend}'",
                "name one of them",
            )
        models = [result] if against is None else [against, result]
        plans = [_plan(model, overrides, profiles) for model in models]
        _bench_files(plans, backend, trace, as_json)
        return
    if result.suffix in ENGINE_SUFFIXES:
        raise PlanError(
            f"expected the output folder of a compile, or an ONNX model, got '{result}', an engine"
            " file of TensorRT",
            "measure the model that it was built from, with --backend tensorrt",
        )
    if backend != FILE_BACKENDS[0] or against is not None or profiles:
        raise PlanError(
            f"--backend, --against and --profile need an ONNX model, got '{result}'",
            "for example crucible bench MODEL.onnx --against OTHER.onnx",
        )
    from pipeline.compiler.remeasure import decides_by_load
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
            "--limit-ms and --out need --batch", "add the batch sizes, for example --batch 1,2,4,8"
        )
    folder = result if result.is_dir() else result.parent
    same_plan = all(override.partition("=")[0] in MEASURING_TIME for override in overrides)
    completes = same_plan and not compiled.ratio and not decides_by_load(compiled)
    _bench(engine, compiled, plan, Bench(folder, completes, trace, as_json))


@dataclass(frozen=True, slots=True)
class Bench:
    """What `crucible bench DIR` does beside measuring."""

    folder: Path  # of the report
    completes: bool  # the report, if it has no ratio
    trace: Path | None
    as_json: bool


def _bench(engine: Engine, compiled: Report, plan: Plan, options: Bench) -> None:
    """Measure the engine beside its baselines, and print the results.

    `completes` is True if the report lacks a ratio and this run may supply it: of the plan only
    the time for measuring has changed.
    """
    from pipeline.compiler.remeasure import benchmark_again, renewed_report

    as_json = options.as_json
    with _runner(as_json, plan.name) as runner:
        remeasured = benchmark_again(compiled, plan, engine, runner)
        renewed = None
        if options.completes:
            renewed = renewed_report(compiled, remeasured, runner.steps, command_line())
    document = _show(remeasured.benchmarks, engine.profiles, as_json)
    if renewed and renewed.ratio:
        _complete(renewed, compiled.verdict, options.folder, as_json)
        document |= {"verdict": renewed.verdict, "ratio": renewed.ratio.model_dump()}
    if options.trace and remeasured.race:
        document |= _trace(remeasured.race, plan.name, options.trace, as_json)
    print(json.dumps(document))


def _bench_files(plans: list[Plan], backend: str, trace: Path | None, as_json: bool) -> None:
    from pipeline.compiler.remeasure import benchmark_files

    with _runner(as_json, plans[-1].name) as runner:
        race = benchmark_files(plans, backend, runner)
    document = _show(race.run, plans[-1].profiles, as_json)
    if trace:
        document |= _trace(race, plans[-1].name, trace, as_json)
    print(json.dumps(document))


def _trace(race: RaceRecord, plan: str, file: Path, as_json: bool) -> dict[str, object]:
    """Trace the engines of a run into a file, print what it holds, and return it as JSON."""
    from pipeline.cli.trace import save_traces, trace_lines, trace_summary
    from pipeline.compiler.remeasure import trace_engines

    with _runner(as_json, plan) as runner:
        found = trace_engines(race, runner)
    save_traces(found, command_line(), file)
    if not as_json:
        for line in trace_lines(found, file):
            terminal.console().print(line, highlight=False, soft_wrap=True, markup=False)
    return {"trace": trace_summary(found, file)}


@app.command()
def advise(
    result: ResultArgument,
    overrides: SetOption,
    rule: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="Try the changes of this rule only. Repeatable.",
            default_factory=list,
            show_default=False,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Find changes that make a compiled engine faster, and measure what each gains.

    Every change is built, checked for accuracy, and measured beside the engine in one run. Changes
    that certainly save more than 2 % end to end are advised, with the interval of their gain. All
    other attempts are listed with the reason.

    Exit codes: 0 all attempts are listed; 1 error in the plan or on this host.

    Example: crucible advise crucible-out/resnet50
    """
    from pipeline.cli.advise import advice_lines
    from pipeline.compiler.advice.again import advise_again
    from pipeline.compiler.advice.rules import check_rules
    from pipeline.report.files import load_report

    check_rules(rule)
    engine, compiled = delivered_engine(result), load_report(result)
    plan = config.override_plan(compiled.plan, overrides)
    with _runner(as_json, plan.name) as runner:
        advice = advise_again(compiled, plan, engine, runner, rule)
    if not as_json:
        text = "\n".join(advice_lines(advice))
        terminal.console().print(text, highlight=False, soft_wrap=True, markup=False)
    print(advice.model_dump_json())


def _show(run: Benchmarks, profiles: tuple[Profile, ...], as_json: bool) -> dict[str, object]:
    """Print a run, whose last engine is the one that was asked for, and return it as JSON."""
    from pipeline.report.performance_summary import summary_of
    from pipeline.results.benchmarks import BenchmarkReport

    measured = [result for result in run.results if isinstance(result, BenchmarkReport)]
    summaries = [summary_of(measured[-1].label, row, profiles) for row in measured[-1].rows]
    if not as_json:
        console = terminal.console()
        console.print(terminal.benchmark_table(measured))
        terminal.print_limits(
            console, [(report.label, row) for report in measured for row in report.rows]
        )
        for row, summary in zip(measured[-1].rows, summaries, strict=True):
            console.print(terminal.summary_table(summary))
            console.print(
                "\n".join(terminal.summary_notes(summary, row, run)),
                highlight=False,
                soft_wrap=True,
            )
    left_out = {"upload", "enqueue", "compute", "download", "latency"}
    if not as_json:
        left_out.add("end_to_end")  # thousands of times
    engines = [
        report.model_dump(mode="json", exclude={"rows": {"__all__": left_out}})
        for report in measured
    ]
    return {
        "engines": engines,
        "summary": [summary.model_dump() for summary in summaries],
        "gpu_use": run.gpu_use.model_dump() if run.gpu_use else None,
    }


def _complete(renewed: Report, before: Verdict, folder: Path, as_json: bool) -> None:
    """Replace a report without a ratio, and its engine, by one that has a ratio now."""
    from pipeline.compiler.compile import publish_report

    publish_report(renewed, folder)
    if as_json:
        return
    console = terminal.console()
    for line in terminal.verdict_lines(renewed):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"the report in {folder} was {before} because its ratio could not be measured; this run"
        " measured the ratio and replaced the report",
        highlight=False,
        soft_wrap=True,
    )


def _sweep(
    engine: Engine,
    compiled: Report,
    plan: Plan,
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
            f"expected --batch as integers of at least 1, separated by commas, got '{text}'",
            "for example --batch 1,2,4,8",
        )
    return [int(part) for part in parts]


@app.command()
def inspect(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL|DIR", help="ONNX model, or output folder of `crucible compile`."
        ),
    ],
    plugins: PluginOption,
    backend: Annotated[
        str | None, typer.Option(help="List the nodes of MODEL that this backend cannot run.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the inputs, outputs and operators of a model or an engine.

    With --backend, list every node that the backend cannot run, before any build.

    Exit codes with --backend: 0 the backend runs every node; 1 it does not.

    Example: crucible inspect model.onnx --backend tensorrt
    """
    from pipeline.cli.inspect import (
        engine_lines,
        model_lines,
        plugin_libraries,
        quantised_lines,
        read_model,
        refusals_of,
    )

    plugin_libraries(plugins, backend)  # check the options before any work
    console = terminal.console()
    if target.is_dir():
        if backend:
            raise PlanError(
                f"--backend needs an ONNX model, and '{target}' is a folder", "give the .onnx file"
            )
        engine = deliver.read_engine(target)
        if as_json:
            print(engine.model_dump_json(indent=1))
        else:
            console.print("\n".join(engine_lines(engine)), highlight=False)
        return
    if backend is None:
        if as_json:
            print(read_model(target).model_dump_json(indent=1))
        else:
            console.print("\n".join(model_lines(target)), highlight=False)
        return
    refusals = refusals_of(target, backend, plugins)
    if as_json:
        print(json.dumps([refusal.model_dump() for refusal in refusals]))
    elif refusals:
        console.print(terminal.refusal_table(refusals))
    else:
        console.print(f"{backend} runs every node of this model")
    if not as_json:
        for line in quantised_lines(target, backend):
            console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if refusals else 0)


@app.command("onnx")
def write_onnx(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(metavar="OUT.onnx", help="File to write.")],
    overrides: SetOption,
    profiles: ProfileOption,
    simplify: Annotated[
        bool,
        typer.Option(help="Write the simplified graph, or the graph as it was exported."),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Export the model of a plan to an ONNX file.

    The model is exported, checked and simplified like in `crucible compile`. Use the file with
    `crucible lint`, `crucible inspect` and other tools.

    Example: crucible onnx plan.yaml --out model.onnx
    """
    from pipeline.cli.inspect import model_lines
    from pipeline.compiler.graph import export_plan

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
        Path,
        typer.Argument(
            metavar="MODEL.onnx", help="ONNX model with QuantizeLinear and DequantizeLinear nodes."
        ),
    ],
    profiles: ProfileOption,
    overrides: SetOption,
    backend: Annotated[
        str | None,
        typer.Option(help="Apply only the rules of this backend. Needed for --fix and --measure."),
    ] = None,
    fix: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.onnx",
            help="Write a fixed model: only fixes that do not change its arithmetic.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the speedup of each fix on this host.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the Q/DQ nodes that slow down a quantised model or cost accuracy.

    Each finding names a rule, the nodes, and why the backend does not run them in 8 bits or loses
    accuracy there. --fix writes a model with every fix that does not change the arithmetic.

    Example: crucible lint model.onnx --backend onnxruntime --fix fixed.onnx --measure
    """
    from pipeline.cli import lint as linting

    findings = linting.findings_of(model, backend)
    lines = []
    if as_json:
        document = {
            name: [finding.model_dump() for finding in of_backend]
            for name, of_backend in findings.items()
        }
        print(json.dumps(document))
    else:
        lines += linting.finding_lines(findings)
    if backend is None and (fix or measure):
        raise PlanError(
            "--fix and --measure need --backend", "add it, for example --backend onnxruntime"
        )
    if backend and (fix or measure):
        plan = _plan(model, overrides, profiles)
        if fix:
            lines += linting.fixed_lines(linting.fix_model(model, fix, backend, plan.profiles))
        if measure:
            with _runner(as_json, plan.name) as runner, tempfile.TemporaryDirectory() as folder:
                gains = linting.measure_fixes(plan, backend, Path(folder), runner)
            lines += linting.gain_lines(gains, findings[backend])
    terminal.console(stderr=as_json).print(
        "\n".join(lines), highlight=False, soft_wrap=True, markup=False
    )


sandbox_lines: Callable[[], tuple[str, ...]] = tuple
"""What the service's sandbox holds on this host; the service sets it."""


@app.command()
def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure this CPU's peak FLOP/s and bytes/s first, and store them for reports.",
        ),
    ] = False,
    threads: Annotated[
        int,
        typer.Option(
            min=0, help="With --measure: number of threads, as in benchmark.threads; 0: all cores."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what this host can build and run, and what to install for the rest.

    Lists the CPU with its flags, the GPUs, the versions of the backends, the precisions that each
    backend builds, what the service's sandbox stops, and problems of this installation with their
    remedies.

    Example: crucible doctor --measure
    """
    from pipeline.benchmark.cpu_peaks import measure_peaks, save_peaks
    from pipeline.cli.doctor import examine, lines

    if measure:
        with _runner(as_json, "doctor") as runner:
            progress = runner.progress("peaks")
            save_peaks(runner.run(measure_peaks, threads, name="peaks", progress=progress), threads)
    examination = examine(config.home()).model_copy(update={"sandbox": sandbox_lines()})
    if as_json:
        print(examination.model_dump_json())
    else:
        terminal.console().print(
            "\n".join(lines(examination)), highlight=False, soft_wrap=True, markup=False
        )


@app.command()
def store(as_json: JsonOption = False) -> None:
    """Show the sizes of the local store and, if CRUCIBLE_STORE is set, of the shared one.

    Example: CRUCIBLE_STORE=s3://bucket/prefix crucible store
    """
    opened = open_store()
    folders = [folder for folder, _ in opened.artifacts()]
    sizes = [("local", str(opened.root), len(folders), sum(map(bytes_of, folders)))]
    if opened.remote:
        sizes.append(("remote", opened.remote.url, *opened.remote.size()))
    if as_json:
        names = ("place", "address", "artifacts", "bytes")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in sizes]))
        return
    for place, address, count, size in sizes:
        print(f"{place}: {count} artifacts, {size / 2**20:.1f} MiB, {address}")


def delivered_engine(folder: Path) -> Engine:
    """Load the engine of an output folder, and verify its files.

    Print a note if the engine has no manifest to verify them against.
    """
    engine = deliver.load_engine(folder)
    if not deliver.has_manifest(engine):
        text = "note: this engine has no artifact.json, so changes of its files cannot be detected"
        console = terminal.console(stderr=True)
        console.print(f"{text}: compile the model again to have one", soft_wrap=True)
    return engine


def _plan(path: Path, overrides: list[str], profiles: list[str]) -> Plan:
    if profiles:
        overrides = [*overrides, f"profiles={profiles_text(profiles)}"]
    return read_plan(path, overrides)


@contextlib.contextmanager
def _runner(quiet: bool, plan: str) -> Iterator[Runner]:
    console = terminal.console(stderr=True)
    with StageProgress(console, quiet) as progress:
        store = open_store(
            on_wait=lambda text: (
                None if quiet else console.print(f"[yellow]{escape(text)}", highlight=False)
            ),
        )
        yield Runner(store, progress, plan=plan, workers=min(usable_cores(), MAX_WORKERS))


def command_line() -> str:
    """Return the command line of this process, for reports."""
    return shlex.join(["crucible", *sys.argv[1:]])
