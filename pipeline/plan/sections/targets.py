"""Targets: the devices for which a plan is compiled, and whether a device is one of them.

    cpu                         the CPU
    gpu                         any GPU
    gpu:0                       the GPU of this number, as before there were targets
    gpu:H200, tensorrt>=10.6    a GPU with these words in its name, and with labels

A label is NAME, NAME==VALUE, NAME>=VALUE or NAME<VALUE. Versions and numbers are compared part by
part. `crucible doctor` and `crucible node list` show the labels of devices.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from pipeline.core.frozen import Frozen
from pipeline.host.labels import Labels

DEVICE = re.compile(r"cpu|gpu(:[A-Za-z0-9][A-Za-z0-9 ._()/+-]*)?")
LABEL = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9_.-]*?)\s*(?:(==|>=|<)\s*([A-Za-z0-9][A-Za-z0-9_.+-]*))?"
)
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
NUMBER = re.compile(r"gpu:\d{1,2}")  # a longer one is part of a name: 4090
FORM = "cpu, gpu, gpu:0, or gpu: with words of the GPU's name"
LABEL_FORM = "NAME, NAME==VALUE, NAME>=VALUE or NAME<VALUE"
MAX_LABELS, MAX_TEXT, MAX_TARGETS = 20, 100, 16
COMPARE = {">=": operator.ge, "<": operator.lt}
_WORD = r"[A-Za-z0-9]"


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a target asks of a device. `text` is the same for equal requirements."""

    device: str
    labels: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return ", ".join((self.device, *self.labels))

    def missing(self, device: str, labels: Labels) -> str:
        """Return the first part that a device of this name with these labels lacks; "" if it
        fulfils all.
        """
        if not self._is_device(device, labels.get("name", "")):
            return self.device
        return next((label for label in self.labels if not _has(labels, label)), "")

    def _is_device(self, device: str, name: str) -> bool:
        kind, _, part = self.device.partition(":")
        if device.partition(":")[0] != kind:
            return False
        if not part or NUMBER.fullmatch(self.device):
            return device == self.device or not part
        # whole words: L4 is no part of L40
        words = rf"(?<!{_WORD}){re.escape(part)}(?!{_WORD})"
        return re.search(words, name, re.IGNORECASE) is not None


@lru_cache(1024)
def requirement_from(text: str) -> Requirement:
    """Read `DEVICE, LABEL, ...`. ValueError says what was expected."""
    device, *labels = (part.strip() for part in text.split(","))
    return Requirement(checked_device(device), tuple(sorted(map(checked_label, set(labels)))))


def checked_device(text: str) -> str:
    """Return the device of a target. ValueError if its form is wrong."""
    if len(text) > MAX_TEXT or not DEVICE.fullmatch(text):
        raise ValueError(f"expected {FORM}, got '{text[:MAX_TEXT]}'")
    return text


def checked_label(text: str) -> str:
    """Return a required label without spaces. ValueError if its form is wrong."""
    match = LABEL.fullmatch(text) if len(text) <= MAX_TEXT else None
    if match is None:
        raise ValueError(f"expected a label as {LABEL_FORM}, got '{text[:MAX_TEXT]}'")
    return "".join(part or "" for part in match.groups())


def _has(labels: Labels, required: str) -> bool:
    match = LABEL.fullmatch(required)
    assert match is not None  # `checked_label` has seen it
    name, sign, value = match.groups()
    found = labels.get(name)
    if found is None or sign is None:
        return found is not None
    if sign == "==":
        return found == value or (bool(_parts(value)) and _parts(found) == _parts(value))
    return bool(_parts(found)) and COMPARE[sign](_parts(found), _parts(value))


def _parts(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without zeros at the end; none for a text without digits."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def checked_name(text: str) -> str:
    """Return the name of a target, which is also that of its folder. ValueError if its form is
    wrong.
    """
    if text and not NAME.fullmatch(text):
        raise ValueError("expected letters, digits, _, - or ., not with a . at its start")
    return text


class TargetConfig(Frozen):
    """One device for which the plan is compiled."""

    name: Annotated[str, AfterValidator(checked_name)] = Field(
        default="",
        max_length=MAX_TEXT,
        description="Names the target and its folder. Default: made of the other keys.",
    )
    device: Annotated[str, AfterValidator(checked_device)] = Field(
        description=(
            "`cpu`, `gpu` for any GPU, or `gpu:H200`: words of the GPU's name, in any case."
            " `gpu:0` is the GPU of this number."
        )
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="Threads per engine; the device needs as many. 0: `benchmark.threads`.",
    )
    labels: Annotated[
        tuple[Annotated[str, AfterValidator(checked_label)], ...], Field(max_length=MAX_LABELS)
    ] = Field(
        default=(),
        description=(
            "What the device must have: `avx512_vnni`, `tensorrt>=10.6`. A label is NAME,"
            " NAME==VALUE, NAME>=VALUE or NAME<VALUE."
        ),
    )

    @property
    def requirement(self) -> Requirement:
        threads = (f"threads>={self.threads}",) if self.threads else ()
        return Requirement(self.device, tuple(sorted({*self.labels, *threads})))

    @property
    def title(self) -> str:
        """Its name, which is also that of its folder."""
        unit = "thread" if self.threads == 1 else "threads"
        threads = f" {self.threads} {unit}" if self.threads else ""
        text = self.name or " ".join((self.device, *self.labels)) + threads
        return re.sub(r"[^A-Za-z0-9_.]+", "-", text)


def _from_text(value: object) -> object:
    """Read the short form, `gpu:H200, tensorrt>=10.6`."""
    if not isinstance(value, str):
        return value
    required = requirement_from(value)
    return {"device": required.device, "labels": required.labels}


def _of_different_names(targets: tuple[TargetConfig, ...]) -> tuple[TargetConfig, ...]:
    titles = [target.title for target in targets]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise ValueError(f"two targets are named '{twice[0]}': give each one a `name`")
    return targets


Target = Annotated[
    TargetConfig, BeforeValidator(_from_text, json_schema_input_type=str | TargetConfig)
]
Targets = Annotated[
    tuple[Target, ...], Field(max_length=MAX_TARGETS), AfterValidator(_of_different_names)
]
