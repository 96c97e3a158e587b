"""Record the calls of nn.Modules in the user's own process.

`startup/sitecustomize.py` loads this file before the user's script. It imports nothing of ours and
no torch: the script may have a package called `pipeline`, and may never need torch. When torch is
imported, `nn.Module.__call__` is replaced. When the script has ended, `storing.py` takes over.

    outermost call -> why it is left out, or its form -> reservoir -> one .npz per kept call

A failure of the recorder never reaches the script: it becomes a warning, and recording ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import inspect
import os
import pickle
import random
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SEED = 0
OUTCOME = "outcome"  # file with a pickled Outcome
MAX_MODULES = 100  # instances told apart; a script may make a module for every call
MAX_FORMS = 8  # ways to call one module, for example with a mask and without
MAX_SHAPES = 10_000  # of one form
PARAMETERS_OF_SAVEZ = ("file", "allow_pickle")  # no array can have these names
INNER = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
}
"""Where torch's wrappers hold the module that they run."""

Shapes = tuple[tuple[int, ...], ...]
"""The shape of every tensor of a call, in the order of the inputs."""


@dataclass
class Slot:
    """A kept call: a file with arrays in_0, in_1, ... and, in slot 0, its outputs out_0, ..."""

    path: Path
    size_bytes: int


class Reservoir:
    """A uniform sample of the calls of one form, in a number of slots that only shrinks.

    Each of the calls so far is kept with equal probability (Vitter's algorithm R).
    """

    def __init__(self, capacity: int) -> None:
        self.slots: list[Slot] = []
        self._capacity = capacity
        self._seen = 0
        self._random = random.Random(SEED)  # the script's own generators stay as they are

    @property
    def size_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self.slots)

    def draw(self) -> int | None:
        """Return the slot for the next call, or None if the call is not kept."""
        self._seen += 1
        if len(self.slots) < self._capacity:
            return len(self.slots)
        place = self._random.randrange(self._seen)
        return place if place < self._capacity else None

    def put(self, place: int, slot: Slot) -> None:
        """Keep a call in its slot, unless that slot has been removed since it was drawn."""
        if len(self.slots) < self._capacity:
            self.slots.append(slot)
        elif place < len(self.slots):
            self.slots[place].path.unlink()
            self.slots[place] = slot
        else:
            slot.path.unlink()

    def clear(self) -> None:
        while self.slots:
            with contextlib.suppress(OSError):  # it may be the reason
                self.slots.pop().path.unlink()

    def halve(self) -> None:
        """Remove a random half of the slots, but never slot 0. What stays is still uniform."""
        self._capacity = len(self.slots) - len(self.slots) // 2
        while len(self.slots) > self._capacity:
            place = self._random.randrange(1, len(self.slots))
            self.slots.pop(place).path.unlink()


@dataclass
class Form:
    """Calls of one module that differ only in the values and shapes of their tensors."""

    spec: Any  # torch's TreeSpec of (args, kwargs)
    constants: tuple[Any, ...]  # per leaf; None in place of a tensor
    positions: tuple[int, ...]  # of the leaves that are tensors
    names: tuple[str, ...]  # of the inputs
    reservoir: Reservoir
    shapes: Counter[Shapes] = field(default_factory=Counter)


@dataclass
class Seen:
    """A module that was called."""

    module: Any
    calls: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # calls, by reason
    forms: dict[Any, Form] = field(default_factory=dict)


@dataclass
class Taken:
    """A call between its start and its end."""

    seen: Seen
    form: Form
    shapes: Shapes
    place: int | None  # in the reservoir
    arrays: dict[str, Any]


class Recorder:
    """Counts and samples the calls of modules. Thread-safe."""

    def __init__(self, folder: Path, samples: int, max_bytes: int, wanted: str = "") -> None:
        self.folder = folder
        self.wanted = wanted  # name or dotted path of a class; "": outermost modules
        self.samples = samples
        self.modules: dict[int, Seen] = {}
        self.uncounted = 0  # calls of modules beyond MAX_MODULES
        self.other_classes: Counter[str] = Counter()  # calls of classes that are not wanted
        self.failure: Exception | None = None
        self.is_ended = False
        self.sources: dict[str, Path] = {}  # the script's own modules, at its end
        self._max_bytes = max_bytes
        self._files = 0
        self._process = os.getpid()  # a fork of the script records nothing
        self._lock = threading.Lock()
        self._local = threading.local()
        self._restore: Callable[[], None] = lambda: None

    @property
    def is_own_process(self) -> bool:
        return os.getpid() == self._process

    # --- the calls ---

    def attach(self, torch: ModuleType) -> None:
        """Replace `nn.Module.__call__` until `detach`."""
        original = torch.nn.Module.__call__
        is_compiling = torch.compiler.is_compiling  # torch.compile leaves out what follows it

        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._is_nested() or not self._wants(module):
                return original(module, *args, **kwargs)
            self._local.is_inside = True
            try:
                taken = self._safely(self._start_of_call, torch, module, args, kwargs)
                result = original(module, *args, **kwargs)
                if taken is not None:
                    self._safely(self._end_of_call, torch, taken, result)
                return result
            finally:
                self._local.is_inside = False

        def restore() -> None:
            torch.nn.Module.__call__ = original

        self._restore = restore
        torch.nn.Module.__call__ = call

    def detach(self) -> None:
        self._restore()

    def _is_nested(self) -> bool:
        return getattr(self._local, "is_inside", False)

    def _wants(self, module: Any) -> bool:
        if not self.wanted:
            return True
        kind = type(unwrapped(module))
        if self.wanted in (kind.__name__, class_path(kind)):
            return True
        self.other_classes[class_path(kind)] += 1
        return False

    def _safely(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the recorder. If it fails, warn once and record no more."""
        if self.failure is not None or not self.is_own_process:
            return None
        try:
            with self._lock:
                return function(*arguments)
        except Exception as error:  # noqa: BLE001  the script goes on
            self.failure = error
            for reservoir in self._reservoirs():  # the disk may be full
                reservoir.clear()
            say(f"warning: recording ended: {type(error).__name__}: {error}; the script goes on")
            return None

    def _start_of_call(
        self, torch: ModuleType, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Taken | None:
        if torch._C._get_tracing_state() is not None:
            return None
        seen = self._seen(unwrapped(module))
        if seen is None:
            return None
        seen.calls += 1
        leaves, spec = torch.utils._pytree.tree_flatten((tuple(args), dict(kwargs)))
        reason = why_left_out(torch, seen.module, leaves, spec)
        form = None if reason else self._form(torch, seen, args, kwargs, leaves, spec)
        if form is None:
            seen.left_out[reason or f"called in more than {MAX_FORMS} ways"] += 1
            return None
        tensors = [leaves[position] for position in form.positions]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes not in form.shapes and len(form.shapes) == MAX_SHAPES:
            seen.left_out[f"more than {MAX_SHAPES:,} distinct shapes"] += 1
            return None
        place = form.reservoir.draw()
        # now, since forward may change its inputs in place
        arrays = {} if place is None else arrays_of(torch, "in", tensors)
        return Taken(seen, form, shapes, place, arrays)

    def _end_of_call(self, torch: ModuleType, taken: Taken, result: Any) -> None:
        taken.form.shapes[taken.shapes] += 1
        if taken.place is None:
            return
        arrays = taken.arrays
        if taken.place == 0:  # to compare with what the stored model answers
            leaves = torch.utils._pytree.tree_leaves(result)
            outputs = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
            arrays |= arrays_of(torch, "out", outputs)
        self._keep(taken, taken.place, arrays)

    def _keep(self, taken: Taken, place: int, arrays: Mapping[str, Any]) -> None:
        import numpy as np

        size = sum(array.nbytes for array in arrays.values())
        while self._size_bytes() + size > self._max_bytes:
            largest = max(self._reservoirs(), key=lambda each: each.size_bytes)
            if size > self._max_bytes or len(largest.slots) < 2:
                taken.seen.left_out["larger than the limit of --max-mib"] += 1
                return
            largest.halve()
        path = self.folder / f"call_{self._files}.npz"
        self._files += 1
        np.savez(path, **arrays)
        taken.form.reservoir.put(place, Slot(path, size))

    def _reservoirs(self) -> list[Reservoir]:
        return [form.reservoir for seen in self.modules.values() for form in seen.forms.values()]

    def _size_bytes(self) -> int:
        return sum(reservoir.size_bytes for reservoir in self._reservoirs())

    # --- modules and forms ---

    def _seen(self, module: Any) -> Seen | None:
        seen = self.modules.get(id(module))
        if seen is None and len(self.modules) == MAX_MODULES:
            self.uncounted += 1
            return None
        if seen is None:  # the module is held, so that its id stays its own
            seen = self.modules[id(module)] = Seen(module)
        return seen

    def _form(
        self,
        torch: ModuleType,
        seen: Seen,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Form | None:
        """Return the form of a call; None if the module has been called in too many ways."""
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        constants = tuple(
            None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)
        )
        kinds = tuple(
            (str(leaf.dtype), leaf.dim()) if tensor else type(leaf).__name__
            for leaf, tensor in zip(leaves, is_tensor, strict=True)
        )
        key = (spec, constants, kinds)
        if key not in seen.forms:
            if len(seen.forms) == MAX_FORMS:
                return None
            positions = tuple(place for place, tensor in enumerate(is_tensor) if tensor)
            names = input_names(torch, seen.module, args, kwargs)
            seen.forms[key] = Form(
                spec,
                constants,
                positions,
                tuple(names[position] for position in positions),
                Reservoir(self.samples),
            )
        return seen.forms[key]


def why_left_out(torch: ModuleType, module: Any, leaves: Sequence[Any], spec: Any) -> str:
    """Return why a call cannot be recorded, or ""."""
    if module.training:
        return "in training mode: call its eval() first"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "captured in a CUDA graph"
    tensors = 0
    for leaf in leaves:
        if type(leaf) in (torch.Tensor, torch.nn.Parameter):
            if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_complex():
                return "a sparse, quantised or complex tensor as an argument"
            tensors += 1
        elif leaf is not None and type(leaf) not in (bool, int, float, str):
            return f"an argument of the type {class_path(type(leaf))}"
    try:
        hash(spec)
    except TypeError:
        return "arguments in a container that cannot be compared"
    return "" if tensors else "no tensor among the arguments"


def unwrapped(module: Any) -> Any:
    """Return the user's module inside torch.compile, DataParallel and the like."""
    while (inner := INNER.get(type(module).__name__)) and hasattr(module, inner):
        module = getattr(module, inner)
    return module


def class_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def arrays_of(torch: ModuleType, prefix: str, tensors: Sequence[Any]) -> dict[str, Any]:
    """Return copies of tensors on the host, by number. All floats become fp32."""
    arrays = {}
    for number, tensor in enumerate(tensors):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        copy = tensor.detach().to(device="cpu", dtype=dtype, copy=True)
        arrays[f"{prefix}_{number}"] = copy.numpy(force=True)
    return arrays


def input_names(
    torch: ModuleType, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return a distinct name for every leaf of a call, after the parameters of `forward`."""
    # a positional argument has no other name, and a plan needs one
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = [
        each.name
        for each in parameters
        if each.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    names: list[str] = []
    paths = torch.utils._pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    for (_, first, *rest), _ in paths:
        place = getattr(first, "idx", None)
        start = getattr(first, "key", None) if place is None else f"input_{place}"
        if place is not None and place < len(positional):
            start = positional[place]
        parts = [getattr(key, "key", getattr(key, "idx", "")) for key in rest]
        name = re.sub(r"\W", "_", "_".join(map(str, (start, *parts))))
        taken = name in names or name in PARAMETERS_OF_SAVEZ
        names.append(f"{name}_{len(names)}" if taken else name)
    return names


def say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the script may have closed its stderr
        print(f"crucible record: {text}", file=sys.__stderr__, flush=True)


def own_sources() -> dict[str, Path]:
    """Return the source files of imported modules that are not installed.

    The keys are paths from the folder that the module is imported from.
    """
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    sources = {}
    for name, module in list(sys.modules.items()):
        # torch has modules without a file: their __file__ names none, and they have no spec
        spec = getattr(module, "__spec__", None)
        file = Path(getattr(spec, "origin", None) or "").resolve()
        installed = {"site-packages", "dist-packages"} & set(file.parts)
        if installed or any(map(file.is_relative_to, standard)):
            continue
        if file.suffix != ".py" or not file.is_file():
            continue
        if name in ("__main__", __name__, "sitecustomize"):
            continue
        tail = f"/{file.name}" if file.stem == "__init__" else ".py"
        sources[name.replace(".", "/") + tail] = file
    return sources


# --- start and end ---


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Attaches the recorder as soon as torch has been imported."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self._recorder._safely(self._recorder.attach, module)
                # runs before torch's own handlers, which take away its operators
                atexit.register(_end, self._recorder)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def start(settings: Mapping[str, Any]) -> None:
    """Record from now to the end of this process. `settings` come from `crucible record`."""
    recorder = Recorder(
        Path(settings["folder"]), settings["samples"], settings["max_bytes"], settings["module"]
    )
    sys.meta_path.insert(0, _AfterTorch(recorder))
    atexit.register(_end, recorder)  # for a script that never imports torch


def _end(recorder: Recorder) -> None:
    """Store what was recorded, or why nothing was, for `crucible record`."""
    if not recorder.is_own_process or recorder.is_ended:
        return
    recorder.is_ended = True
    recorder.detach()
    if recorder.modules:
        say("the script has ended; storing the module")
    recorder.sources = own_sources()
    for name in [name for name in sys.modules if name.partition(".")[0] == "pipeline"]:
        del sys.modules[name]  # the script's own package, which has ended
    sys.path.insert(0, str(Path(__file__).parents[2]))
    try:
        from pipeline.recording.storing import store

        outcome = store(recorder)
        draft = recorder.folder / f".{OUTCOME}"
        draft.write_bytes(pickle.dumps(outcome))
        draft.rename(recorder.folder / OUTCOME)
    except KeyboardInterrupt:
        say("warning: interrupted while the module was stored")
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        # Python ends by SIGINT if the last code that it ran was interrupted. That was the script.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
