"""What a compile leaves for its user: a folder with the reports and the winning engine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from pipeline.core import Engine
from pipeline.errors import ModelError

ENGINE_FILE = "engine.json"


def deliver_engine(engine: Engine, folder: Path) -> None:
    """Put an engine into `folder`, replacing what is there at once."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        shutil.copytree(engine.root, work)
        (work / ENGINE_FILE).write_text(engine.model_dump_json(indent=1), encoding="utf-8")
        if folder.exists():
            folder.rename(old := folder.with_name(f".{folder.name}.{os.getpid()}.old"))
            shutil.rmtree(old)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def load_engine(folder: Path) -> Engine:
    """The engine that `deliver_engine` put there."""
    file = folder / ENGINE_FILE if (folder / ENGINE_FILE).is_file() else folder / "engine" / ENGINE_FILE
    if not file.is_file():
        raise ModelError(f"no engine in '{folder}': expected {ENGINE_FILE}", "give the folder that `crucible compile --out` wrote")
    try:
        return Engine.model_validate({**json.loads(file.read_text(encoding="utf-8")), "root": file.parent})
    except ValueError as error:
        raise ModelError(f"'{file}' is not an engine of this version: {error}", "compile the model again") from error
