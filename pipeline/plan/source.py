"""The model source of a plan: check that it is complete, and digest its content. Loads no torch.

The digest covers the model file with its external data, or the weights and the source text of the
entrypoint's package. So a change of one line of the user's code causes a new export.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import numpy as np

from pipeline.core.artifacts import ModelSource
from pipeline.core.shapes import Profile, TensorSpec, ValueRange
from pipeline.errors import PlanError
from pipeline.plan.schema import AccuracyConfig, ModelConfig

RUN_TIME_IMPORT = re.compile(rb"\b(importlib|__import__|runpy|exec)\b")


def source_from_config(config: ModelConfig, profiles: tuple[Profile, ...]) -> ModelSource:
    """Check that the plan's source is complete and digest its content.

    PlanError for a missing file, an impossible input or a dimension without a range. ModelError for
    an unreadable model file. The inputs of an .onnx file are known only from its graph: check the
    profiles with `check_profiles` after it was read.
    """
    for key, path in (("path", config.path), ("weights", config.weights)):
        if path is not None and not path.is_file():
            raise PlanError(
                f"model.{key}: no file at '{path}'",
                "correct the path; paths in a plan are relative to the plan's own folder",
            )
    source = ModelSource(
        path=config.path,
        entrypoint=config.entrypoint,
        python_path=config.python_path if config.entrypoint else None,
        weights=config.weights,
        inputs=tuple(_checked_spec(spec) for spec in config.inputs),
        outputs=config.outputs,
        seed=config.seed,
    )
    _check_unique("inputs", [spec.name for spec in source.inputs])
    _check_unique("outputs", source.outputs)
    if source.kind != "onnx":
        check_profiles(source.inputs, profiles)
    return source.model_copy(update={"digest": digest_of_source(source)})


def _checked_spec(spec: TensorSpec) -> TensorSpec:
    try:
        known = spec.dtype == "bfloat16" or (
            np.dtype(spec.dtype).name == spec.dtype and np.dtype(spec.dtype).kind in "fiub"
        )
    except TypeError:
        known = False
    if not known:
        advice = (
            "write one of float32, float16, bfloat16, float64, int8 to int64, uint8 to uint64, bool"
        )
        raise PlanError(
            f"model.inputs: input '{spec.name}' has dtype '{spec.dtype}', which is not a numeric"
            " dtype by its full name",
            advice,
        )
    return spec.model_copy(update={"kind": "dynamic"}) if spec.symbols else spec


def _check_unique(key: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(
                f"model.{key}: the name '{name}' appears twice", "give each a name of its own"
            )
        seen.add(name)


# --- profiles ---


def check_profiles(
    inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]
) -> tuple[Profile, ...]:
    """Return the profiles, or one empty profile if a model with fixed shapes has none.

    PlanError if a symbolic dimension has no range in a profile (the default is never 1), if a
    profile names an unknown symbol, or if an input cannot have the values of a range.
    """
    symbols = tuple(dict.fromkeys(symbol for spec in inputs for symbol in spec.symbols))
    for profile in profiles or (Profile(),):
        for name in profile.dims:
            if name not in symbols:
                known = (
                    f"the symbolic dimensions are {', '.join(symbols)}"
                    if symbols
                    else "remove the profile: all dimensions of the inputs are fixed"
                )
                raise PlanError(
                    f"profiles: no input has a dimension '{name}'", _near(name, symbols, known)
                )
        missing = [symbol for symbol in symbols if symbol not in profile.dims]
        if missing:
            spec = next(spec for spec in inputs if missing[0] in spec.symbols)
            where = (
                f"dimension '{missing[0]}' of input '{spec.name}'"
                f" [{', '.join(map(str, spec.shape))}]"
            )
            raise PlanError(
                f"{where} has no range in"
                f" {'a profile' if profiles else 'the plan, which has no profiles'}",
                _advice(symbols, profile),
            )
        for name, values in profile.values.items():
            _check_values(inputs, name, values)
    return profiles or (Profile(),)


def _check_values(inputs: tuple[TensorSpec, ...], name: str, values: ValueRange) -> None:
    """Raise PlanError unless the input exists and holds as many integers as the range."""
    spec = next((spec for spec in inputs if spec.name == name), None)
    if spec is None:
        names = [spec.name for spec in inputs]
        raise PlanError(
            f"profiles.values: the model has no input '{name}'",
            _near(name, names, f"its inputs are {', '.join(names)}"),
        )
    shown = f"input '{name}' is {spec.dtype}[{', '.join(map(str, spec.shape))}]"
    if spec.dtype not in ("int32", "int64"):
        message = f"profiles.values: {shown}, and only int32 and int64 values can decide a shape"
        raise PlanError(
            message,
            f"leave `values` of '{name}' out: they are for inputs such as the target of a Reshape"
            " or the k of a TopK",
        )
    if spec.symbols or len(spec.shape) > 1:
        raise PlanError(
            f"profiles.values: {shown}, expected a fixed shape of rank 0 or 1",
            "fix the number of its values in the model",
        )
    count = math.prod(map(int, spec.shape))
    if len(values.min) != count:
        message = (
            f"profiles.values: {shown}, which has {count} values, and the range gives"
            f" {len(values.min)}"
        )
        raise PlanError(
            message,
            f"write `values: {{{name}: [min, opt, max]}}`, each of them a list of {count} integers",
        )


def _near(name: str, names: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else otherwise


def _advice(symbols: tuple[str, ...], profile: Profile) -> str:
    """Return an example of the ranges, as YAML and as an option. It keeps the ranges given."""
    triples = dict.fromkeys(symbols, (1, 8, 64))
    for symbol in symbols:
        if symbol in profile.dims:
            dim = profile.dims[symbol]
            triples[symbol] = (dim.min, dim.opt, dim.max)
    plan = ", ".join(f"{symbol}: {list(triple)}" for symbol, triple in triples.items())
    options = " ".join(
        f"--profile {symbol}={':'.join(map(str, triple))}" for symbol, triple in triples.items()
    )
    return (
        f"give min, opt and max, for example `profiles: - {{{plan}}}` in the plan, or `{options}`"
    )


# --- digests ---


def digest_of_source(source: ModelSource) -> str:
    """Return the sha256 of everything that determines the model's outputs, without file paths."""
    facts = source.model_dump(mode="json", include={"entrypoint", "inputs", "outputs", "seed"})
    if source.entrypoint is not None:
        facts["code"] = code_digest(source.entrypoint, source.python_path or Path())
    if source.weights is not None:
        facts["weights"] = _file_digest(source.weights)
    if source.path is not None:
        facts["file"] = (
            _onnx_digest(source.path) if source.kind == "onnx" else _file_digest(source.path)
        )
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _onnx_digest(path: Path) -> str:
    # imports onnx, which a run with a cached entrypoint does not need
    from pipeline.onnx_graph.files import file_digest, read_proto

    # raises for a corrupt file, or for external data outside its folder
    read_proto(path, weights=False)
    return file_digest(path)


def accuracy_code(options: AccuracyConfig) -> tuple[str, ...]:
    """Return the digests of the metric and the decoder, if they are the user's functions.

    PlanError if one does not exist.
    """
    functions = options.functions.items()
    return tuple(code_digest(name, options.python_path, key) for key, name in functions)


def code_digest(entrypoint: str, python_path: Path, key: str = "model.entrypoint") -> str:
    """Return the sha256 of the code behind `module:function`.

    For a package under `python_path` it covers all its .py files. For a single module it covers its
    file, and the .py files and packages of its folder that it imports. Both add the versions of the
    packages that they import. For an installed package it covers only the version. PlanError if the
    module does not exist.
    """
    module = entrypoint.partition(":")[0]
    top = module.partition(".")[0]
    spec = PathFinder.find_spec(top, [str(python_path)]) or _installed_spec(top)
    if spec is None:
        advice = (
            f"set {key.partition('.')[0]}.python_path to the folder that holds {top}.py or {top}/,"
            " or install the package"
        )
        raise PlanError(
            f"{key}: no module '{module}' in '{python_path}' or among the installed packages",
            advice,
        )
    site = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    folders = _folders_of(spec)
    if any(folder.is_relative_to(site_folder) for folder in folders for site_folder in site):
        facts = _installed_version(top)
    else:
        texts = {
            str(file.relative_to(folder)): file.read_bytes()
            for folder in folders
            for file in sorted(_sources(folder) if _is_package(spec) else _needed_sources(spec))
        }
        facts = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
        facts |= _imported_versions(texts.values(), top, folders)
    return hashlib.sha256(json.dumps([module, facts], sort_keys=True).encode()).hexdigest()


def _imported_versions(
    texts: Iterable[bytes], top: str, folders: tuple[Path, ...]
) -> dict[str, str]:
    """Return the version of every installed package that the code imports.

    A model from torchvision, for example, changes with torchvision's version.
    """
    imported = {name for text in texts for name in _imported_names(text)}
    local = {entry.stem for folder in folders for entry in folder.iterdir()} | {top}
    versions: dict[str, str] = {}
    for name in sorted(imported - local - sys.stdlib_module_names):
        versions |= _installed_version(name)
    return versions


def _imported_names(text: bytes) -> set[str]:
    """Return the top-level names that a source text imports anywhere in it."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # its import fails later, with a message of its own
        return set()
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {module.partition(".")[0] for module in modules}


def _installed_spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)  # a top-level name: nothing is imported
    except ValueError:  # a module without a spec, created at run time
        return None


def _is_package(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None


def _folders_of(spec: ModuleSpec) -> tuple[Path, ...]:
    """Return the folders of a module's source text: the package, or the folder of a single file."""
    if _is_package(spec):
        return tuple(Path(location).resolve() for location in spec.submodule_search_locations or ())
    return (Path(spec.origin or "").resolve().parent,)


def _installed_version(top: str) -> dict[str, str]:
    try:
        return {top: importlib.metadata.version(top)}
    except importlib.metadata.PackageNotFoundError:
        # the distribution has another name than the module
        versions = (
            (distribution.name, distribution.version)
            for distribution in importlib.metadata.distributions()
            if _provides(distribution, top)
        )
        return dict(sorted(versions))


def _provides(distribution: importlib.metadata.Distribution, top: str) -> bool:
    """Return whether a distribution contains the module `top`.

    `packages_distributions()` takes ten times as long, since it parses all metadata.
    """
    listed = (distribution.read_text("top_level.txt") or "").split()
    if listed:
        return top in listed
    record = distribution.read_text("RECORD") or ""
    return re.search(rf"^{top}[./]", record, re.MULTILINE) is not None


def _needed_sources(spec: ModuleSpec) -> set[Path]:
    """Return the file of a single module, and what it imports from its folder, also indirectly.

    All sources of the folder if one of them may import what is known only at run time.
    """
    start = Path(spec.origin or "").resolve()
    folder, needed, waiting = start.parent, {start}, [start]
    while waiting:
        text = waiting.pop().read_bytes()
        if RUN_TIME_IMPORT.search(text):
            return set(_sources(folder))
        for name in _imported_names(text):
            module = folder / f"{name}.py"
            files = {module} if module.is_file() else set()
            if _may_be_imported(folder / name):
                files |= set(_sources(folder / name))
            waiting += files - needed
            needed |= files
    return needed


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the .py files of a folder and of importable folders below it.

    Links to folders are not followed.
    """
    for entry in folder.iterdir():
        if entry.suffix == ".py" and entry.is_file():
            yield entry
        elif _may_be_imported(entry):
            yield from _sources(entry)


def _may_be_imported(entry: Path) -> bool:
    """Return whether Python can import from a folder. Namespace packages have no __init__.py.

    False for hidden folders, caches, links and virtual environments.
    """
    if (
        not entry.name.isidentifier()
        or entry.name == "__pycache__"
        or entry.is_symlink()
        or not entry.is_dir()
    ):
        return False
    return os.access(entry, os.R_OK | os.X_OK) and not (entry / "pyvenv.cfg").exists()
