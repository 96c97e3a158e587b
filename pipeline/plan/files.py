"""Reading a plan: its YAML, overrides from the command line, and errors that name the key.

Paths inside are relative to the plan's own folder. An unknown key is an error that suggests a
similar one.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import yaml
from pydantic import (
    BaseModel,
    ValidationError,
)

from pipeline.errors import PlanError
from pipeline.plan.schema import ROLES, DataConfig, DataPaths, LabelFiles, Plan

LOG = logging.getLogger(__name__)
KEYS = "docs/reference/plan.md"

_INVALID_VALUE = (ValueError, AttributeError, LookupError, TypeError)
"""Errors of PyYAML's constructors, such as for `2026-02-30` and `!!bool x`."""


class PlanLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, where YAML lets the last one win. Every error of a
    value is a YAMLError.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _INVALID_VALUE as error:
            value = ascii(node.value)[:40]  # half of a surrogate pair cannot be printed
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            problem = f"{value} is no value of the type {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        text = super().construct_scalar(node)
        # JSON writes a character beyond U+FFFF as two escapes, which YAML takes for two characters
        return text.encode("utf-16", "surrogatepass").decode("utf-16")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        pairs = node.value if node.id == "mapping" else ()  # `!!map x` is a scalar
        keys = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key '{key}'", node.start_mark
                )
        return super().construct_mapping(node, deep)


def home() -> Path:
    """Return the store's folder: $CRUCIBLE_HOME, else the user's data directory."""
    return Path(
        os.environ.get("CRUCIBLE_HOME") or platformdirs.user_data_dir("crucible")
    ).expanduser()


def load_plan(path: Path, overrides: Iterable[str] = ()) -> Plan:
    """Read a plan and apply `a.b=value` overrides, whose values are YAML.

    PlanError names the faulty line or key.
    """
    return plan_from_document(
        read_document(path), base=path.resolve().parent, name=path.stem, overrides=overrides
    )


def read_document(path: Path) -> object:
    """Read the YAML of a plan. PlanError if there is none, or a faulty line."""
    if not path.is_file():
        raise PlanError(
            f"no plan at '{path}'",
            "give the path of a YAML plan or of an .onnx model; configs/ holds examples",
        )
    if path.suffix == ".py":
        raise PlanError(
            f"'{path}' is a Python file, so it is no plan",
            f"record it: `crucible record -- python {path}`; or write a plan that names the"
            f" function which returns the model: `model: {{entrypoint: {path.stem}:build, ...}}`",
        )
    try:
        return yaml.load(path.read_text(encoding="utf-8"), PlanLoader)
    except UnicodeDecodeError as error:
        advice = (
            "write a plan that names it: `model: {path: ...}` takes .onnx and .pt2; a state dict is"
            " `weights: FILE.safetensors` beside `entrypoint: module:function`"
        )
        raise PlanError(f"'{path}' is not a text file, so it is no plan", advice) from error
    except yaml.YAMLError as error:
        raise PlanError(
            f"'{path}' is not valid YAML: {error}", "correct the line named above"
        ) from error


def plan_from_model(path: Path, overrides: Iterable[str] = ()) -> Plan:
    """Return the plan of `crucible compile model.onnx`: all defaults, no data."""
    document = {"model": {"path": str(path.resolve())}}
    return plan_from_document(document, base=Path.cwd(), name=path.stem, overrides=overrides)


def plan_from_document(
    document: object, base: Path, name: str = "", overrides: Iterable[str] = ()
) -> Plan:
    """Check a parsed plan; relative paths are taken from `base`."""
    if document is None:
        raise PlanError("the plan is empty", "see configs/digits.yaml for an example")
    if not isinstance(document, dict):
        raise PlanError(
            f"expected a plan of `key: value` lines, got {type(document).__name__}",
            "see configs/digits.yaml for an example",
        )
    if "language_model" in document:
        raise PlanError(
            f"'{name}' is a plan of a language model",
            "`crucible compile` and `crucible submit` take it; other commands do not yet",
        )
    for override in overrides:
        apply_override(document, override, Plan)
    document.setdefault("name", safe_name(name))
    try:
        plan = Plan.model_validate(document)
    except ValidationError as error:
        raise PlanError(
            explain(error, Plan), f"correct the plan; {KEYS} lists every key"
        ) from error
    for text in old_name_warnings(document, Plan):
        LOG.warning("plan '%s': %s", plan.name, text)
    return _with_absolute_paths(plan, base)


def override_plan(plan: Plan, overrides: Iterable[str]) -> Plan:
    """Apply `a.b=value` overrides to a checked plan.

    Relative paths in overrides are taken from the working folder.
    """
    document = plan.model_dump(mode="json", by_alias=False)
    document["profiles"] = [_written_profile(profile) for profile in document["profiles"]]
    return plan_from_document(document, base=Path.cwd(), overrides=overrides)


def _written_profile(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a stored profile to the form that users write."""
    written = dict(profile["dims"])
    if profile["values"]:
        written["values"] = profile["values"]
    return written


def safe_name(text: str) -> str:
    """Return a plan's name from that of its file."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text).lstrip(".")


def apply_override(
    document: dict[str, Any], override: str, kind: type[BaseModel], keys: str = KEYS
) -> None:
    """Set one key of a parsed plan of this kind. PlanError, which names the page that lists the
    keys, if it cannot be set.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise PlanError(
            f"expected --set a.b=value, got '{override}'",
            "for example --set accuracy.max_drop=0.02",
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(
            f"--set {key}: '{text}' is not a YAML value: {error}", "quote it for the shell"
        ) from error
    *parents, last = key.split(".")
    node: Any = document
    for part in parents:
        node = _index(node, part, key) if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise PlanError(
                f"--set {key}: '{part}' is a plain value",
                f"check the key; {keys} lists every key",
            )
    if isinstance(node, list):
        _index(node, last, key)
        node[int(last)] = value
    else:
        for names in old_names(_section_at(kind, tuple(parents))).items():
            if last in names:  # the override replaces the value under either name
                for name in names:
                    node.pop(name, None)
        node[last] = value


def _index(node: list[Any], part: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise PlanError(
            f"--set {key}: '{part}' is not an index below {len(node)}", "lists are indexed from 0"
        )
    return node[int(part)]


def _with_absolute_paths(plan: Plan, base: Path) -> Plan:
    def absolute(path: Path | None) -> Path | None:
        return None if path is None else (base / path.expanduser()).resolve()

    def source(value: DataPaths | None) -> DataPaths | None:
        return (
            tuple((base / p.expanduser()).resolve() for p in value)
            if isinstance(value, tuple)
            else value
        )

    model = plan.model.model_copy(
        update={
            "path": absolute(plan.model.path),
            "weights": absolute(plan.model.weights),
            "python_path": absolute(plan.model.python_path),
        }
    )
    sets = {role: source(getattr(plan.data, role)) for role in ROLES}
    labels = {role: absolute(path) for role, path in plan.data.labels}
    data = DataConfig(**sets, labels=LabelFiles(**labels))
    accuracy = plan.accuracy.model_copy(update={"python_path": absolute(plan.accuracy.python_path)})
    simplify = plan.simplify.model_copy(
        update={"python_path": absolute(plan.simplify.python_path)} if plan.simplify.surgery else {}
    )
    serving = plan.serving
    if serving.text is not None:
        text = serving.text.model_copy(update={"tokenizer": absolute(serving.text.tokenizer)})
        serving = serving.model_copy(update={"text": text})
    tensorrt = plan.tensorrt.model_copy(update={"plugins": source(plan.tensorrt.plugins)})
    for plugin in tensorrt.plugins:
        if not plugin.is_file():
            raise PlanError(
                f"tensorrt.plugins: no file at '{plugin}'",
                "correct the path; paths in a plan are relative to the plan's own folder",
            )
    return plan.model_copy(
        update={
            "model": model,
            "data": data,
            "accuracy": accuracy,
            "simplify": simplify,
            "tensorrt": tensorrt,
            "serving": serving,
        }
    )


# parts of an error's location that no user writes
_UNWRITTEN = ("(files)", "(generated)", "(word)", "(names)", "(limit)", "dims")
_IN_WORDS = {
    "tuple": "list, written [a, b] or with dashes",
    "dictionary": "mapping of `key: value`",
    "path for": "valid path",
}


def _all_keys(model: type[BaseModel]) -> Iterable[str]:
    return model.model_fields


def explain(
    error: ValidationError,
    kind: type[BaseModel],
    keys_of: Callable[[type[BaseModel]], Iterable[str]] = _all_keys,
) -> str:
    """Describe all errors of a plan, one sentence each.

    A misspelt key gets a suggestion among the keys that `keys_of` allows in its section.
    """
    sentences = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"] if part not in _UNWRITTEN) or "plan"
        if fault["type"] == "extra_forbidden":
            section, key = _section_at(kind, fault["loc"][:-1]), str(fault["loc"][-1])
            sentences.append(
                f"unknown key '{where}': {_hint(key, section, sorted(keys_of(section)))}"
            )
        else:
            message = re.sub(
                r"valid (tuple|dictionary|path for).*",
                lambda kind: _IN_WORDS[kind[1]],
                fault["msg"].removeprefix("Value error, "),
            )
            shown = "" if isinstance(fault["input"], dict | list) else f" (got {fault['input']!r})"
            sentences.append(f"{where}: {message}{shown}")
    return "; ".join(dict.fromkeys(sentences))


def _hint(key: str, section: type[BaseModel], known: Sequence[str]) -> str:
    """Describe what to write instead of an unknown key."""
    new = old_names(section).get(key)
    if new in known:
        return f"it is the old name of '{new}', which is given too"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"


def old_name_warnings(
    document: object, section: type[BaseModel], where: str = ""
) -> tuple[str, ...]:
    """Return a warning for each key that a parsed plan writes with its old name."""
    warnings = []
    for part in document if isinstance(document, list) else [document]:
        if not isinstance(part, dict):
            continue
        for old, new in old_names(section).items():
            if old in part:
                warnings.append(
                    f"`{where}{old}` is now called `{where}{new}`; the old name still works"
                )
        for name, field in section.model_fields.items():
            for model in models_in(field.annotation):
                warnings += old_name_warnings(part.get(name), model, f"{where}{name}.")
    return tuple(dict.fromkeys(warnings))


def old_names(section: type[BaseModel]) -> dict[str, str]:
    """Return the name of each renamed key of a section, by its old name."""
    fields = section.model_fields.items()
    return {field.serialization_alias: name for name, field in fields if field.serialization_alias}


def _section_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the section of the plan at this location, from the models' annotations."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = next(iter(models_in(field.annotation)), model)
    return model


def models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from models_in(argument)
