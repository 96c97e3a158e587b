"""Crucible from Python: compile a plan, open the delivered engine, read the report.

`import pipeline` is light: each function imports what it needs when it is called.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PlanError, UserError

if TYPE_CHECKING:
    from typing import Any, Self

    import torch
    from numpy.typing import NDArray

    from pipeline.backends.base import Loaded, Session
    from pipeline.backends.cuda import DeviceOutput
    from pipeline.core.artifacts import Engine
    from pipeline.core.shapes import Tensors, TensorSpec
    from pipeline.execution.stage_runner import Emit
    from pipeline.plan.schema import Plan
    from pipeline.results.report import Report

MAX_WORKERS = 4  # candidates that are prepared side by side


def compile(
    plan: Plan | Path | str,
    out: Path | str,
    overrides: Iterable[str] = (),
    emit: Emit | None = None,
) -> Report:
    """Compile a model as `crucible compile` does, and return the report.

    `plan` is the path of a YAML plan, the path of an .onnx file (compiled with all defaults), or a
    `Plan`. `overrides` are texts of the form `a.b=value`, as for `--set`. Relative paths in a plan
    file and in its overrides start at the file's folder; in overrides of an .onnx file or of a
    `Plan`, at the working folder. `emit` is called with a `StageEvent` whenever a stage starts,
    goes on or ends, from several threads; without it nothing is shown.

    The folder `out` then holds report.json, report.md and report.html, and `engine/` unless the
    verdict is `rejected`, or `keep` where the baseline cannot be delivered as an engine
    (`report.has_engine`). What an earlier compile left there is replaced. Stages run in child
    processes, and what they make is kept in the store (`CRUCIBLE_HOME`): the same call goes on
    where it was stopped.

    Raises PlanError for a plan, an override or a folder that cannot be used, ModelError and
    DataError for files that cannot be read, UnsupportedError and HostError for what this host
    lacks. A candidate that fails is no error: the report has its reason. `report.verdict` says
    whether to use the engine.
    """
    from pipeline.compiler.compile import compile_plan, publish_report
    from pipeline.execution.remote_store import open_store
    from pipeline.execution.stage_runner import Runner
    from pipeline.host.environment import usable_cores
    from pipeline.report.bundle import check_folder

    folder = Path(out)
    parsed, command = _plan_and_command(plan, _checked(overrides), folder)
    check_folder(folder)
    if parsed.targets:
        raise PlanError(
            "expected a plan for this host, got one with `targets`",
            "`crucible compile` takes it; or pass the override `targets=[]`",
        )
    runner = Runner(
        open_store(),
        emit or _ignore,
        plan=parsed.name,
        workers=min(usable_cores(), MAX_WORKERS),
    )
    report = compile_plan(parsed, runner, command)
    publish_report(report, folder)
    return report


def _plan_and_command(
    plan: Plan | Path | str, overrides: tuple[str, ...], out: Path
) -> tuple[Plan, str]:
    """The checked plan, and for its report the command that repeats the compile."""
    from pipeline.plan.files import override_plan
    from pipeline.plan.schema import Plan

    if isinstance(plan, Plan):
        parsed = override_plan(plan, overrides) if overrides else plan
        return parsed, "pipeline.compile(plan, out)"
    sets = [part for override in overrides for part in ("--set", override)]
    command = ["crucible", "compile", str(plan), *sets, "--out", str(out)]
    return read_plan(plan, overrides), shlex.join(command)


def _checked(overrides: Iterable[str]) -> tuple[str, ...]:
    """The overrides. PlanError for one plain text, which would be read character by character."""
    if isinstance(overrides, str):
        raise PlanError(
            f"expected overrides as a list of texts, got the text '{overrides}'",
            f"write [{overrides!r}]",
        )
    return tuple(overrides)


def _ignore(event: object) -> None:
    """Show nothing of a stage."""


def read_plan(path: Path | str, overrides: Iterable[str] = ()) -> Plan:
    """Read a YAML plan, or make the plan of an .onnx file: all defaults, no data.

    `overrides` are texts of the form `a.b=value`. Raises PlanError, with the line or the key at
    fault, if the plan cannot be used.
    """
    from pipeline.plan.files import load_plan, plan_from_model
    from pipeline.plan.schema import ONNX_SUFFIXES

    file, texts = Path(path), _checked(overrides)
    return (plan_from_model if file.suffix in ONNX_SUFFIXES else load_plan)(file, texts)


def read_report(folder: Path | str) -> Report:
    """Read the report that a compile wrote into `folder`, or the report.json of that name.

    Raises UserError if there is none, or if another version of Crucible wrote it.
    """
    from pipeline.report.files import load_report

    return load_report(Path(folder))


def open_engine(folder: Path | str, device: str = "") -> OpenEngine:
    """Load the engine that a compile delivered into `folder`; use it in a `with` statement.

    Every file is compared with its sha256 first. `device` may name another GPU, such as `cuda:1`,
    for an engine of TensorRT. An engine of the backend `torch` is code: open it
    only if you trust where it comes from.

    Raises ModelError if the folder holds no engine, DamagedError if a file is not what it was,
    BackendUnavailable if this host cannot run the engine.
    """
    from pipeline import backends
    from pipeline.report.bundle import load_engine

    engine = load_engine(Path(folder))
    return OpenEngine(engine, backends.load(engine, device))


def quantize_aware(
    module: torch.nn.Module,
    backend: str = "onnxruntime",
    keep_fp32: Sequence[str] = (),
    first_layer: bool = True,
    last_layer: bool = False,
) -> torch.nn.Module:
    """Return a copy of a trained module with fake quantisers, to be trained further.

    They are where Crucible places the Q/DQ pairs of int8 for `backend` (onnxruntime, openvino,
    tensorrt): activations symmetric per tensor, weights per channel, batch norms folded. Train it
    as any module, which takes a part of the epochs of the first training; in training mode it
    learns its ranges too. Then a plan whose entrypoint returns `quantize_aware(...)`, with the
    trained weights, compiles to int8 without calibration.

    `keep_fp32` names modules that stay in floats, by the names of `named_modules()`, with `*` as a
    wildcard. The answer of the last layer is not quantised, and with `last_layer=False` neither are
    its weights.

    Raises ModelError if torch.fx cannot trace the module, if nothing can be quantised, and for a
    name that no module has; PlanError for an unknown backend; BackendUnavailable without torch.
    """
    from pipeline.backends.pytorch.module import torch_version

    torch_version()
    from pipeline.backends.pytorch.quantize_aware.placement import quantize_aware as quantize

    return quantize(module, backend, keep_fp32, first_layer, last_layer)


class OpenEngine:
    """An engine in memory. `inputs` and `outputs` name what it takes and gives.

    One thread at a time may call `run`.
    """

    def __init__(self, engine: Engine, loaded: Loaded) -> None:
        self.inputs: tuple[TensorSpec, ...] = engine.inputs
        self.outputs: tuple[TensorSpec, ...] = engine.outputs
        self._engine, self._loaded = engine, loaded
        self._session: Session | None = None
        self._is_open = True

    def run(self, inputs: Tensors) -> Tensors:
        """Run the engine once: host arrays in, host arrays out, by name.

        `inputs` holds one NumPy array for each of `self.inputs`, of exactly its dtype (bfloat16 as
        `ml_dtypes.bfloat16`). TensorRT also takes arrays on the GPU, of any library with DLPack or
        `__cuda_array_interface__`. A number in its shape is fixed; a name, such as `batch`, is any
        size within one profile of the plan, and the same wherever it occurs. Of several profiles,
        the one tuned nearest to the sizes runs. The result holds one array for each of
        `self.outputs`, which belong to the caller.

        Raises DataError if names, dtypes, shapes or values do not fit, and UserError once the
        engine is closed.
        """
        from pipeline.backends.base import run_session

        return run_session(self._opened_session(), inputs)

    def run_on_gpu(self, inputs: Tensors) -> Mapping[str, DeviceOutput]:
        """Run an engine of TensorRT once, and leave its outputs on the GPU.

        `inputs` as for `run`. `torch.from_dlpack(outputs["y"])` uses an output without a copy.
        The next run overwrites the outputs, and closing the engine frees them.

        Raises UnsupportedError for engines of other backends, otherwise as `run`.
        """
        from pipeline.backends.base import SharesOutputs
        from pipeline.errors import UnsupportedError

        session = self._opened_session()
        if not isinstance(session, SharesOutputs):
            raise UnsupportedError(
                f"{self._engine.target.backend} leaves no outputs on a GPU", "call `run` instead"
            )
        session.bind(inputs)
        session.upload()
        session.execute()
        return session.device_outputs()

    def input_buffer(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return an array for the input `name`, to be filled by the caller and given to `run`.

        On a GPU it lies in page-locked memory, which the GPU reads by itself: an array of 38 MB
        arrives several times as fast as an ordinary one. It may be used again and again. `run` has
        read it when it returns.

        Raises DataError if there is no such input of this shape, HostError if the host cannot lock
        that much memory, and UserError once the engine is closed.
        """
        from pipeline import backends

        self._check_open()
        return backends.input_buffer(self._engine, name, shape)

    def _opened_session(self) -> Session:
        self._check_open()
        if self._session is None:
            self._session = self._loaded.session()
        return self._session

    def _check_open(self) -> None:
        if not self._is_open:
            raise UserError("this engine is closed", "open it again with pipeline.open_engine")

    def close(self) -> None:
        """Free the engine's memory. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.ExitStack() as stack:
            stack.callback(self._loaded.close)  # runs last: sessions are closed before
            if self._session is not None:
                stack.callback(self._session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
