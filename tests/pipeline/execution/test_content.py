"""What of a stage's arguments decides whether its artifact is made again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from pipeline.core.artifacts import Artifact
from pipeline.core.frozen import Frozen
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile
from pipeline.errors import InternalError
from pipeline.execution.content import content_of, text_of_content


class Options(Frozen):
    method: str = "entropy"
    bins: tuple[int, ...] = (8, 16)
    profile: Profile = Profile(dims={"batch": DimRange(min=1, opt=2, max=4)})
    only_shown: str = Field(default="", exclude=True)


@dataclass(frozen=True)
class Entry:
    name: str
    digest: str


@dataclass(frozen=True)
class Plain:
    name: str


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "minmax"},
        {"bins": (8,)},
        {"profile": Profile(dims={"batch": DimRange(min=1, opt=2, max=8)})},
    ],
)
def test_a_changed_field_is_other_content(changes: dict[str, Any]) -> None:
    assert text_of_content(Options(**changes)) != text_of_content(Options())


def test_a_field_that_is_only_shown_is_no_content() -> None:
    assert text_of_content(Options(only_shown="x")) == text_of_content(Options())


def test_a_digest_stands_for_the_whole_value() -> None:
    assert content_of(Entry("a", "d1")) == content_of(Entry("b", "d1")) == "d1"
    assert content_of(Plain("a")) != content_of(Plain("b"))


def test_an_artifact_counts_by_its_key_wherever_it_lies() -> None:
    places = [Artifact(root=root / "k1", file="f") for root in (Path("/a"), Path("/b"))]
    assert content_of(places[0]) == content_of(places[1]) == "k1"
    assert content_of(Artifact(root=Path("/a/k2"), file="f")) == "k2"


def test_arrays_differ_by_values_shapes_and_dtypes() -> None:
    array = np.arange(6, dtype=np.float32)
    others = [array + 1, array.reshape(2, 3), array.astype(np.float64), array[::-1]]
    texts = {text_of_content({"x": each}) for each in (array, *others)}
    assert len(texts) == 5
    assert text_of_content(array.copy()) == text_of_content(array)


def test_every_field_of_a_recipe_counts_but_what_it_excludes() -> None:
    recipe = Recipe(backend="onnxruntime", precision=Precision.INT8)
    fields = type(recipe).model_fields
    content = content_of(recipe)
    assert set(content) == {name for name, info in fields.items() if not info.exclude}
    assert content["precision"] == "int8"


def test_what_has_no_content_is_a_bug_of_ours() -> None:
    with pytest.raises(InternalError, match="a function has no content for a cache key"):
        content_of(test_a_digest_stands_for_the_whole_value)
