"""Every kernel compiles for a GPU of compute capability 9.0, which needs none here: Triton's
interpreter takes what its compiler refuses.
"""

from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

FLAGS = dict.fromkeys(("NORM", "SCALE", "BIAS", "RESIDUAL", "GATED"), True)
WHOLE = {"rows_out", "size", "context", "parts"}
DOUBLE = {"tokens", "positions", "places"}
NUMBERS = {"epsilon", "factor"}
HALF = {"embedding", "weight", "bias", "norm", "keys", "values", "query_norm", "key_norm"}


def type_of(name: str) -> str:
    """The type of an argument, in Triton's words."""
    if name.isupper():
        return "constexpr"
    if name in NUMBERS:
        return "fp32"
    if name in WHOLE:
        return "i32"
    return "*i64" if name in DOUBLE else "*bf16" if name in HALF else "*fp32"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("embed", {"BLOCK": 1024}),
        ("product", {"ROWS": 4, "COLUMNS": 1024, **FLAGS}),
        ("attention", {"HEADS": 32, "CACHE_HEADS": 8, "HALF": 64, "BLOCK": 64, "NORMS": True}),
        ("best_of_parts", {"BLOCK": 1024}),
        ("choice", {"BLOCK": 128}),
    ],
)
def test_it_compiles(
    name: str,
    constants: dict[str, Any],
    overlap: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pipeline.llm.torch_engine import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(kernels, name)
    if "OVERLAP" in kernel.arg_names:
        constants = constants | {"OVERLAP": overlap}
    source = ASTSource(
        fn=kernel,
        signature={each: type_of(each) for each in kernel.arg_names},
        constexprs={(kernel.arg_names.index(each),): value for each, value in constants.items()},
    )
    options = {"num_warps": 4, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    waits = made.asm["ptx"].count("griddepcontrol.wait")
    assert waits == (1 if overlap and name != "embed" else 0)
