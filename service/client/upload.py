"""The files of a compile, streamed from the disk."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pipeline.errors import UserError
from service.submission.tar import tar
from service.submission.uploads import PARTS

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Upload:
    """Files to compile. `model`: ONNX, an archive of ONNX with external data, or safetensors with
    an `architecture` in the plan; of a language model, a GGUF file, or a folder as Hugging Face
    writes it, of which only the files that are read are sent. A text stands for a file's content.
    """

    model: Path
    plan: Path | str | None = None
    calibration: Path | str | None = None  # .npz, or .jsonl for a language model
    selection: Path | str | None = None
    validation: Path | str | None = None
    selection_labels: Path | str | None = None  # .json (boxes in the format of COCO) or .jsonl
    validation_labels: Path | str | None = None
    tokenizer: Path | str | None = None  # tokenizer.json, with `serving.text` in the plan

    def parts(self, files: contextlib.ExitStack) -> dict[str, tuple[str, IO[bytes] | str]]:
        """Return the parts of the upload by name: each with its file's name and content."""
        parts: dict[str, tuple[str, IO[bytes] | str]] = {}
        for name in PARTS:
            part: Path | str | None = getattr(self, name)
            if isinstance(part, str):
                parts[name] = ("plan.yaml" if name == "plan" else f"{name}.jsonl", part)
            elif part is not None and part.is_dir():
                parts[name] = (f"{part.resolve().name}.tar", packed_model(part))
            elif part is not None:
                parts[name] = (part.name, files.enter_context(_open(part)))
        return parts


def packed_model(folder: Path) -> IO[bytes]:
    """Return a tar of a language model's folder, made while it is read. ModelError if a file is
    missing.
    """
    from pipeline.llm.source import model_files

    _, files = model_files(folder)
    return io.BufferedReader(_Chunks(tar(folder.resolve(), [file.resolve() for file in files])))


class _Chunks(io.RawIOBase):
    """A file of the bytes that an iterator yields."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            try:
                self._rest = next(self._chunks)
            except StopIteration:
                return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(
            f"cannot read '{path}': {error.strerror}", "check the path and its permissions"
        ) from error
