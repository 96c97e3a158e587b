"""`crucible submit` of a language model: its plan with the files that it names, as an upload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.client import Upload


def upload_of_plan(file: Path, is_alone: bool) -> Upload:
    """Return a plan of a language model without its paths, with the files at them.

    PlanError for a plan of engines, and unless the command has no other options for files. Other
    errors as for a compile, before anything is sent.
    """
    from pipeline.errors import PlanError
    from pipeline.llm.plan import KEY, is_language_plan, language_plan_from_document
    from pipeline.llm.source import model_files, model_place
    from pipeline.llm.texts import Documents, read_texts
    from pipeline.plan.files import read_document
    from service.client import Upload

    document = read_document(file)
    if not isinstance(document, dict) or not is_language_plan(document):
        raise PlanError(
            f"expected a model, got the plan {file}",
            f"`crucible onnx {file} --out model.onnx` writes its model; then"
            " `crucible submit model.onnx`, with the data and keys of the plan as options",
        )
    if not is_alone:
        raise PlanError(
            "expected the plan of a language model alone: it names its texts",
            "leave out --plan, --profile and the options for data",
        )
    plan = language_plan_from_document(document, file.resolve().parent, file.stem)
    place = model_place(plan.language_model.path)
    model_files(place)
    roles = ("calibration", "selection", "validation")
    lengths = {key: each for key, each in document["texts"].items() if key not in roles}
    sent = {**document, "name": plan.name, KEY: {}, "texts": lengths}

    def jsonl(part: Documents | None) -> str | None:
        if part is None:
            return None
        return "".join(json.dumps({"text": text}) + "\n" for text in part.texts)

    texts = {role: jsonl(part) for role, part in zip(roles, read_texts(plan.texts), strict=True)}
    return Upload(place, json.dumps(sent), **texts)
