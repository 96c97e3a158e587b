"""`crucible submit` of a language model: its plan with the files that it names, as an upload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.client import Upload


def upload_of_plan(file: Path) -> Upload | None:
    """Return a plan of a language model without its paths, with the files at them; None for a plan
    of engines. PlanError and others as for a compile, before anything is sent.
    """
    from pipeline.llm.plan import KEY, is_language_plan, language_plan_from_document
    from pipeline.llm.source import model_files, model_place
    from pipeline.llm.texts import Documents, read_texts
    from pipeline.plan.files import read_document
    from service.client import Upload

    document = read_document(file)
    if not isinstance(document, dict) or not is_language_plan(document):
        return None
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
