"""Every plan in configs/ loads, its model is where it says, its data opens, and each manifest tells
the truth. The parts of plans in the pages load too.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml

from pipeline.data.samples import (
    CalibrationSet,
    SampleSet,
    SelectionSet,
    ValidationSet,
    check_disjoint,
    open_set,
)
from pipeline.errors import PlanError
from pipeline.llm.plan import language_plan_from_document
from pipeline.llm.texts import read_texts
from pipeline.plan.files import load_plan, read_document
from pipeline.plan.source import source_from_config

ROOT = Path(__file__).parents[3]
KINDS: tuple[type[SampleSet], ...] = (CalibrationSet, SelectionSet, ValidationSet)
EXPECTED = {
    "digits": {"calibration": 500, "selection": 300, "validation": 300},
    "minilm": {"calibration": 512, "selection": 256, "validation": 256},
    "resnet50": {"calibration": 64, "selection": 16},
    "surgery": {"selection": 300, "validation": 300},
}


LANGUAGE_MODELS = {"smollm2": (12, 12, 42)}


def test_every_config_is_expected_here() -> None:
    assert {path.stem for path in (ROOT / "configs").iterdir()} == {*EXPECTED, *LANGUAGE_MODELS}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_config_of_a_language_model_loads_and_its_texts_open(name: str) -> None:
    file = ROOT / "configs" / f"{name}.yaml"
    document = read_document(file)
    assert isinstance(document, dict)
    texts = read_texts(language_plan_from_document(document, file.parent, name).texts)
    assert tuple(len(part) for part in texts if part) == LANGUAGE_MODELS[name]
    with pytest.raises(PlanError, match="is a plan of a language model"):
        load_plan(file)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_config_loads_and_its_data_opens(name: str) -> None:
    plan = load_plan(ROOT / "configs" / f"{name}.yaml")
    source = source_from_config(plan.model, plan.profiles)
    sources = [(kind, getattr(plan.data, kind.role)) for kind in KINDS]
    sets = [
        open_set(kind, value, source.inputs, plan.profiles)
        for kind, value in sources
        if value is not None
    ]
    assert {opened.role: opened.samples for opened in sets} == EXPECTED[name]
    assert all(opened.has_labels == (name in ("digits", "surgery")) for opened in sets)
    check_disjoint(*sets)


@pytest.mark.parametrize(
    "page",
    [
        "explain/tensorrt",
        "howto/batch-and-latency",
        "howto/choose-precision",
        "howto/dynamic-shapes",
        "howto/images-and-text",
        "howto/own-data",
        "howto/own-metric",
        "howto/unsupported-operators",
    ],
)
def test_a_part_of_a_plan_in_a_page_loads(page: str, tmp_path: Path) -> None:
    rest = {"model": {"path": "model.onnx"}, "profiles": [{"batch": [1, 8, 64]}]}
    plugin = tmp_path / "build" / "libmyplugins.so"
    plugin.parent.mkdir()
    plugin.touch()
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    parts = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert parts
    for part in parts:
        plan = tmp_path / "plan.yaml"
        plan.write_text(yaml.safe_dump(rest | yaml.safe_load(part)), encoding="utf-8")
        model = load_plan(plan).model
        assert model.path or model.entrypoint


@pytest.mark.parametrize("name", ["digits", "sentences"])
def test_a_manifest_names_every_file_with_its_sum(name: str) -> None:
    folder = ROOT / "calibration_data" / name
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.npz")
    }
    assert files == {file: entry["sha256"] for file, entry in manifest["files"].items()}
    assert manifest["source"]


def test_no_sentence_occurs_twice() -> None:
    lines = (
        (ROOT / "calibration_data/sentences/sentences.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    words = [
        "".join(c if c.isalpha() else " " for c in json.loads(line)["text"].lower()).split()
        for line in lines
    ]
    assert all(4 <= len(json.loads(line)["text"].split()) <= 60 for line in lines)
    assert len({" ".join(sentence) for sentence in words}) == len(lines) == 1024
