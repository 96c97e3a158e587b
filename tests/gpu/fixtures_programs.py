"""PyTorch programs of a GPU: what each model of the tests takes, and packages that crash on a
host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pipeline.core import Profile, TensorSpec
from pipeline.errors import LoadCrashed
from tests.pipeline.backends.pytorch.builders import CLASSES, IMAGE

X = TensorSpec(name="x", dtype="float32", shape=("batch", 12, 16), kind="dynamic")
TOKENS = X.model_copy(update={"shape": ("batch", "sequence", 32)})
Y = TensorSpec(name="output_0", dtype="float32", shape=("batch", 4), kind="dynamic")
MODELS = {
    "residual_cnn": (IMAGE, CLASSES.model_copy(update={"name": "output_0"})),
    "recurrent": (X, Y),
    "block": (TOKENS, Y.model_copy(update={"shape": TOKENS.shape})),
}
RANGES = {"batch": [1, 4, 16], "sequence": [1, 8, 32]}


def profile_of(name: str) -> Profile:
    """The ranges of the dimensions that a model has, and of no other."""
    spec, _ = MODELS[name]
    return Profile.model_validate({"dims": {symbol: RANGES[symbol] for symbol in spec.symbols}})


@contextlib.contextmanager
def skipped_if_packages_crash() -> Iterator[None]:
    """Skip where a package that was built here crashes here, in PyTorch alone too; say so."""
    try:
        yield
    except LoadCrashed as error:
        pytest.skip(f"PyTorch's AOTInductor packages crash on this host: {error.message}")
