"""The output of a compile: a folder with the winning engine. And the output of `crucible onnx`."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pipeline.core.artifacts import Artifact, Engine, OnnxModel, Provenance
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

A = TypeVar("A", bound=Artifact)

ENGINE_FILE = "engine.json"
LEFTOVER = re.compile(
    r"[0-9]+(\.old)?"
)  # after the folder's name, left by a delivery that was killed
AGAIN = "compile the model again: results that are still in the store are reused"


def check_folder(folder: Path) -> None:
    """Raise PlanError unless `folder` can be written or created, before any work is done."""
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        what = "cannot be written" if parent.is_dir() else "is a file"
        raise PlanError(
            f"cannot write to '{folder}': '{parent}' {what}", "name another folder with --out"
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
    """Write a model as `file`. Weights of more than 1.5 GB are beside it.

    An existing file is replaced when everything is written.
    """
    # This import loads onnx, which the service does without.
    from pipeline.onnx_graph.files import read_proto, write_proto

    work = file.with_name(f".{file.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        write_proto(read_proto(model.path), work / file.name)
        # The weights come before the graph that names them.
        for part in sorted(work.iterdir(), reverse=True):
            part.replace(file.with_name(part.name))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def deliver_engine(
    engine: Artifact,
    folder: Path,
    exchange: Exchange = exchange_names,
    beside: Mapping[str, Path] | None = None,
) -> None:
    """Put an engine into `folder`, and replace an earlier one. DamagedError if a copy fails.

    `beside`: further files by their name there, which the manifest then lists too. An engine that
    was delivered with such a file keeps its own.

    If this process is killed, `load_engine` finds the old engine or the new one, and the next
    delivery removes the leftovers.
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
            if isinstance(engine, Engine) and not (work / MANIFEST).is_file():
                seal(work, engine)  # it does not come from a store
            _add_files(work, engine, beside or {})
            load_delivered(work, type(engine))  # checks the copy against the manifest
            replace_folder(work, folder, exchange)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def _add_files(work: Path, engine: Artifact, beside: Mapping[str, Path]) -> None:
    new = {name: file for name, file in beside.items() if not (work / name).is_file()}
    if not new:
        return
    check_engine(engine.model_copy(update={"root": work}))
    provenance = read_manifest(work).provenance
    for name, file in new.items():
        shutil.copyfile(file, work / name)
    write_manifest(work, engine, provenance, besides=(ENGINE_FILE,))


def withdraw_engine(folder: Path) -> None:
    """Remove an engine that an earlier compile delivered. Other content of the folder stays."""
    if not (current_folder(folder) / ENGINE_FILE).is_file():
        return
    with locked(folder.parent):
        # Renamed in one step first: half an engine would be worse than none.
        trash = _work(folder)
        shutil.rmtree(trash, ignore_errors=True)
        current_folder(folder).rename(trash)
        shutil.rmtree(trash)


def _work(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}")


def _remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of deliveries to `folder` that were killed."""
    prefix = f".{folder.name}."
    for path in folder.parent.glob(f"{glob.escape(prefix)}*"):
        if LEFTOVER.fullmatch(path.name.removeprefix(prefix)):
            shutil.rmtree(path, ignore_errors=True)


# -- a delivered engine ------------------------------------------------------


def load_engine(folder: Path) -> Engine:
    """Return the engine that `deliver_engine` put there, after a check of every file.

    DamagedError names a file that has changed. Every delivery writes a manifest; without one, the
    files cannot be checked (`has_manifest`).
    """
    return load_delivered(folder, Engine)


def load_delivered(folder: Path, kind: type[A]) -> A:
    """Return the engine of a kind, as `load_engine` does."""
    engine = read_delivered(folder, kind)
    check_if_sealed(engine)
    return engine


def read_engine(folder: Path, name: str = "") -> Engine:
    """Return the engine as its engine.json describes it. No other file is checked.

    ModelError if there is none. DamagedError if it differs from the manifest; the message calls the
    engine `name`.
    """
    return read_delivered(folder, Engine, name)


def read_delivered(folder: Path, kind: type[A], name: str = "") -> A:
    """Return the engine of a kind, as `read_engine` does."""
    root = _root_of(folder)
    file = root / ENGINE_FILE
    if not file.is_file():
        advice = "give the folder that `crucible compile --out` wrote"
        raise ModelError(f"no engine in '{folder}': expected {ENGINE_FILE}", advice)
    content = None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        engine = kind.model_validate({**content, "root": root})
    except (TypeError, ValueError) as error:
        if kind is Engine and _is_of_language_model(content):
            raise ModelError(
                f"'{root}' holds a language model, expected an engine with inputs and outputs",
                "`crucible report` shows what was found of it",
            ) from error
        reason = str(error).partition("\n")[0]
        text = f"'{ENGINE_FILE}' is not an engine of this version: {reason}"
        raise _damaged(root, text, name) from error
    if has_manifest(engine):
        _check_description(engine, name)
    return engine


def holds_language_model(folder: Path) -> bool:
    """Return True if the engine that was delivered into a folder is a language model. Its files are
    not checked.
    """
    try:
        content = json.loads((_root_of(folder) / ENGINE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return _is_of_language_model(content)


def _root_of(folder: Path) -> Path:
    """Return where the engine of an output folder is; that folder may be its own."""
    return folder if (folder / ENGINE_FILE).is_file() else current_folder(folder / "engine")


def _is_of_language_model(content: object) -> bool:
    """Return True for the description of a language model, which alone names a library."""
    return isinstance(content, dict) and "library" in content


def has_manifest(engine: Artifact) -> bool:
    """Return True if the folder of an engine holds a manifest with the digests of its files."""
    return (engine.root / MANIFEST).is_file()


def check_if_sealed(engine: Artifact) -> None:
    """Check an engine as `check_engine` does, if there is a manifest."""
    if has_manifest(engine):
        check_engine(engine)


def check_engine(engine: Artifact, name: str = "") -> None:
    """Raise DamagedError unless the files of an engine are those that its manifest lists.

    No file may be missing, changed or added. The message calls the engine `name`.
    """
    try:
        check_manifest(engine.root, besides=(ENGINE_FILE,))
    except (OSError, ValueError) as error:
        raise _damaged(engine.root, damage(error), name) from error


def _check_description(engine: Artifact, name: str) -> None:
    try:
        manifest = read_manifest(engine.root)
        original = type(engine).model_validate({**manifest.value, "root": engine.root})
    except (OSError, ValueError) as error:
        raise _damaged(engine.root, damage(error), name) from error
    if original.model_dump_json() != engine.model_dump_json():
        raise _damaged(engine.root, f"'{ENGINE_FILE}' differs from '{MANIFEST}'", name)


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
