"""Every kernel compiles for a GPU of compute capability 9.0, which needs none here: Triton's
interpreter takes what its compiler refuses.
"""

from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

FLAGS = dict.fromkeys(("NORM", "BIAS", "RESIDUAL", "GATED"), True)
WHOLE = {"rows_out", "size", "context", "parts", "words", "rows", "channels"}
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


FORMS: list[dict[str, Any]] = [
    {"FORM": "int8", "GROUP": 0, "ZERO": False},
    {"FORM": "fp8", "GROUP": 0, "ZERO": False},
    {"FORM": "int4", "GROUP": 32, "ZERO": False},
    {"FORM": "int4", "GROUP": 128, "ZERO": True},
]
TILE = {"ROWS": 32, "CHANNELS": 64, "INPUTS": 128}


def compiled(kernel: Any, constants: dict[str, Any], types: dict[str, str], cache: Path) -> Any:
    """Compile a kernel for an H100, for addresses and sizes that are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {each: types.get(each) or type_of(each) for each in kernel.arg_names}
    multiples = [
        number for number, each in enumerate(signature.values()) if each[0] == "*" or each == "i32"
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(each),): value for each, value in constants.items()},
        attrs={(number,): [["tt.divisibility", 16]] for number in multiples},
    )
    options = {"num_warps": 4, "enable_fp_fusion": True}
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("embed", {"BLOCK": 1024}),
        ("product", {"ROWS": 4, "COLUMNS": 1024, "SCALE": True, **FLAGS}),
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
) -> None:
    from pipeline.llm.torch_engine import kernels

    kernel = getattr(kernels, name)
    if "OVERLAP" in kernel.arg_names:
        constants = constants | {"OVERLAP": overlap}
    waits = compiled(kernel, constants, {}, tmp_path).asm["ptx"].count("griddepcontrol.wait")
    assert waits == (1 if overlap and name != "embed" else 0)


@pytest.mark.parametrize("weight", ["*i8", "*fp8e4nv"])
def test_rows_of_bytes_compile_too(weight: str, tmp_path: Path) -> None:
    from pipeline.llm.torch_engine import kernels

    constants = {"ROWS": 4, "COLUMNS": 1024, "SCALE": True, **FLAGS, "OVERLAP": True}
    types = {"weight": weight, "scale": "*fp32"}
    made = compiled(kernels.product, constants, types, tmp_path)
    assert made.asm["ptx"].count("griddepcontrol.wait") == 1


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form['FORM']} g{form['GROUP']}")
def test_words_reach_the_registers_of_their_inputs(form: dict[str, Any], tmp_path: Path) -> None:
    """No data crosses between warps in the loop: that would take a barrier for each turn."""
    from pipeline.llm.torch_engine import words

    types = {"weight": "*i32", "scale": "*bf16" if form["GROUP"] else "*fp32", "zero": "*u8"}
    constants = {"ROWS": 4, "COLUMNS": 128, **FLAGS, **form, "OVERLAP": True}
    made = compiled(words.quantised_product, constants, types, tmp_path)
    assert made.asm["ptx"].count("griddepcontrol.wait") == 1
    loop, _, end = made.asm["ptx"].rpartition("bra")
    assert "bar.sync" not in loop
    assert "bar.sync" in end, "the sums at the end meet"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form['FORM']} g{form['GROUP']}")
def test_rows_meet_weights_on_the_tensor_cores(form: dict[str, Any], tmp_path: Path) -> None:
    from pipeline.llm.torch_engine import row_kernels

    types = {"weight": "*u8" if form["GROUP"] else "*i8", "x": "*bf16", "zero": "*u8"}
    types["scale"] = "*bf16" if form["GROUP"] else "*fp32"
    kernel = row_kernels.product_of_rows.fn
    made = compiled(kernel, {**TILE, **form}, types, tmp_path)
    assert "wgmma" in made.asm["ptx"] or "mma.sync" in made.asm["ptx"]
