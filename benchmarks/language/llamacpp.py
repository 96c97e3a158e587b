"""llama.cpp as a contestant: llama-cpp-python, which has no wheel and is built from source.

    uv venv build/llamacpp && uv pip install --python build/llamacpp --no-deps \\
        llama-cpp-python diskcache

builds it, with a compiler and cmake. Its folder `site-packages` is put behind this Python's own.
Where a virtual machine shows AMX without describing its tiles (pipeline/host/amx.py), llama.cpp
dies of SIGILL too: build it with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON
-DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_BF16=ON", which leaves AMX out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.recipe import Precision
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generation, Room
from pipeline.llm.source import open_gguf
from pipeline.measurement.clock import monotonic

PACKAGE = "llama_cpp"


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """A GGUF file in llama.cpp, as the race knows it."""

    file: Path
    packages: Path | None  # the folder in which llama-cpp-python is; None: it is installed here
    label: str
    precision: Precision = Precision.INT4
    is_on_gpu: bool = False

    @property
    def recipe(self) -> LlamaCpp:
        return self

    def bytes_read(self) -> int:
        return file_bytes_read(self.file)

    def open(self, room: Room) -> InLlamaCpp:
        return InLlamaCpp(self.file, room)


def file_bytes_read(file: Path) -> int:
    """Return the bytes of the tensors that one token reads in full."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in open_gguf(file).tensors}
    if "output.weight" in sizes:  # then only one row of the embeddings is read
        sizes.pop("token_embd.weight", None)
    return sum(sizes.values())


class InLlamaCpp:
    """The file opened by llama.cpp."""

    def __init__(self, file: Path, room: Room) -> None:
        import llama_cpp

        threads = room.threads or None
        self._model = llama_cpp.Llama(
            str(file),
            n_ctx=room.context,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def generate_together(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        """Continue prompts one after another: the Python package serves one at a time."""
        begin = monotonic()
        return tuple(self._generate(prompt, tokens, begin) for prompt in prompts)

    def _generate(self, prompt: Ids, tokens: int, begin: float) -> Generation:
        self._model.reset()  # else a repeated prompt would come from its cache
        answer, times_s = list[int](), list[float]()
        given = [int(number) for number in prompt]
        for token in self._model.generate(given, temp=0.0, top_k=1, reset=False):
            answer.append(token)
            times_s.append(monotonic() - begin)
            if len(answer) == tokens:
                break
        return Generation(np.asarray(answer), np.empty(0), tuple(times_s))

    def cache_bytes_per_token(self) -> float:
        return 0.0
