"""`crucible inspect`: what is in a model or an engine, and what a backend cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from pipeline import backends
from pipeline.cli.lint import finding_lines, findings_of
from pipeline.core import Engine, OnnxModel, Profile, Progress, Refusal, Target, TensorSpec, silent
from pipeline.errors import PlanError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.files import file_size, onnx_model, operator_histogram, read_proto
from pipeline.quantization.existing_qdq import QDQ, given_precision, scales_of
from pipeline.quantization.lint.rules import EVERYWHERE


def read_model(path: Path) -> OnnxModel:
    """An ONNX file's interface."""
    return onnx_model(path.resolve().parent, path.name)


def refusals_of(path: Path, backend: str, plugins: Sequence[Path] = ()) -> tuple[Refusal, ...]:
    """Every node of an ONNX file that a backend cannot run, found in a child: its library may crash
    on a strange model.
    """
    model, libraries = read_model(path), plugin_libraries(plugins, backend)
    backends.backend(backend).probe()  # its absence is said before anything is started
    return call_in_child(find_unsupported, model, backend, libraries, name=f"inspect {path.name}")


def plugin_libraries(plugins: Sequence[Path], backend: str | None) -> tuple[Path, ...]:
    """The plugin libraries by their full paths: a bare name would be looked for elsewhere.
    PlanError for a backend without, or for a missing file.
    """
    if plugins and backend != "tensorrt":
        raise PlanError(
            "only TensorRT loads plugin libraries",
            "leave --plugin out, or add `--backend tensorrt`",
        )
    for plugin in plugins:
        if not plugin.is_file():
            raise PlanError(f"--plugin: no file at '{plugin}'", "correct the path")
    return tuple(plugin.resolve() for plugin in plugins)


def find_unsupported(
    model: OnnxModel, backend: str, plugins: tuple[Path, ...] = (), progress: Progress = silent
) -> tuple[Refusal, ...]:
    """The backend's own list of refusals."""
    module = backends.backend(backend)
    return module.unsupported(model, module.probe(), plugins)


def model_lines(path: Path) -> list[str]:
    """An ONNX file on one screen."""
    model = read_model(path)
    operators = operator_histogram(path)
    counts = ", ".join(f"{name} {count}" for name, count in operators.items())
    return [
        (
            f"[bold]{escape(str(path))}[/]  opset {model.opset}, {file_size(path) / 1e6:.1f}"
            f" MB, sha256 {model.digest[:16]}"
        ),
        *_spec_lines("input", model.inputs),
        *_spec_lines("output", model.outputs),
        f"operators ({sum(operators.values())} nodes): {counts}",
        *quantised_lines(path),
    ]


def quantised_lines(path: Path, backend: str | None = None) -> list[str]:
    """Of a model that brings its own Q/DQ: how much is quantised, and what `crucible lint` finds
    for one backend or for all; nothing of another.
    """
    proto = read_proto(path)
    given = given_precision(proto.graph)
    if given is None or backend not in (None, *EVERYWHERE):
        return []
    pairs = len(scales_of(proto.graph).get((QDQ[1], "", b"", b""), ()))
    told = [
        f"quantised to {given}: {pairs} DequantizeLinear, calibration is not needed",
        *finding_lines(findings_of(path, backend)),
    ]
    return [escape(line) for line in told]


def engine_lines(engine: Engine) -> list[str]:
    """An engine on one screen."""
    target = engine.target
    return [
        (
            f"[bold]{engine.recipe.label}[/]  {engine.size_bytes / 1e6:.1f} MB, sha256"
            f" {engine.digest[:16]}"
        ),
        f"built for: {target.backend} {target.version} on {target.device} {_generation(target)}",
        *_spec_lines("input", engine.inputs),
        *_spec_lines("output", engine.outputs),
        *(
            f"profile {number}: {_ranges(profile)}"
            for number, profile in enumerate(engine.profiles)
        ),
        *(f"note: {escape(note.text)}" for note in engine.notes),
    ]


def _generation(target: Target) -> str:
    """What of a CPU or a GPU decides whether the engine runs there."""
    if target.compute_capability is None:
        return " ".join(target.cpu_flags)
    driver = f", driver {target.driver}" if target.driver else ""
    return f"(compute capability {target.compute_capability}{driver})"


def _ranges(profile: Profile) -> str:
    """`batch 1..8..64`; and the values of an input that decides a shape, `k [1]..[5]..[10]`."""
    sizes = [f"{name} {dim.min}..{dim.opt}..{dim.max}" for name, dim in profile.dims.items()]
    values = [
        f"{name} {list(each.min)}..{list(each.opt)}..{list(each.max)}"
        for name, each in profile.values.items()
    ]
    return escape(", ".join([*sizes, *values]))


def _spec_lines(role: str, specs: tuple[TensorSpec, ...]) -> list[str]:
    return [
        escape(
            f"{role} {spec.name}: {spec.dtype} [{', '.join(str(dim) for dim in spec.shape)}]"
            f" {spec.kind}"
        )
        for spec in specs
    ]
