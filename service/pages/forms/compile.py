"""The form of a draft: its first values, its values as a browser sends them, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from starlette.datastructures import FormData

from pipeline.plan.schema import METRICS, AccuracyConfig
from service.architectures import ARCHITECTURES
from service.errors import Unprocessable
from service.storage.drafts import Draft
from service.submission.plan import CODE, SAFETENSORS, document_from, name_of

METRIC_CHOICES = ("auto", *METRICS)
POINTS = ("min", "opt", "max")
BATCH_RANGE = ("1", "8", "64")
LATENCY_LIMIT = "max_latency_ms"
OBJECTIVES = {
    "latency": "lowest latency",
    "throughput": "highest throughput",
    LATENCY_LIMIT: "highest throughput within a limit of the latency",
}
IMAGES = """\
inputs:
- {name: image, dtype: float32, shape: [batch, 3, 224, 224]}
profiles:
- batch: [1, 8, 64]
"""


@dataclass(frozen=True, slots=True)
class Form:
    """The values of the form, as texts."""

    name: str
    metric: str = AccuracyConfig().metric
    output: str = ""  # empty: the first
    max_drop: str = str(AccuracyConfig().max_drop)
    objective: str = "latency"
    limit_ms: str = ""
    ranges: tuple[tuple[str, ...], ...] = ()  # min, opt and max of each symbol
    candidates: tuple[str, ...] = ()  # "onnxruntime fp32"; empty: what suits the host
    architecture: str = ""
    classes: str = "1000"
    more: str = ""  # further keys of the plan, as YAML


def needs_architecture(draft: Draft) -> bool:
    """Return True for weights without a model."""
    return draft.parts["model"].filename.lower().endswith(SAFETENSORS)


def is_onnx(draft: Draft) -> bool:
    return not draft.parts["model"].filename.lower().endswith((SAFETENSORS, CODE))


def first_form(draft: Draft) -> Form:
    """Return the form of a draft, filled from what its files say."""
    filename = draft.parts["model"].filename
    batches = {spec.shape[0] for spec in draft.interface.inputs if spec.shape}
    return Form(
        name=name_of(filename),
        ranges=tuple(
            BATCH_RANGE if symbol in batches else ("", "", "") for symbol in draft.interface.symbols
        ),
        architecture=ARCHITECTURES[0] if needs_architecture(draft) else "",
        more="" if is_onnx(draft) else IMAGES,
    )


def form_from(draft: Draft, sent: FormData) -> Form:
    """Return the form as a browser sent it."""

    def text(name: str) -> str:
        return str(sent.get(name, "")).strip()

    return Form(
        name=text("name"),
        metric=text("metric"),
        output=text("output"),
        max_drop=text("max_drop"),
        objective=text("objective"),
        limit_ms=text("limit_ms"),
        ranges=tuple(
            tuple(text(f"{point}_{number}") for point in POINTS)
            for number in range(len(draft.interface.symbols))
        ),
        candidates=tuple(map(str, sent.getlist("candidate"))),
        architecture=text("architecture"),
        classes=text("classes"),
        more=str(sent.get("more", "")).replace("\r\n", "\n"),
    )


def plan_text(draft: Draft, form: Form) -> str:
    """Return the plan of a form, as YAML. Unprocessable if keys are missing or given twice."""
    more = document_from(form.more.encode())
    document: dict[str, Any] = {"name": form.name}
    if needs_architecture(draft):
        document |= {"architecture": form.architecture, "classes": _number(form.classes)}
    if any(map(any, form.ranges)) or (form.ranges and "profiles" not in more):
        document["profiles"] = [_profile(draft, form)]
    document["accuracy"] = {"metric": form.metric, "max_drop": _number(form.max_drop)}
    if form.output:
        document["accuracy"]["output"] = form.output
    if form.candidates:
        names = [candidate.partition(" ") for candidate in form.candidates]
        document["candidates"] = [
            {"backend": backend, "precision": precision} for backend, _, precision in names
        ]
    document["objective"] = form.objective
    if form.objective == LATENCY_LIMIT:
        document["objective"] = {LATENCY_LIMIT: _number(form.limit_ms)}
    merged = _merged(document, more)
    return yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, default_flow_style=None)


def _profile(draft: Draft, form: Form) -> dict[str, list[Any]]:
    for symbol, sizes in zip(draft.interface.symbols, form.ranges, strict=True):
        if not all(sizes):
            raise Unprocessable(
                f"the dimension '{symbol}' has no range",
                "give its smallest, usual and largest size; or leave all of them empty, and write"
                " `profiles` under further keys",
            )
    return {
        symbol: [_number(size) for size in sizes]
        for symbol, sizes in zip(draft.interface.symbols, form.ranges, strict=True)
    }


def _merged(
    document: Mapping[str, Any], more: Mapping[str, Any], place: str = ""
) -> dict[str, Any]:
    """Add further keys. Sections of both are merged; no other key may be in both."""
    merged = dict(document)
    for key, value in more.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(merged[key], dict) and isinstance(value, dict):
            merged[key] = _merged(merged[key], value, f"{place}{key}.")
        else:
            raise Unprocessable(
                f"`{place}{key}` is under further keys, and in the form too",
                "remove it from the further keys",
            )
    return merged


def _number(text: str) -> int | float | str:
    """Return a number if the text is one; the plan refuses any other text by its key."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
