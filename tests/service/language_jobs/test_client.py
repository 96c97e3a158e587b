"""`crucible submit` and the client send language models, to a server with a double for the
worker.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipeline.errors import ModelError, PlanError
from pipeline.llm.plan import LanguagePlan
from pipeline.llm.texts import read_documents
from service.cli.language import upload_of_plan
from service.client import Client, Upload
from service.storage.layout import Folders
from tests.builders.cli import crucible
from tests.pipeline.llm.models import language_plan, texts, write_model
from tests.service.integration.test_server import serving
from tests.service.language_jobs.reports import INT8, write_language_out

pytest.importorskip("transformers", reason="language models: no transformers")
pytest.importorskip("gguf", reason="language models: no gguf")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")  # never sent
    return folder


def stored_plan(home: Path, job: str) -> LanguagePlan:
    plan = Folders(home).load_any_plan(job)
    assert isinstance(plan, LanguagePlan)
    return plan


def test_a_plan_is_sent_with_the_files_that_it_names(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    write_language_out(home / "template", home / "template-store")
    document = language_plan(tmp_path, model, name="succeed", accuracy={"max_kl": 0.5})
    folder = tmp_path / "validation"  # of .txt files
    folder.mkdir()
    for number, text in enumerate(texts(4, "validation")):
        (folder / f"{number}.txt").write_text(text)
    document["texts"]["validation"] = "validation"
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(document))
    with serving(home) as server:
        env = {"CRUCIBLE_URL": server.url}
        sent = crucible("submit", tmp_path / "plan.yaml", "--wait", env=env)
        assert sent.code == 0, sent.err
        assert f"{INT8.label} answers" in sent.out
        plan = stored_plan(home, str(sent.summary["id"]))
        assert (plan.accuracy.max_kl, plan.context, plan.texts.max_tokens) == (0.5, 256, 96)
        assert len(read_documents(plan.texts.validation, "validation")) == 4
        names = {file.name for file in Path(plan.language_model.path).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
        assert "modeling_tiny.py" not in names


def test_what_is_wrong_is_said_before_anything_is_sent(tmp_path: Path, model: Path) -> None:
    plan, engines = tmp_path / "plan.yaml", tmp_path / "engines.yaml"
    plan.write_text(yaml.safe_dump(language_plan(tmp_path, model)))
    engines.write_text("model: {path: m.onnx}")
    with pytest.raises(PlanError, match="expected a model, got the plan"):
        upload_of_plan(engines, is_alone=True)
    with pytest.raises(PlanError, match="alone: it names its texts"):
        upload_of_plan(plan, is_alone=False)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
        upload_of_plan(plan, is_alone=True)


def test_a_folder_is_packed_while_it_is_sent(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    write_language_out(home / "template", home / "template-store")
    lines = {
        role: "".join(json.dumps({"text": text}) + "\n" for text in texts(4, role))
        for role in ("selection", "validation")
    }
    plan = {"name": "succeed", "language_model": {}, "context": 256}
    lengths = {"max_tokens": 96, "cached_tokens": 8}
    upload = Upload(model, json.dumps({**plan, "texts": lengths}), **lines)
    with serving(home) as server, Client(server.url) as client:
        job = client.submit(upload)
        path = Path(stored_plan(home, job.id).language_model.path)
        assert (path / "model.safetensors").read_bytes() == (
            model / "model.safetensors"
        ).read_bytes()
        assert client.submit(upload).id == job.id
        (model / "config.json").unlink()
        with pytest.raises(ModelError, match=r"has no config\.json"):
            client.submit(upload)
