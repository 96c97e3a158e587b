"""The generated reference is in step with the code, and complete."""

import json
import re
from pathlib import Path

import httpx
import jsonschema
import pytest
import yaml

from pipeline.plan.schema import Plan
from service.jobs.nodes import NO_NODE
from tests.docs.operations import JOB_CODES
from tests.docs.reference import REFERENCE, pages
from tests.service.integration.test_server import serving

ROOT = Path(__file__).parents[2]
PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_in_step_with_the_code(name: str) -> None:
    text = (REFERENCE / name).read_text(encoding="utf-8")
    assert text == PAGES[name], "write it again: make reference"


def test_every_key_of_the_plan_has_a_meaning() -> None:
    rows = re.findall(r"^\| (`\w+`).*\|(.*)\|$", PAGES["plan.md"], re.MULTILINE)
    assert len(rows) > 100
    assert [name for name, meaning in rows if not meaning.strip()] == []


@pytest.mark.parametrize("name", ["digits", "minilm", "resnet50", "surgery"])
def test_a_plan_that_works_fits_the_published_schema(name: str) -> None:
    plan = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    schema = json.loads(PAGES["plan.schema.json"])
    jsonschema.validate(plan, schema)
    assert Plan.model_validate({"name": name, **plan})
    with pytest.raises(jsonschema.ValidationError, match="unknown"):
        jsonschema.validate({**plan, "unknown": 1}, schema)


def test_the_written_forms_of_a_range_fit_the_published_schema() -> None:
    for written in ([1, 8, 64], 8, {"min": 1, "opt": 8, "max": 64}):
        plan = {"model": {"path": "m.onnx"}, "profiles": [{"batch": written}]}
        jsonschema.validate(plan, json.loads(PAGES["plan.schema.json"]))
        assert Plan.model_validate(plan).profiles[0].dims["batch"].opt == 8


def test_the_page_lists_every_metric_and_no_other(tmp_path: Path) -> None:
    listed = set(re.findall(r"^\| `(crucible_\w+)`", PAGES["metrics.md"], re.MULTILINE))
    with serving(tmp_path) as server:
        text = httpx.get(f"{server.url}/metrics").text
    served = set(re.findall(r"^# TYPE (crucible_\w+) ", text, re.MULTILINE))
    of_gpus = {name for name in listed if name.startswith("crucible_device_")}
    assert {name for name in served if not name.endswith("_created")} | of_gpus == listed


def test_every_code_that_the_source_names_has_a_meaning() -> None:
    files = (file for folder in ("pipeline", "service") for file in (ROOT / folder).rglob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    pattern = r"\bcode(?:, status)? ?= ?\"([a-z]+\.[a-z_]+)\""
    codes = {code for text in texts for code in re.findall(pattern, text)}
    assert len(codes) > 30
    listed = set(re.findall(r"^\| `([\w.]+)`", PAGES["errors.md"], re.MULTILINE))
    assert codes <= listed
    others = {"job.memory", "job.disk", NO_NODE}  # of the name of a resource, or a constant
    assert {code for code in codes if code.startswith("job.")} | others == set(JOB_CODES)
