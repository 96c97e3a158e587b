"""ONNX Runtime GenAI as a contestant: the package onnxruntime-genai, int4 by its own builder.

The builder reads a folder of Hugging Face and needs no network. Weights have groups of 32 and no
zero point, which is its default; the embeddings stay in fp32.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from pipeline.core import Precision
from pipeline.llm.hf import load_model, load_tokenizer
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generation, Room
from pipeline.llm.source import Source
from pipeline.measurement.clock import monotonic

PACKAGE = "onnxruntime_genai"
PARTLY_READ = {"Gather", "GroupQueryAttention"}  # one row of embeddings, and of positions


@dataclass(frozen=True, slots=True)
class OrtGenai:
    """A folder of ONNX Runtime GenAI, as the race knows it."""

    folder: Path
    packages: Path | None
    label: str = "onnxruntime-genai int4"
    precision: Precision = Precision.INT4
    is_on_gpu: bool = False

    @property
    def recipe(self) -> OrtGenai:
        return self

    def bytes_read(self) -> int:
        return constant_bytes_read(self.folder / "model.onnx")

    def open(self, room: Room) -> InOrtGenai:
        return InOrtGenai(self.folder)


def build(source: Source, packages: Path | None, folder: Path) -> Path:
    """Let the builder write int4 into a folder unless it is there, and return the folder."""
    if folder.is_dir():
        return folder
    work = folder.with_name(f"{folder.name}.{os.getpid()}")
    given = source.path
    try:
        if source.kind == "gguf":
            given = work / "given"
            _write_plain(source, given)
        command = [sys.executable, "-m", f"{PACKAGE}.models.builder", "-i", str(given)]
        command += ["-o", str(work / "built"), "-c", str(work / "cache"), "-p", "int4", "-e", "cpu"]
        path = os.pathsep.join([*filter(None, sys.path), *([str(packages)] if packages else [])])
        environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
        (work / "built").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _write_plain(source: Source, folder: Path) -> None:
    """Write the dequantised weights of a GGUF file in fp16. transformers still takes the module for
    a quantised one, which it does not convert; so they go into a new module.
    """
    model = load_model(source)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.half().save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


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


class InOrtGenai:
    """The folder opened by ONNX Runtime GenAI, with its own number of threads: all cores."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime_genai

        self._library = onnxruntime_genai
        self._model = onnxruntime_genai.Model(str(folder))

    def generate_together(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        """Continue prompts one after another."""
        begin = monotonic()
        return tuple(self._generate(prompt, tokens, begin) for prompt in prompts)

    def _generate(self, prompt: Ids, tokens: int, begin: float) -> Generation:
        whole = prompt.size + tokens
        parameters = self._library.GeneratorParams(self._model)
        parameters.set_search_options(do_sample=False, min_length=whole, max_length=whole)
        generator = self._library.Generator(self._model, parameters)
        generator.append_tokens(prompt.astype(np.int32))
        answer, times_s = list[int](), list[float]()
        for _ in range(tokens):
            generator.generate_next_token()
            answer.append(int(generator.get_next_tokens()[0]))
            times_s.append(monotonic() - begin)
        return Generation(np.asarray(answer), np.empty(0), tuple(times_s))

    def cache_bytes_per_token(self) -> float:
        return 0.0
