"""Choose and store the recorded module. Runs in the user's process, after the script has ended.

The module is moved to the CPU in fp32. Its inputs and its profile come from the recorded shapes;
whether axis 0 counts samples is tried out.
"""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.backends.pytorch.module import (
    first_line,
    name_outputs,
    run_module,
    tensor_from_array,
)
from pipeline.core.artifacts import ModelSource
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import ModelError
from pipeline.execution.exit_causes import crucible_error
from pipeline.onnx_graph.compare import compare_outputs
from pipeline.recording.model_files import (
    Checks,
    NotStored,
    flat,
    store_entrypoint,
    store_program,
)
from pipeline.recording.outcome import PACKAGE, PROGRAM, ModuleCalls, Outcome, Recording
from pipeline.recording.recorder import Form, Recorder, Seen, class_path
from pipeline.recording.shapes import BATCH, inputs_and_profile, share_rows
from pipeline.stages.export import TOLERANCE

if TYPE_CHECKING:
    import torch

CHECKED_CALLS = 4  # recorded calls, of distinct shapes where possible, that are run again
ANSWER_TOLERANCE = 0.05
"""Largest difference from the answers in the script, in units of the largest magnitude.

The script may have run on a GPU, in fp16 or under autocast. Other weights differ by far more.
"""
ANOTHER_WAY = (
    "define its class in a file that the script imports; or name a function that returns this"
    " module as `model.entrypoint` in a plan (docs/reference/plan.md); or record another with"
    " --module"
)


def store(recorder: Recorder) -> Outcome:
    """Store the chosen module next to its calls, and return what was recorded."""
    modules = tuple(_calls_of(seen) for seen in recorder.modules.values())
    try:
        return Outcome(modules, recorder.uncounted, _recording(recorder))
    except Exception as error:  # noqa: BLE001  edge of the process
        return Outcome(modules, recorder.uncounted, crucible_error(error))


def _calls_of(seen: Seen) -> ModuleCalls:
    shapes: Counter[str] = Counter()
    for form in seen.forms.values():
        for call, number in form.shapes.items():
            sizes = (f"{name} {list(shape)}" for name, shape in zip(form.names, call, strict=True))
            shapes[", ".join(sizes)] += number
    return ModuleCalls(
        class_path(type(seen.module)), seen.calls, dict(seen.left_out), dict(shapes.most_common())
    )


# --- the choice ---


def chosen(recorder: Recorder) -> Seen:
    """Return the module with the most recorded calls; among equals the one with more parameters.

    Modules without parameters, such as a loss, come last. ModelError if there is none.
    """
    usable = [seen for seen in recorder.modules.values() if _recorded(seen)]
    if usable:
        return max(usable, key=_rank)
    if recorder.modules:
        seen = max(recorder.modules.values(), key=lambda seen: seen.calls)
        reasons = "; ".join(f"{calls} {reason}" for reason, calls in seen.left_out.items())
        raise ModelError(
            f"none of the {seen.calls} calls of {class_path(type(seen.module))} can be recorded:"
            f" {reasons or 'each raised an exception'}",
            "change the script, or record another module with --module",
        )
    if recorder.wanted:
        near = difflib.get_close_matches(recorder.wanted, recorder.other_classes, n=1, cutoff=0.4)
        most = [name for name, _ in recorder.other_classes.most_common(5)]
        raise ModelError(
            f"the script called no module of the class '{recorder.wanted}'",
            f"give --module one of the classes that it called: {', '.join(near or most) or 'none'}",
        )
    raise ModelError(
        "the script called no nn.Module",
        "call the module as `model(x)`, in the process that `python` starts: neither"
        " `model.forward(x)` nor calls in child processes are recorded",
    )


def _recorded(seen: Seen) -> int:
    return sum(form.shapes.total() for form in seen.forms.values() if form.reservoir.slots)


def _rank(seen: Seen) -> tuple[bool, int, int]:
    parameters = sum(parameter.numel() for parameter in seen.module.parameters())
    return parameters > 0, _recorded(seen), parameters


# --- the recording ---


def _recording(recorder: Recorder) -> Recording:
    if recorder.failure is not None:
        raise recorder.failure
    seen = chosen(recorder)
    import torch  # not before: a script without torch has ended, and torch registers for the end

    form = max(seen.forms.values(), key=lambda form: form.shapes.total())
    torch.set_default_device(None)  # the script may have set another
    notes = _notes(seen, form)  # before the dtypes change
    inner = _on_cpu(seen.module)
    module = flat(inner, form)
    files = tuple(slot.path for slot in form.reservoir.slots)
    feeds = [_feeds(path, form) for path in _checked_files(files)]
    dtypes = [array.dtype.name for array in feeds[0].values()]
    fixed, _ = inputs_and_profile(form.names, dtypes, form.shapes, has_rows=False)
    source = ModelSource(inputs=fixed, outputs=_output_names(module, feeds[0]))
    has_rows = share_rows(form.shapes) and all(_has_rows(module, source, feed) for feed in feeds)
    inputs, profile = inputs_and_profile(form.names, dtypes, form.shapes, has_rows)
    if BATCH in profile.dims:
        feeds.append(_row(feeds[0], 0))
    source = source.model_copy(update={"inputs": inputs})
    checks = Checks(source, tuple((feed, _answers(module, source, feed)) for feed in feeds))
    model, why_program = _stored(recorder, inner, form, profile, checks)
    return Recording(
        class_path(type(seen.module)),
        model,
        inputs,
        source.outputs,
        profile,
        has_rows,
        files,
        (*notes, *why_program, *_answer_notes(module, source, form)),
    )


def _stored(
    recorder: Recorder, inner: torch.nn.Module, form: Form, profile: Profile, checks: Checks
) -> tuple[Path, tuple[str, ...]]:
    """Store the module in the better form that works. Return its path, and a note about it."""
    try:
        store_entrypoint(inner, form, recorder.sources, checks, recorder.folder)
    except NotStored as no_entrypoint:
        try:
            store_program(flat(inner, form), profile, checks, recorder.folder)
        except NotStored as no_program:
            raise ModelError(
                f"the module cannot be stored: as an entrypoint, {no_entrypoint}; as a .pt2,"
                f" {no_program}",
                ANOTHER_WAY,
            ) from no_program
        return recorder.folder / PROGRAM, (
            f"the module is stored as a .pt2, because {no_entrypoint}. A compile's baseline is then"
            " the exported program, in fp32 only (docs/reference/plan.md)",
        )
    return recorder.folder / PACKAGE, ()


def _checked_files(files: tuple[Path, ...]) -> list[Path]:
    """Return the files of a few calls, of distinct shapes first."""
    by_shapes: dict[tuple[tuple[int, ...], ...], Path] = {}
    for path in files:
        with np.load(path) as arrays:
            shapes = tuple(arrays[name].shape for name in arrays.files if name.startswith("in_"))
        by_shapes.setdefault(shapes, path)
    picked = list(by_shapes.values())[:CHECKED_CALLS]
    return picked + [path for path in files if path not in picked][: CHECKED_CALLS - len(picked)]


def _feeds(path: Path, form: Form) -> Tensors:
    with np.load(path) as arrays:
        return {name: arrays[f"in_{number}"] for number, name in enumerate(form.names)}


def _on_cpu(module: torch.nn.Module) -> torch.nn.Module:
    try:
        return module.cpu().float().eval()
    except Exception as error:  # the user's code may raise anything
        raise ModelError(
            f"the module cannot be moved to the CPU in fp32: {first_line(error)}", ANOTHER_WAY
        ) from error


def _output_names(module: Any, feeds: Tensors) -> tuple[str, ...]:
    """Return the names of the outputs, which differ from those of the inputs.

    ModelError if the module fails on the CPU, or returns anything but tensors.
    """
    import torch

    with torch.inference_mode():
        try:
            result = module.call(*(tensor_from_array(array.copy()) for array in feeds.values()))
        except Exception as error:  # the user's code may raise anything
            raise ModelError(
                f"the module fails on the CPU in fp32 on a recorded call: {first_line(error)}",
                ANOTHER_WAY,
            ) from error
        names = name_outputs(result, ModelSource())
    return tuple(f"{name}_out" if name in feeds else name for name in names)


def _has_rows(module: torch.nn.Module, source: ModelSource, feeds: Tensors) -> bool:
    """Return True if each row of a call gets the same answer when it is alone."""
    rows = len(next(iter(feeds.values())))
    together = _answers(module, source, feeds)
    if any(array.shape[:1] != (rows,) for array in together.values()):
        return False
    for row in {0, rows - 1} if rows > 1 else ():
        try:
            alone = _answers(module, source, _row(feeds, row))
        except ModelError:  # it takes no single row
            return False
        if compare_outputs(_row(together, row), alone, TOLERANCE):
            return False
    return True


def _answers(module: torch.nn.Module, source: ModelSource, feeds: Tensors) -> Tensors:
    """Run the module on copies, since it may change its inputs."""
    return run_module(module, source, {name: array.copy() for name, array in feeds.items()})


def _row(arrays: Tensors, row: int) -> Tensors:
    return {name: array[row : row + 1] for name, array in arrays.items()}


# --- notes ---


def _notes(seen: Seen, form: Form) -> tuple[str, ...]:
    """Return what the user should know about the recorded calls and the dtypes."""
    notes = []
    others = sum(other.shapes.total() for other in seen.forms.values() if other is not form)
    if others:
        notes.append(f"{others} calls were left out: their other arguments, or dtypes, differ")
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in seen.module.parameters()}
    if half := sorted(dtypes & {"float16", "bfloat16", "float64"}):
        notes.append(
            f"the module ran in {', '.join(half)} and is stored in fp32, with fp32 inputs: a plan's"
            " reference is fp32, and its candidates try the others"
        )
    return tuple(notes)


def _answer_notes(module: torch.nn.Module, source: ModelSource, form: Form) -> tuple[str, ...]:
    """Return a warning if the stored module answers otherwise than it did in the script."""
    for slot in form.reservoir.slots:
        with np.load(slot.path) as arrays:
            answers = [arrays[name] for name in arrays.files if name.startswith("out_")]
        if not answers:
            continue
        expected = dict(zip(source.outputs, answers, strict=False))
        fault = compare_outputs(
            expected, run_module(module, source, _feeds(slot.path, form)), ANSWER_TOLERANCE
        )
        if fault:
            return (
                f"the stored module answers otherwise than it did in the script: {fault}. Its"
                " weights may have changed after the call, or its answers are random",
            )
    return ()
