"""From a model to a folder of ONNX Runtime GenAI, by the library's own builder.

The builder reads a folder of Hugging Face, so the dequantised weights of a GGUF file are written as
one first. It runs in this process, which is a child that may be stopped, and needs no network.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx

from pipeline.errors import UnsupportedError
from pipeline.llm.export import last_line
from pipeline.llm.hf import load_model, load_tokenizer
from pipeline.llm.plan import LanguageCandidate
from pipeline.llm.source import Source

GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
BUILDER = "onnxruntime_genai.models.builder"
EXACT, INT8_ACTIVATIONS = 1, 4  # the builder's accuracy levels of products with few bits

PARTLY_READ = {"Gather", "GatherBlockQuantized", "GroupQueryAttention"}
"""Operators that read one row of embeddings, and of positions."""


def build_folder(source: Source, recipe: LanguageCandidate, out: Path) -> None:
    """Write graph, weights and tokenizer into `out`. UnsupportedError if the builder cannot."""
    work = out / "work"
    try:
        given = source.path
        if source.kind == "gguf":
            given = work / "given"
            write_plain(source, given)
        _run_builder(["-i", str(given), "-o", str(out), "-c", str(work), *builder_options(recipe)])
    finally:
        shutil.rmtree(work, ignore_errors=True)


def builder_options(recipe: LanguageCandidate) -> list[str]:
    """Return the builder's words for the format of a candidate."""
    bits, _, zero_point = recipe.weights.partition("_")
    options = ["hf_token=false", "hf_remote=false"]  # no login, and no code of the model
    if bits.startswith("int"):
        level = EXACT if recipe.arithmetic == "f32" else INT8_ACTIVATIONS
        options += [
            f"block_size={recipe.group_size}",
            f"is_symmetric={'true' if zero_point == 'sym' else 'false'}",
            f"accuracy_level={level}",
            # as NNCF does: few bits in the embeddings and in the last product cost much accuracy
            "shared_embeddings=false",
            "op_types_to_quantize=MatMul",
            "matmul_mixed_precision=last_matmul:int8",
        ]
    return ["-e", "cpu", "-p", bits, "--extra_options", *options]


def write_plain(source: Source, folder: Path) -> None:
    """Write the dequantised weights of a GGUF file. transformers still takes the module for a
    quantised one, which it does not convert; so they go into a new module.
    """
    model = load_model(source)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def _run_builder(words: list[str]) -> None:
    """Run the builder as its command does: the functions below it change with each release."""
    printed = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            _arguments(words),
        ):
            runpy.run_module(BUILDER, run_name="__main__")
    except Exception as error:
        raise UnsupportedError(
            f"the builder of ONNX Runtime GenAI failed: {type(error).__name__}: {last_line(error)}",
            "leave this candidate out",
        ) from error


@contextlib.contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, [BUILDER, *words]
    try:
        yield
    finally:
        sys.argv = before


def constant_bytes_read(file: Path) -> int:
    """Return the bytes of the constants of a graph that one token reads in full."""
    graph = onnx.load(file, load_external_data=False).graph
    users = dict[str, set[str]]()
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, set()).add(node.op_type)
    return sum(
        _bytes_of(constant)
        for constant in graph.initializer
        if not users.get(constant.name, set()) <= PARTLY_READ
    )


def _bytes_of(constant: onnx.TensorProto) -> int:
    for entry in constant.external_data:
        if entry.key == "length":
            return int(entry.value)
    return int(onnx.numpy_helper.to_array(constant).nbytes)
