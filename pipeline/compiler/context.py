"""What a compile works with: the plan checked against its model, the source found, the data opened.

All that can be wrong with a request is said here, before anything is started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import backends
from pipeline.accuracy.task_metric import check_labels
from pipeline.core import (
    BuildOptions,
    ModelSource,
    Precision,
    Target,
    TensorRTOptions,
    TensorSpec,
)
from pipeline.data.samples import (
    CalibrationSet,
    SampleSet,
    SelectionSet,
    ValidationSet,
    check_disjoint,
    open_set,
)
from pipeline.errors import ModelError, PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.host.gpu import find_gpus
from pipeline.measurement.measure import Environment, environment
from pipeline.onnx_graph.files import onnx_model, read_proto
from pipeline.plan.schema import GeneratedData, Plan
from pipeline.plan.source import check_profiles, code_digest, source_from_config
from pipeline.quantization.existing_qdq import given_precision
from pipeline.stages.benchmark import check_sizes

GENERATED_SAMPLES = 32  # random inputs on which tensor errors are taken where there is no data
FEEDS_FOR_CHECKS = 4  # real samples on which export and simplify are checked
# samples per batch while checking accuracy: enough for speed, little enough for memory
MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class Data:
    """The three sets; selection is generated where the plan has none."""

    calibration: CalibrationSet | None
    selection: SelectionSet
    validation: ValidationSet | None


@dataclass(frozen=True, slots=True)
class CompileContext:
    """What every sentence of the story needs."""

    plan: Plan
    runner: Runner
    source: ModelSource
    data: Data
    environment: Environment
    plugins: tuple[str, ...] = ()  # sha256 of each library that the plan names
    # precision of the Q/DQ that the model brings; of a PyTorch model known after export
    given: Precision | None = None
    # forms of PyTorch programs that crashed here, and the first label
    crashed: dict[str, str] = field(default_factory=dict)

    targets: dict[str, Target] = field(default_factory=dict)  # of backends that were asked for
    has_gpu: bool = False

    def target(self, backend: str) -> Target:
        """What this host is for a backend, found once per compile. BackendUnavailable if it is not
        here.
        """
        if backend not in self.targets:
            self.targets[backend] = backends.backend(backend).probe()
        return self.targets[backend]

    @property
    def samples(self) -> SampleSet:
        """Real inputs where there are any, for checks of the graph."""
        return self.data.calibration or self.data.selection

    @property
    def reference_name(self) -> str:
        name = (
            "ONNX Runtime fp32, the file as given"
            if self.source.kind == "onnx"
            else "PyTorch eager fp32, without TF32"
        )
        return f"{name}, its Q/DQ computed as written" if self.given else name

    def build_options(self, backend: str) -> BuildOptions:
        """What `backend` may use.

        TensorRT's own options reach TensorRT only, and the source reaches torch only, so that they
        never cause another backend to build again.
        """
        if backend != "tensorrt":
            source = self.source if backend == "torch" else None
            return BuildOptions(
                profiles=self.plan.profiles,
                threads=self.plan.benchmark.threads,
                source=source,
            )
        asked = self.plan.tensorrt
        workspace = asked.workspace_mib * 2**20 if asked.workspace_mib else None
        tensorrt = TensorRTOptions(
            workspace_bytes=workspace,
            optimization_level=asked.optimization_level,
            timing_iterations=asked.timing_iterations,
            plugins=asked.plugins,
        )
        return BuildOptions(profiles=self.plan.profiles, tensorrt=tensorrt)

    def plugin_digests(self, backend: str) -> tuple[str, ...]:
        """What a build for `backend` depends on besides its options, which hold the places of the
        libraries only.
        """
        return self.plugins if backend == "tensorrt" else ()


def open_context(plan: Plan, runner: Runner) -> CompileContext:
    """Find the source, complete the profiles, open the data: everything that can be wrong with a
    request is said here.
    """
    source = source_from_config(plan.model, plan.profiles)
    inputs = input_specs(source)
    complete = plan.model_copy(update={"profiles": check_profiles(inputs, plan.profiles)})
    check_sizes(plan.benchmark.sizes, inputs, complete.profiles)
    check_code(plan)
    given = (
        given_precision(read_proto(source.path, weights=False).graph)
        if source.kind == "onnx" and source.path
        else None
    )
    return CompileContext(
        plan=complete,
        runner=runner,
        source=source,
        data=open_data(complete, inputs),
        environment=environment(),
        plugins=digests_of(complete.tensorrt.plugins),
        given=given,
        has_gpu=bool(find_gpus().devices),
    )


def check_code(plan: Plan) -> None:
    """PlanError if the plan names code of the user's that is not there."""
    if ":" in plan.accuracy.metric:
        code_digest(plan.accuracy.metric, plan.accuracy.python_path, "accuracy.metric")
    if plan.simplify.surgery:
        code_digest(plan.simplify.surgery, plan.simplify.python_path, "simplify.surgery")


def input_specs(source: ModelSource) -> tuple[TensorSpec, ...]:
    """The plan's inputs, or an ONNX file's own; PlanError where the plan says otherwise than the
    file.
    """
    if source.kind != "onnx" or source.path is None:
        return source.inputs
    model = onnx_model(source.path.parent, source.path.name)
    asked, has = (
        [f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]" for spec in specs]
        for specs in (source.inputs, model.inputs)
    )
    names = [spec.name for spec in model.outputs]
    for key, plans, files in (("inputs", asked, has), ("outputs", list(source.outputs), names)):
        if plans and plans != files:
            message = (
                f"model.{key}: the plan says {', '.join(plans)}, the file has {', '.join(files)}"
            )
            raise PlanError(message, f"leave model.{key} out: an .onnx file is taken as it is")
    if not model.inputs:
        raise ModelError(
            f"'{source.path}' has no inputs: its answer is a constant",
            "give a model that takes at least one input",
        )
    return model.inputs


def open_data(plan: Plan, inputs: tuple[TensorSpec, ...]) -> Data:
    """Open and check the sets that the plan names; sets that overlap are an error."""
    nothing = GeneratedData(
        generate="random",
        samples=GENERATED_SAMPLES,
        because="the plan names no selection data",
        seed=plan.model.seed + 1,
    )
    named = plan.data
    calibration = (
        open_set(CalibrationSet, named.calibration, inputs, plan.profiles)
        if named.calibration is not None
        else None
    )
    selection = open_set(
        SelectionSet, nothing if named.selection is None else named.selection, inputs, plan.profiles
    )
    validation = (
        open_set(ValidationSet, named.validation, inputs, plan.profiles)
        if named.validation is not None
        else None
    )
    check_disjoint(
        *(opened for opened in (calibration, selection, validation) if opened is not None)
    )
    for judged, given in ((selection, named.selection), (validation, named.validation)):
        if judged is not None and isinstance(given, tuple):
            check_labels(plan.accuracy, judged.has_labels)
    return Data(calibration, selection, validation)


def batch_rows(context: CompileContext) -> int:
    """Samples per batch while checking accuracy: what every profile allows, at most MAX_ROWS."""
    first = context.data.selection.specs[0].shape[:1]
    if not first or isinstance(first[0], int):
        return first[0] if first and isinstance(first[0], int) else 1
    ranges = [profile.dims[first[0]].max for profile in context.plan.profiles]
    return max(1, min([MAX_ROWS, *ranges]))


def digests_of(files: Sequence[Path]) -> tuple[str, ...]:
    """sha256 of each file; PlanError if one cannot be read."""
    digests = []
    for path in files:
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise PlanError(
                f"tensorrt.plugins: cannot read '{path}': {error.strerror}",
                "give the path of a shared library",
            ) from error
    return tuple(digests)
