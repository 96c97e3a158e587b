"""What a compile leaves for its user: a folder with the reports and the winning engine; and what
`crucible onnx` writes.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from pathlib import Path

from pipeline.core import Engine, OnnxModel, Provenance
from pipeline.errors import DamagedError, ModelError, PlanError
from pipeline.execution.store import (
    MANIFEST,
    check_manifest,
    damage,
    now,
    read_manifest,
    write_manifest,
)
from pipeline.host.replace_folder import (
    Exchange,
    current_folder,
    exchange_names,
    locked,
    replace_folder,
)

ENGINE_FILE = "engine.json"
LEFTOVER = re.compile(r"[0-9]+(\.old)?")  # after the folder's name: a delivery that was killed
AGAIN = "compile the model again: what is still in the store is not made again"


def check_folder(folder: Path) -> None:
    """PlanError unless `folder` is one that can be written, or made: said before the work, not
    after it.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "cannot be written" if place.is_dir() else "is a file"
        raise PlanError(
            f"cannot write to '{folder}': '{place}' {what}", "name another folder with --out"
        )


def check_model_file(file: Path, source: Path | None) -> None:
    """PlanError unless `file` is an .onnx file that can be written, and not the `source` itself."""
    if file.suffix != ".onnx" or file.is_dir():
        raise PlanError(
            f"expected --out as a file that ends in .onnx, got '{file}'",
            "for example --out model.onnx",
        )
    if source is not None and file.resolve() == source.resolve():
        raise PlanError(
            f"--out would overwrite '{source}', the model of the plan", "name another file"
        )
    check_folder(file.parent)


def deliver_model(model: OnnxModel, file: Path) -> None:
    """Write a model as `file`, its weights beside it where they exceed 1.5 GB; what is there is
    replaced once all is written.
    """
    from pipeline.onnx_graph.files import (
        read_proto,
        write_proto,
    )  # loads onnx, which the service does without

    work = file.with_name(f".{file.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        write_proto(read_proto(model.path), work / file.name)
        for written in sorted(
            work.iterdir(), reverse=True
        ):  # the weights come before the graph that names them
            written.replace(file.with_name(written.name))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def deliver_engine(engine: Engine, folder: Path, exchange: Exchange = exchange_names) -> None:
    """Put an engine into `folder`, in place of what is there. DamagedError if it cannot be copied.

    Whenever this process is killed, `load_engine` finds the old engine or the new one, and the next
    delivery removes what is left.
    """
    work = _work(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent) as is_alone:
        if is_alone:
            _remove_leftovers(folder)
        shutil.rmtree(work, ignore_errors=True)
        try:
            shutil.copytree(engine.root, work)
            (work / ENGINE_FILE).write_text(engine.model_dump_json(indent=1), encoding="utf-8")
            if not (work / MANIFEST).is_file():  # it does not come from a store
                seal(work, engine)
            load_engine(work)  # the copy is what the manifest says, too
            replace_folder(work, folder, exchange)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def withdraw_engine(folder: Path) -> None:
    """Remove an engine that an earlier compile delivered; leave anything else there alone."""
    if not (current_folder(folder) / ENGINE_FILE).is_file():
        return
    with locked(folder.parent):
        gone = _work(folder)  # in one step: half an engine would be worse than none
        shutil.rmtree(gone, ignore_errors=True)
        current_folder(folder).rename(gone)
        shutil.rmtree(gone)


def _work(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}")


def _remove_leftovers(folder: Path) -> None:
    """Remove what deliveries to `folder` left that were killed."""
    start = f".{folder.name}."
    for path in folder.parent.glob(f"{glob.escape(start)}*"):
        if LEFTOVER.fullmatch(path.name.removeprefix(start)):
            shutil.rmtree(path, ignore_errors=True)


# -- an engine that was delivered ---------------------------------------------------------------


def load_engine(folder: Path) -> Engine:
    """Return the engine that `deliver_engine` put there, after a check of every file.

    DamagedError names a file that is not what it was. Without a manifest, which every delivery
    writes, nothing is known against the files: see `has_manifest`.
    """
    engine = read_engine(folder)
    check_if_sealed(engine)
    return engine


def read_engine(folder: Path, name: str = "") -> Engine:
    """Return the engine as its engine.json describes it, which must be as the manifest does.

    No other file is looked at. ModelError if there is none, DamagedError if it is not what it was;
    `name` is what the message then calls the engine.
    """
    place = folder if (folder / ENGINE_FILE).is_file() else current_folder(folder / "engine")
    file = place / ENGINE_FILE
    if not file.is_file():
        advice = "give the folder that `crucible compile --out` wrote"
        raise ModelError(f"no engine in '{folder}': expected {ENGINE_FILE}", advice)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        engine = Engine.model_validate({**content, "root": place})
    except (TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        text = f"'{ENGINE_FILE}' is not an engine of this version: {reason}"
        raise _damaged(place, text, name) from error
    if has_manifest(engine):
        _check_description(engine, name)
    return engine


def has_manifest(engine: Engine) -> bool:
    """Return whether the digests of an engine's files lie beside them."""
    return (engine.root / MANIFEST).is_file()


def check_if_sealed(engine: Engine) -> None:
    """Check an engine as `check_engine` does, where there is a manifest."""
    if has_manifest(engine):
        check_engine(engine)


def check_engine(engine: Engine, name: str = "") -> None:
    """Raise DamagedError unless the files of an engine are those that its manifest lists.

    Nothing may be missing, changed or added. `name` is what the message calls the engine.
    """
    try:
        check_manifest(engine.root, besides=(ENGINE_FILE,))
    except (OSError, ValueError) as error:
        raise _damaged(engine.root, damage(error), name) from error


def _check_description(engine: Engine, name: str) -> None:
    try:
        manifest = read_manifest(engine.root)
        written = Engine.model_validate({**manifest.value, "root": engine.root})
    except (OSError, ValueError) as error:
        raise _damaged(engine.root, damage(error), name) from error
    if written.model_dump_json() != engine.model_dump_json():
        raise _damaged(engine.root, f"'{ENGINE_FILE}' is not what '{MANIFEST}' says", name)


def _damaged(root: Path, reason: str, name: str) -> DamagedError:
    what = name or f"the engine in '{root}'"
    return DamagedError(f"{what} is damaged: {reason}", AGAIN)


def seal(folder: Path, engine: Engine) -> None:
    """Write the manifest of an engine's folder, with the sha256 of every file."""
    about = Provenance(
        stage="deliver",
        stage_version=1,
        inputs=(engine.digest,),
        options="",
        tools={},
        target=engine.target,
        created=now(),
        seconds=0,
    )
    write_manifest(folder, engine, about, besides=(ENGINE_FILE,))
