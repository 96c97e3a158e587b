"""The libraries by name. Each is imported when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.llm.libraries.protocol import Library
    from pipeline.llm.plan import LibraryName


def library_of(name: LibraryName) -> Library:
    """Return a library's module."""
    if name == "torch":
        from pipeline.llm.libraries import torch_

        return torch_
    if name == "onnxruntime_genai":
        from pipeline.llm.libraries import onnxruntime_genai_

        return onnxruntime_genai_
    from pipeline.llm.libraries import openvino_genai_

    return openvino_genai_
