"""Find the calls of a module that wait for the device, with file and line.

On a GPU such a call keeps Python from starting the next kernels, and anywhere torch.compile ends
its graph there. Two sources: a function mode sees the calls that hand a value to Python (`.item()`,
`bool(tensor)`), on a CPU too. On a GPU, CUDA's own debug mode also warns of those that wait inside
of PyTorch (`torch.unique`).
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.results.module_findings import Wait

TO_PYTHON = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "unique": "unique",
    "__array__": "numpy.asarray(tensor)",
    "__bool__": "bool(tensor)",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__complex__": "complex(tensor)",
    "__index__": "a tensor as an index",
    "__repr__": "the text of a tensor",
    "__format__": "the text of a tensor",
}
"""Calls that wait whatever their arguments are, as users write them, by the function's name."""

Syncs = Callable[[], AbstractContextManager[Sequence[str] | None]]

OURS = Path(__file__).parents[2]
PACKAGES = ("site-packages", "dist-packages")


def find_waits(
    call: Callable[[], object], root: Path | None, syncs: Syncs = nullcontext
) -> tuple[Wait, ...]:
    """Call a module once, and return its calls that wait, in the order of their first.

    Paths are relative to `root`, the folder of the user's code, or to the folder of packages.
    `syncs` is entered for each function of torch, and gives what waited in it: `cuda_syncs`.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    torch_folder = Path(torch.__file__).parent
    found: Counter[tuple[str, str]] = Counter()

    class Watch(TorchFunctionMode):  # type: ignore[misc]  # torch is not looked into
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with syncs() as waited:
                result = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", str(func))
            call = call_that_waits(name, args, kwargs or {}) or (name if waited else "")
            if call:
                found[call, _place(torch_folder, root)] += 1
            return result

    with torch.inference_mode(), Watch():
        call()
    return tuple(Wait(call=name, where=where, count=n) for (name, where), n in found.items())


def call_that_waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a call of a function of torch as users write it, if it waits for a tensor's values;
    else "".
    """
    import torch

    if name == "to":  # the device of another tensor may be the CPU too: only the word is a sign
        return ".to('cpu')" if "cpu" in args[1:] or kwargs.get("device") == "cpu" else ""
    if name == "where":
        return "torch.where(condition)" if len(args) == 1 and not kwargs else ""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = (torch.bool, torch.uint8)
        has_mask = any(isinstance(part, torch.Tensor) and part.dtype in masks for part in index)
        return "a mask as an index" if has_mask else ""
    return TO_PYTHON.get(name, "")


@contextmanager
def cuda_syncs() -> Iterator[list[str]]:
    """Collect CUDA's warnings of operations that wait."""
    import torch

    before = torch.cuda.get_sync_debug_mode()
    with sync_warnings() as found:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def sync_warnings() -> Iterator[list[str]]:
    """Collect the warnings of an operation that waits, and drop all others.

    torch has no category for them: the words are those of its C++ code.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield found
        finally:
            texts = (str(each.message) for each in caught)
            found += [text for text in texts if "synchronizing CUDA" in text]


def _place(torch_folder: Path, root: Path | None) -> str:
    """Return file and line of the innermost frame of the module that is not torch's own.

    "" if all frames between `find_waits` and here are torch's.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not find_waits.__code__:
        name = frame.f_code.co_filename
        file = Path(name)
        if not (name.startswith("<") or torch_folder in file.parents or OURS in file.parents):
            return f"{short_path(file, root)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def short_path(file: Path, root: Path | None) -> str:
    """Return a path relative to a folder, or to the folder of packages; else the file's name."""
    if root is not None and file.is_relative_to(root.resolve()):
        return str(file.relative_to(root.resolve()))
    for folder in file.parents:
        if folder.name in PACKAGES:
            return str(file.relative_to(folder))
    return file.name
