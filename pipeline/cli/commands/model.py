"""Commands on a model before a compile: inspect, onnx and lint."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import terminal
from pipeline.cli.inputs import plan_from_options
from pipeline.cli.options import JsonOption, PlanArgument, PluginOption, ProfileOption, SetOption
from pipeline.cli.running import open_runner
from pipeline.errors import PlanError
from pipeline.report import bundle as deliver


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
            terminal.print_text(console, line)
    raise typer.Exit(1 if refusals else 0)


def write_onnx(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(metavar="OUT.onnx", help="File to write.")],
    overrides: SetOption,
    profiles: ProfileOption,
    simplify: Annotated[
        bool, typer.Option(help="Write the simplified graph, or the graph as it was exported.")
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

    parsed = plan_from_options(plan, overrides, profiles)
    deliver.check_model_file(out, parsed.model.path)
    with open_runner(as_json, parsed.name) as runner:
        model = export_plan(parsed, runner, simplify)
        deliver.deliver_model(model, out)
    if not as_json:
        console = terminal.console()
        terminal.print_text(console, "\n".join(model_lines(out)))
        terminal.print_text(
            console, "\n".join(f"note: {note.text}" for note in model.notes), markup=False
        )
    print(
        json.dumps(
            {"model": str(out), "opset": model.opset, "notes": [note.text for note in model.notes]}
        )
    )


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
        plan = plan_from_options(model, overrides, profiles)
        if fix:
            lines += linting.fixed_lines(linting.fix_model(model, fix, backend, plan.profiles))
        if measure:
            with open_runner(as_json, plan.name) as runner, tempfile.TemporaryDirectory() as folder:
                gains = linting.measure_fixes(plan, backend, Path(folder), runner)
            lines += linting.gain_lines(gains, findings[backend])
    terminal.print_text(terminal.console(stderr=as_json), "\n".join(lines), markup=False)
