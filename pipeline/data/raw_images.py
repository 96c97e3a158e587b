"""A check of sets for inputs that the engine preprocesses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.core.shapes import TensorSpec
from pipeline.data.input_checks import spec_text
from pipeline.data.npz import read_headers
from pipeline.errors import DataError
from pipeline.preprocess import Steps, inverse_in_numpy


def check_raw(paths: Sequence[Path], inputs: tuple[TensorSpec, ...], steps: Steps) -> None:
    """Raise DataError for a file with images that are no uint8, such as preprocessed ones.

    `inputs` are those of the engine. Other faults of the file are found by `open_set`.
    """
    specs = {spec.name: spec for spec in inputs if spec.name in steps}
    for path in paths if specs else ():
        for array, header in read_headers(path).items():
            name = array.rpartition("/")[2]  # of a numbered sample too
            if name in specs and header.dtype != "uint8":
                raise DataError(
                    f"'{path}': '{array}' is {header.dtype} {list(header.shape)}, and with"
                    f" `preprocess` the engine takes {spec_text(specs[name])}",
                    _advice(name, steps),
                )


def _advice(name: str, steps: Steps) -> str:
    step = steps[name]
    advice = "save the images as they are before any step"
    if step.resize:
        return advice
    undone = inverse_in_numpy(name, step)
    return f"{advice}; if the set was made with these steps, `{name} = {undone}` undoes them"
