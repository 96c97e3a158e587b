"""`crucible bench`: measure a compiled engine again, alone at several sizes, or ONNX files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import language, terminal
from pipeline.cli.inputs import delivered_engine, plan_from_options
from pipeline.cli.options import JsonOption, ProfileOption, SetOption
from pipeline.cli.running import command_line, open_runner
from pipeline.cli.trace import check_trace_file
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import Profile
from pipeline.errors import PlanError
from pipeline.plan import files as config
from pipeline.plan.schema import ONNX_SUFFIXES, Plan
from pipeline.report import bundle as deliver
from pipeline.results.benchmarks import Benchmarks
from pipeline.results.report import Report, Verdict

if TYPE_CHECKING:
    from pipeline.compiler.remeasure import RaceRecord

FILE_BACKENDS = ("onnxruntime", "openvino", "tensorrt")  # that run an ONNX file as it is
ENGINE_SUFFIXES = (".plan", ".engine", ".trt")
MEASURING_TIME = ("benchmark.budget_s", "benchmark.duration_s")


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
        str, typer.Option(help="Of MODEL.onnx: onnxruntime, openvino or tensorrt measures it.")
    ] = FILE_BACKENDS[0],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER",
            help="Of MODEL.onnx: the model to compare it with. Of a language model: the output"
            " folder of another one.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Then trace a few runs into this file, for ui.perfetto.dev."
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

    Of a language model, it prints the time to the first token, between tokens, and tokens per
    second, at the lengths and the numbers of requests of its plan, beside the model as it is. With
    --against, beside another delivered one.

    Example: crucible bench crucible-out/smollm2 --against crucible-out/before
    """
    if trace is not None:
        check_trace_file(trace, sweeps=bool(batch))
    if deliver.holds_language_model(result):
        others = {
            "--batch": batch,
            "--limit-ms": limit_ms is not None,
            "--out": out,
            "--trace": trace,
            "--profile": profiles,
            "--backend": backend != FILE_BACKENDS[0],
        }
        language.bench_language_model(result, overrides, against, others, as_json)
        return
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
        plans = [plan_from_options(model, overrides, profiles) for model in models]
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
            "--backend, --against and --profile need an ONNX model, or --against the folder of a"
            f" language model, got '{result}'",
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
    with open_runner(as_json, plan.name) as runner:
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

    with open_runner(as_json, plans[-1].name) as runner:
        race = benchmark_files(plans, backend, runner)
    document = _show(race.run, plans[-1].profiles, as_json)
    if trace:
        document |= _trace(race, plans[-1].name, trace, as_json)
    print(json.dumps(document))


def _trace(race: RaceRecord, plan: str, file: Path, as_json: bool) -> dict[str, object]:
    """Trace the engines of a run into a file, print what it holds, and return it as JSON."""
    from pipeline.cli.trace import save_traces, trace_lines, trace_summary
    from pipeline.compiler.remeasure import trace_engines

    with open_runner(as_json, plan) as runner:
        found = trace_engines(race, runner)
    save_traces(found, command_line(), file)
    if not as_json:
        for line in trace_lines(found, file):
            terminal.print_text(terminal.console(), line, markup=False)
    return {"trace": trace_summary(found, file)}


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
            terminal.print_text(console, "\n".join(terminal.summary_notes(summary, row, run)))
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
        terminal.print_text(console, line)
    terminal.print_text(
        console,
        f"the report in {folder} was {before} because its ratio could not be measured; this run"
        " measured the ratio and replaced the report",
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
    with open_runner(as_json, plan.name) as runner:
        sweep = sweep_again(
            compiled, plan, engine, runner, batches, None if limit_ms is None else limit_ms / 1e3
        )
    _, plot = write_sweep(sweep, out)
    if not as_json:
        console = terminal.console()
        console.print(terminal.sweep_table(sweep))
        terminal.print_text(console, f"{conclusion(sweep)}\nplot: {plot}", markup=False)
    print(sweep.model_dump_json())


def _batches(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise PlanError(
            f"expected --batch as integers of at least 1, separated by commas, got '{text}'",
            "for example --batch 1,2,4,8",
        )
    return [int(part) for part in parts]
