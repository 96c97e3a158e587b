"""The form of the options for serving a model: its fields, and the options from what was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.registry.models import LANGUAGE_BATCH, DeploymentOptions, devices_from_text

HELP = {
    "version": ("Version", "Empty: always the current one, also after a promotion or a rollback."),
    "device": (
        "Device",
        "cpu, gpu:0, ..., several with commas between them, or all: every GPU of the kind that the"
        " engine was built for. Empty: the first device that fits the engine.",
    ),
    "instances": (
        "Instances",
        "Batches that run at the same time on each device. Empty: as measured, else 1.",
    ),
    "max_batch": (
        "Largest batch",
        "Rows that may run together, or answers of a language model. Empty: as measured, or"
        f" {LANGUAGE_BATCH} answers.",
    ),
    "max_delay_s": (
        "Wait for a batch, seconds",
        "How long a request waits for others while all instances are busy.",
    ),
    "queue_limit": ("Queue limit", "Requests that may wait; further requests get status 429."),
    "timeout_s": ("Time-out, seconds", "Of a request; a request may set a shorter one."),
    "answer_timeout_s": (
        "Time-out of an answer, seconds",
        "Of a whole answer of a language model; a request may set a shorter one.",
    ),
    "drain_s": (
        "Time to finish, seconds",
        "How long a version that is replaced or unloaded may finish its requests.",
    ),
    "cache_tokens": (
        "Cache, tokens",
        "Of a language model: keys and values of all answers together. Empty: as many as the"
        " largest batch needs, or fewer if they do not fit into the memory.",
    ),
    "prefix_caching": (
        "Keep earlier prompts",
        "true or false, of a language model: read the same beginning of a prompt only once. The"
        " log-probabilities of a prompt are known without it only.",
    ),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One option: how a browser asks for it, its value as text, and what is wrong with it."""

    name: str
    label: str
    help: str
    type: str  # "text", or "number" with the next three
    step: str
    minimum: float | None
    maximum: float | None
    value: str
    fault: str


def fields(values: Mapping[str, str], faults: Mapping[str, str]) -> list[Field]:
    """Return the fields of the form. Their limits are those of DeploymentOptions."""
    properties = DeploymentOptions.model_json_schema()["properties"]
    found = []
    for name, (label, text) in HELP.items():
        schema = properties[name]
        schema = schema.get("anyOf", [schema])[0]  # the other one is null
        found.append(
            Field(
                name,
                label,
                text,
                "number" if schema["type"] in ("integer", "number") else "text",
                "1" if schema["type"] == "integer" else "any",
                schema.get("minimum", schema.get("exclusiveMinimum")),
                schema.get("maximum"),
                values.get(name, ""),
                faults.get(name, ""),
            )
        )
    return found


def values_of(options: DeploymentOptions) -> dict[str, str]:
    """Return the options as texts of the form; an option that is null has none."""
    return {
        name: ", ".join(value) if isinstance(value, tuple) else str(value)
        for name, value in options
        if value is not None
    }


def options_from(values: Mapping[str, str]) -> DeploymentOptions:
    """Read the options of a form; an empty field has its default. ValidationError if one is wrong.

    Other fields of the form are ignored.
    """
    given: dict[str, object] = {name: values[name] for name in HELP if values.get(name)}
    if "device" in given:
        given["device"] = devices_from_text(values["device"])
    return DeploymentOptions.model_validate(given)
