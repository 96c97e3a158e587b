"""What a compile leaves for its user: a folder with the reports and the winning engine; and what `crucible onnx` writes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from pipeline.core import Engine, OnnxModel
from pipeline.errors import ModelError, PlanError

ENGINE_FILE = "engine.json"


def check_folder(folder: Path) -> None:
    """PlanError unless `folder` is one that can be written, or made: said before the work, not after it."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "cannot be written" if place.is_dir() else "is a file"
        raise PlanError(f"cannot write to '{folder}': '{place}' {what}", "name another folder with --out")


def check_model_file(file: Path, source: Path | None) -> None:
    """PlanError unless `file` is an .onnx file that can be written, and not the `source` itself."""
    if file.suffix != ".onnx" or file.is_dir():
        raise PlanError(f"expected --out as a file that ends in .onnx, got '{file}'", "for example --out model.onnx")
    if source is not None and file.resolve() == source.resolve():
        raise PlanError(f"--out would overwrite '{source}', the model of the plan", "name another file")
    check_folder(file.parent)


def deliver_model(model: OnnxModel, file: Path) -> None:
    """Write a model as `file`, its weights beside it where they exceed 1.5 GB; what is there is replaced once all is written."""
    from pipeline.graph import read_proto, write_proto  # loads onnx, which the service does without

    work = file.with_name(f".{file.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        write_proto(read_proto(model.path), work / file.name)
        for written in sorted(work.iterdir(), reverse=True):  # the weights come before the graph that names them
            written.replace(file.with_name(written.name))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def deliver_engine(engine: Engine, folder: Path) -> None:
    """Put an engine into `folder`, replacing what is there at once."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        shutil.copytree(engine.root, work)
        (work / ENGINE_FILE).write_text(engine.model_dump_json(indent=1), encoding="utf-8")
        if folder.is_dir():  # a file of that name is not ours: the rename below fails and leaves it
            folder.rename(old := folder.with_name(f".{folder.name}.{os.getpid()}.old"))
            shutil.rmtree(old)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def withdraw_engine(folder: Path) -> None:
    """Remove an engine that an earlier compile delivered, if there is one; anything else there is left alone."""
    if (folder / ENGINE_FILE).is_file():
        shutil.rmtree(folder)


def load_engine(folder: Path) -> Engine:
    """The engine that `deliver_engine` put there."""
    file = folder / ENGINE_FILE if (folder / ENGINE_FILE).is_file() else folder / "engine" / ENGINE_FILE
    if not file.is_file():
        raise ModelError(f"no engine in '{folder}': expected {ENGINE_FILE}", "give the folder that `crucible compile --out` wrote")
    try:
        return Engine.model_validate({**json.loads(file.read_text(encoding="utf-8")), "root": file.parent})
    except ValueError as error:
        raise ModelError(f"'{file}' is not an engine of this version: {str(error).partition(chr(10))[0]}", "compile the model again") from error
