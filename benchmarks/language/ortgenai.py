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

from pipeline.core.recipe import Precision
from pipeline.llm.ort_genai.files import BUILDER, GRAPH_FILE, constant_bytes_read, write_plain
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generation, Room
from pipeline.llm.source import Source
from pipeline.measurement.clock import monotonic

PACKAGE = "onnxruntime_genai"


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
        return constant_bytes_read(self.folder / GRAPH_FILE)

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
            write_plain(source, given)
        command = [sys.executable, "-m", BUILDER, "-i", str(given)]
        command += ["-o", str(work / "built"), "-c", str(work / "cache"), "-p", "int4", "-e", "cpu"]
        path = os.pathsep.join([*filter(None, sys.path), *([str(packages)] if packages else [])])
        environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
        (work / "built").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


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
