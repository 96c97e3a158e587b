"""Uploads of language models: a GGUF file, or an archive of a folder in the form of Hugging Face,
with the user's texts.

The plan has the keys of an ordinary plan of a language model, without paths: the files are the
parts of the upload. Files of code are refused, and files that nothing reads are deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails

from pipeline.errors import PlanError
from pipeline.llm.plan import (
    KEY,
    KEYS,
    Goodput,
    LanguageAccuracy,
    LanguageBenchmark,
    LanguageCandidate,
    LanguageModelConfig,
    LanguagePlan,
    Texts,
    is_language_plan,
    language_plan_from_document,
)
from pipeline.llm.source import OTHER_SUFFIXES, find_source
from pipeline.llm.texts import read_texts
from pipeline.plan.files import explain, models_in
from service.errors import Unprocessable
from service.jobs.messages import HostIdentity
from service.settings import Settings
from service.submission.plan import (
    HOST_PATH,
    LABELS_SUFFIX,
    MAX_NAME,
    PICKLES,
    SAFETENSORS,
    UNPACKED,
    name_of,
)
from service.submission.uploads import TOKENIZER, Limits, Part, extract, is_archive

GGUF = ".gguf"
MAGIC = b"GGUF"  # at the start of such a file
CODE_SUFFIXES = (*PICKLES, ".py", ".pyc", ".so", ".h5", ".msgpack", ".npy", ".npz")
READ_SUFFIXES = (SAFETENSORS, *OTHER_SUFFIXES)
ROLES = ("calibration", "selection", "validation")
MAX_CANDIDATES = 64
ALLOWED: dict[type[BaseModel], str] = {
    LanguagePlan: (
        "name language_model device texts accuracy candidates effort benchmark objective context"
    ),
    LanguageModelConfig: "",
    Texts: "max_tokens cached_tokens",
    LanguageAccuracy: (
        "max_perplexity_increase max_kl min_agreement max_path_difference max_serving_difference"
    ),
    LanguageCandidate: "library weights group_size kv_cache arithmetic awq scale_estimation",
    LanguageBenchmark: "prompt_tokens output_tokens budget_s threads concurrency",
    Goodput: "max_first_token_s max_next_token_s",
}
"""The keys that a client may write, by section, as in service/submission/plan.py."""

SEND = (
    "send `model` (a .gguf file, or .tar, .tar.gz or .zip of a folder with config.json, tokenizer"
    " and .safetensors), `plan`, and the texts `selection` and `validation` as .jsonl"
)


def allowed_keys(section: type[BaseModel]) -> list[str]:
    """Return the keys of a section that a client may write."""
    return ALLOWED.get(section, "").split()


def check_host(host: HostIdentity) -> None:
    """Raise Unprocessable if this host compiles no language models."""
    if host.language_models:
        raise Unprocessable(
            f"this service compiles no language models: {host.language_models}",
            "ask the operator of this service to install them",
        )


def device_for(plan: LanguagePlan, devices: Sequence[str], load: Mapping[str, int]) -> str:
    """Choose the device of a plan: the CPU, or the GPU with the fewest jobs. `load` counts them.

    Unprocessable for a GPU where there is none.
    """
    if plan.device == "cpu":
        return "cpu"
    gpus = [device for device in devices if device.startswith("gpu:")]
    if not gpus:
        raise Unprocessable(
            "device: the plan wants a GPU, and this service has none to compile on",
            "leave `device` out for a CPU, or send the plan to a service with GPUs",
        )
    return min(gpus, key=lambda device: (load.get(device, 0), device))


def is_language_upload(document: Mapping[str, Any], model: Part) -> bool:
    """Return True for the upload of a language model, by its plan or its model."""
    if is_language_plan(document):
        return True
    with model.path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def language_plan_from(
    document: Mapping[str, Any], parts: Mapping[str, Part], settings: Settings
) -> LanguagePlan:
    """Convert the plan of a client to a plan over the uploaded files. An archive is unpacked beside
    them. Unprocessable names the key, the part or the file that is wrong.
    """
    _check_keys(document)
    for role in ROLES[1:]:
        if role not in parts:
            raise Unprocessable(
                f"no part `{role}`: a language model is judged on your texts",
                'send a .jsonl file with {"text": ...} a line, of texts that are in no other part',
            )
    for name in parts:
        if name.endswith(LABELS_SUFFIX):
            raise Unprocessable(
                f"a part `{name}`: a language model is judged without labels", "leave the part out"
            )
    if TOKENIZER in parts:
        raise Unprocessable(
            "a part `tokenizer`: that of a language model is in its file or folder", "leave it out"
        )
    texts = {role: _renamed(parts[role], ".jsonl") for role in ROLES if role in parts}
    model = LanguageModelConfig(path=str(_model(parts["model"], settings)))
    written = {
        **document,
        KEY: model.model_dump(),
        "texts": {**(document.get("texts") or {}), **texts},
    }
    try:
        plan = language_plan_from_document(written, Path(), name_of(parts["model"].filename))
    except PlanError as error:
        raise Unprocessable(error.message, f"correct the plan; {KEYS} lists every key") from error
    # without following links: these paths begin as the folder of the upload does
    return plan.model_copy(update={KEY: model, "texts": plan.texts.model_copy(update=texts)})


def _check_keys(document: Mapping[str, Any]) -> None:
    """Raise Unprocessable for keys that a client may not send."""
    faults = list(_faults(document, LanguagePlan))
    for key in (KEY, "texts"):  # a path or a list of them, in the place of the section
        if not isinstance(document.get(key) or {}, Mapping):
            faults.append(InitErrorDetails(type=HOST_PATH, loc=(key,), input=document[key]))
    if faults:
        error = ValidationError.from_exception_data("plan", faults)
        raise Unprocessable(
            explain(error, LanguagePlan, allowed_keys),
            f"correct the plan; {KEYS} lists every key. Files are parts of the upload: {SEND}",
        )
    name, candidates = document.get("name"), document.get("candidates")
    if isinstance(name, str) and len(name) > MAX_NAME:
        raise Unprocessable(
            f"name: {len(name)} characters, expected at most {MAX_NAME}", "choose a shorter one"
        )
    if isinstance(candidates, list) and len(candidates) > MAX_CANDIDATES:
        raise Unprocessable(
            f"candidates: {len(candidates)}, expected at most {MAX_CANDIDATES}", "list fewer"
        )


def _faults(
    value: object, section: type[BaseModel], location: tuple[int | str, ...] = ()
) -> Iterator[InitErrorDetails]:
    """Yield an error for each key that is not allowed."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _faults(each, section, (*location, number))
    elif isinstance(value, Mapping):
        allowed = allowed_keys(section)
        for key, item in value.items():
            here, field = (*location, str(key)), section.model_fields.get(str(key))
            if field is None or str(key) not in allowed:
                is_path = field is not None and section in (LanguageModelConfig, Texts)
                fault = HOST_PATH if is_path else "extra_forbidden"
                yield InitErrorDetails(type=fault, loc=here, input=item)
                continue
            for model in models_in(field.annotation):
                yield from _faults(item, model, here)


# -- files -------------------------------------------------------------------


def _model(part: Part, settings: Settings) -> Path:
    """Return the GGUF file, or the folder of the unpacked archive."""
    if not is_archive(part.filename):
        return _renamed(part, GGUF)
    folder = part.path.with_name(UNPACKED)
    limits = Limits(settings.max_upload_bytes, settings.max_plan_bytes, settings.max_unpacked_bytes)
    extract(part, folder, limits)
    part.path.unlink()  # nothing reads it again
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if code := [file for file in files if file.suffix.lower() in CODE_SUFFIXES]:
        raise Unprocessable(
            f"'{code[0].relative_to(folder)}' in the archive is code, a pickle or another form of"
            " weights, which this service never reads",
            "pack config.json, the tokenizer and *.safetensors only",
        )
    configs = [file for file in files if file.name == "config.json"]
    if len(configs) != 1:
        names = ", ".join(str(file.relative_to(folder)) for file in configs) or "none"
        raise Unprocessable(
            f"an archive with {len(configs)} files config.json ({names}), expected one",
            "pack the folder of one model, as Hugging Face writes it",
        )
    for file in files:
        if file.suffix not in READ_SUFFIXES:
            file.unlink()
    return configs[0].parent


def _renamed(part: Part, suffix: str) -> Path:
    """Rename the part's file to this suffix, because its readers choose the format by it."""
    return part.path.rename(part.path.with_name(part.name + suffix))


# -- what makes requests equal -----------------------------------------------


def identity(plan: LanguagePlan, parts: Mapping[str, Part], owner: str, host: str) -> str:
    """Return a digest that is equal for equal requests: of plan, files, owner and host."""
    content = sorted((part.name, part.sha256) for part in parts.values() if part.name != "plan")
    return _digest(owner, host, content, _without_paths(plan))


def identity_of_config(plan: LanguagePlan, owner: str, host: str) -> str:
    """Return a digest as `identity` does, for a plan over files of the server.

    PlanError and others if they cannot be read.
    """
    source = find_source(plan.language_model.path).digest
    texts = [part.digest if part else "" for part in read_texts(plan.texts)]
    return _digest(owner, host, [source, *texts], _without_paths(plan))


def _without_paths(plan: LanguagePlan) -> Any:
    return plan.model_dump(mode="json", exclude={KEY: {"path"}, "texts": set(ROLES)})


def _digest(*content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
