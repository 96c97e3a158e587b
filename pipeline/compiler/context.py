"""The context of a compile: the checked plan, the model source, the data and the host.

Every error in a request is raised here, before any stage starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline import backends
from pipeline.accuracy.metrics.from_plan import check_host, check_labels
from pipeline.core.artifacts import BuildOptions, ModelSource, Target
from pipeline.core.recipe import Precision
from pipeline.core.shapes import TensorSpec
from pipeline.data.raw_images import check_raw
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
from pipeline.host.environment import Environment, environment
from pipeline.host.gpu import find_gpus
from pipeline.onnx_graph.files import onnx_model, read_proto
from pipeline.plan.schema import ROLES, GeneratedData, Plan
from pipeline.plan.source import accuracy_code, check_profiles, code_digest, source_from_config
from pipeline.preprocess import raw_specs
from pipeline.quantization.existing_qdq import given_precision
from pipeline.serving_inputs import with_raw_image
from pipeline.stages.benchmark import check_sizes
from pipeline.text_inputs import check_tokenizer

GENERATED_SAMPLES = 32  # random inputs on which tensor errors are taken where there is no data
FEEDS_FOR_CHECKS = 4  # real samples on which export and simplify are checked
# samples per batch while checking accuracy: enough for speed, little enough for memory
MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class Data:
    """The three sample sets. The selection set is generated if the plan names none."""

    calibration: CalibrationSet | None
    selection: SelectionSet
    validation: ValidationSet | None


@dataclass(frozen=True, slots=True)
class CompileContext:
    """Everything that the steps of a compile share."""

    plan: Plan
    runner: Runner
    source: ModelSource
    data: Data
    environment: Environment
    plugins: tuple[str, ...] = ()  # sha256 of each library that the plan names
    # precision of the model's own Q/DQ nodes; for a PyTorch model it is set after export
    given: Precision | None = None
    # label of the first candidate that crashed on this host, by form of PyTorch program
    crashed: dict[str, str] = field(default_factory=dict)

    targets: dict[str, Target] = field(default_factory=dict)  # by backend, probed on first use
    has_gpu: bool = False

    def target(self, backend: str) -> Target:
        """Return this host as a target of a backend. Each backend is probed once per compile.

        BackendUnavailable if the backend is not installed or its device is missing.
        """
        if backend not in self.targets:
            self.targets[backend] = backends.backend(backend).probe()
        return self.targets[backend]

    @property
    def quiet_environment(self) -> Environment:
        """The environment for cache keys: the current load is no property of the host."""
        return self.environment.model_copy(update={"load_1min": 0.0})

    @property
    def raw_source(self) -> ModelSource:
        """The source with the plan's steps: it takes and gives what the engines take and give."""
        steps = {"preprocess": self.plan.preprocess, "postprocess": self.plan.postprocess}
        return self.source.model_copy(update=steps)

    @property
    def samples(self) -> SampleSet:
        """Samples for checks of the graph: the calibration set, else the selection set."""
        return self.data.calibration or self.data.selection

    @property
    def reference_name(self) -> str:
        name = (
            "ONNX Runtime fp32, the file as given"
            if self.source.kind == "onnx"
            else "PyTorch eager fp32, without TF32"
        )
        if self.given:
            name += ", its Q/DQ computed as written"
        if self.plan.preprocess:
            name += ", behind the preprocessing in numpy"
        return f"{name}, in front of the postprocessing in numpy" if self.plan.postprocess else name

    def build_options(self, backend: str) -> BuildOptions:
        """Return the options that `backend` may use.

        Only TensorRT gets TensorRT's options, and only torch gets the source. A change of these
        does not rebuild the engines of other backends.
        """
        if backend != "tensorrt":
            source = self.raw_source if backend == "torch" else None
            return BuildOptions(
                profiles=self.plan.profiles,
                threads=self.plan.benchmark.threads,
                source=source,
            )
        return BuildOptions(profiles=self.plan.profiles, tensorrt=self.plan.tensorrt)

    def plugin_digests(self, backend: str) -> tuple[str, ...]:
        """Return the digests of the plugin libraries that a build for `backend` depends on.

        The build options hold only the paths of these libraries.
        """
        return self.plugins if backend == "tensorrt" else ()


def open_context(plan: Plan, runner: Runner) -> CompileContext:
    """Find the source, complete the profiles and open the data.

    Raises PlanError, ModelError or DataError for every error in the request.
    """
    source = source_from_config(plan.model, plan.profiles)
    model_inputs = input_specs(source)
    inputs = raw_specs(model_inputs, plan.preprocess)
    complete = plan.model_copy(
        update={
            "profiles": check_profiles(inputs, plan.profiles),
            "serving": with_raw_image(plan.serving, inputs, plan.preprocess),
        }
    )
    check_sizes(plan.benchmark.sizes, inputs, complete.profiles)
    check_code(plan)
    check_host(plan.accuracy, inputs)
    if plan.serving.text is not None:
        check_tokenizer(plan.serving.text.file)
    given = (
        given_precision(read_proto(source.path, weights=False).graph)
        if source.kind == "onnx" and source.path
        else None
    )
    return CompileContext(
        plan=complete,
        runner=replace(runner, stage_timeout_s=plan.stage_timeout_s),
        source=source,
        data=open_data(complete, inputs),
        environment=environment(),
        plugins=digests_of(complete.tensorrt.plugins),
        given=given,
        has_gpu=bool(find_gpus().devices),
    )


def check_code(plan: Plan) -> None:
    """Raise PlanError if a module that the plan names does not exist."""
    accuracy_code(plan.accuracy)
    if plan.simplify.surgery:
        code_digest(plan.simplify.surgery, plan.simplify.python_path, "simplify.surgery")


def input_specs(source: ModelSource) -> tuple[TensorSpec, ...]:
    """Return the inputs of the plan, or those of the ONNX file.

    PlanError if the plan's inputs or outputs differ from those of the file.
    """
    if source.kind != "onnx" or source.path is None:
        return source.inputs
    model = onnx_model(source.path.parent, source.path.name)
    output_names = [spec.name for spec in model.outputs]
    for key, in_plan, in_file in (
        ("inputs", _spec_texts(source.inputs), _spec_texts(model.inputs)),
        ("outputs", list(source.outputs), output_names),
    ):
        if in_plan and in_plan != in_file:
            raise PlanError(
                f"model.{key}: the plan says {', '.join(in_plan)}, the file has"
                f" {', '.join(in_file)}",
                f"leave model.{key} out: an .onnx file is taken as it is",
            )
    if not model.inputs:
        raise ModelError(
            f"'{source.path}' has no inputs: its outputs are constants",
            "give a model that takes at least one input",
        )
    return model.inputs


def _spec_texts(specs: Sequence[TensorSpec]) -> list[str]:
    return [f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]" for spec in specs]


def open_data(plan: Plan, inputs: tuple[TensorSpec, ...]) -> Data:
    """Open and check the sets that the plan names. DataError if two sets share samples."""
    generated = GeneratedData(
        generate="random",
        samples=GENERATED_SAMPLES,
        because="the plan names no selection data",
        seed=plan.model.seed + 1,
    )
    named = plan.data
    for role in ROLES:
        files = getattr(named, role)
        if isinstance(files, tuple):
            check_raw(files, inputs, plan.preprocess)
    calibration = (
        open_set(CalibrationSet, named.calibration, inputs, plan.profiles)
        if named.calibration is not None
        else None
    )
    source = generated if named.selection is None else named.selection
    selection = open_set(SelectionSet, source, inputs, plan.profiles, named.labels.selection)
    validation = (
        open_set(ValidationSet, named.validation, inputs, plan.profiles, named.labels.validation)
        if named.validation is not None
        else None
    )
    sets = (calibration, selection, validation)
    check_disjoint(*(samples for samples in sets if samples is not None))
    for samples, files in ((selection, named.selection), (validation, named.validation)):
        if samples is not None and isinstance(files, tuple):
            check_labels(plan.accuracy, samples.label_kind, samples.role)
    return Data(calibration, selection, validation)


def batch_rows(context: CompileContext) -> int:
    """Return the samples per batch of accuracy checks.

    Every profile allows this size. It is at most MAX_ROWS.
    """
    first = context.data.selection.specs[0].shape[:1]
    if not first or isinstance(first[0], int):
        return first[0] if first and isinstance(first[0], int) else 1
    ranges = [profile.dims[first[0]].max for profile in context.plan.profiles]
    return max(1, min([MAX_ROWS, *ranges]))


def digests_of(files: Sequence[Path]) -> tuple[str, ...]:
    """Return the sha256 of each file. PlanError if a file cannot be read."""
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
