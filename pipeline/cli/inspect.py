"""`crucible inspect`: describe a model or an engine, and list what a backend cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from pipeline import backends
from pipeline.cli.lint import finding_lines, findings_of
from pipeline.core.artifacts import Engine, OnnxModel, Refusal, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import PlanError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.files import file_size, onnx_model, operator_histogram, read_proto
from pipeline.quantization.existing_qdq import QDQ, given_precision, scales_of
from pipeline.quantization.lint.rules import EVERYWHERE


def read_model(path: Path) -> OnnxModel:
    """Read an ONNX file's interface."""
    return onnx_model(path.resolve().parent, path.name)


def refusals_of(path: Path, backend: str, plugins: Sequence[Path] = ()) -> tuple[Refusal, ...]:
    """Return every node of an ONNX file that a backend cannot run.

    The check runs in a child process, because the backend's library may crash on a strange model.
    """
    model, libraries = read_model(path), plugin_libraries(plugins, backend)
    backends.backend(backend).probe()  # raise for a missing backend before starting a child
    return call_in_child(find_unsupported, model, backend, libraries, name=f"inspect {path.name}")


def plugin_libraries(plugins: Sequence[Path], backend: str | None) -> tuple[Path, ...]:
    """Return the full paths of the plugin libraries: a bare name would be searched elsewhere.

    PlanError if the backend takes no plugins, or if a file is missing.
    """
    if plugins and backend != "tensorrt":
        raise PlanError(
            "only TensorRT loads plugin libraries",
            "remove --plugin, or add `--backend tensorrt`",
        )
    for plugin in plugins:
        if not plugin.is_file():
            raise PlanError(f"--plugin: no file at '{plugin}'", "correct the path")
    return tuple(plugin.resolve() for plugin in plugins)


def find_unsupported(
    model: OnnxModel, backend: str, plugins: tuple[Path, ...] = (), progress: Progress = silent
) -> tuple[Refusal, ...]:
    """Return the nodes that the backend itself refuses."""
    module = backends.backend(backend)
    return module.unsupported(model, module.probe(), plugins)


def model_lines(path: Path) -> list[str]:
    """Describe an ONNX file in a few lines, for a rich console."""
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
    """Describe the Q/DQ nodes of a quantised model, with the findings of `crucible lint`.

    The findings are those for `backend`, or for all backends if it is None. The result is empty
    for a model without Q/DQ nodes and for a backend without rules.
    """
    proto = read_proto(path)
    precision = given_precision(proto.graph)
    if precision is None or backend not in (None, *EVERYWHERE):
        return []
    pairs = len(scales_of(proto.graph).get((QDQ[1], "", b"", b""), ()))
    lines = [
        f"quantised to {precision}: {pairs} DequantizeLinear, calibration is not needed",
        *finding_lines(findings_of(path, backend)),
    ]
    return [escape(line) for line in lines]


def engine_lines(engine: Engine) -> list[str]:
    """Describe an engine in a few lines, for a rich console."""
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
    """Return the properties of a CPU or a GPU that decide whether the engine runs there."""
    if target.compute_capability is None:
        return " ".join(target.cpu_flags)
    driver = f", driver {target.driver}" if target.driver else ""
    return f"(compute capability {target.compute_capability}{driver})"


def _ranges(profile: Profile) -> str:
    """Return ranges of sizes, `batch 1..8..64`, and of shape inputs, `k [1]..[5]..[9]`."""
    sizes = [f"{name} {dim.min}..{dim.opt}..{dim.max}" for name, dim in profile.dims.items()]
    values = [
        f"{name} {list(range_.min)}..{list(range_.opt)}..{list(range_.max)}"
        for name, range_ in profile.values.items()
    ]
    return escape(", ".join([*sizes, *values]))


def _spec_lines(role: str, specs: tuple[TensorSpec, ...]) -> list[str]:
    lines = []
    for spec in specs:
        shape = ", ".join(str(dim) for dim in spec.shape)
        lines.append(escape(f"{role} {spec.name}: {spec.dtype} [{shape}] {spec.kind}"))
    return lines
