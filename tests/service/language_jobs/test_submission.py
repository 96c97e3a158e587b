"""What clients may send of a language model, and what is refused at submission, with a double for
the worker.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.llm.export import write_gguf
from pipeline.llm.hf import load_model
from pipeline.llm.plan import (
    Goodput,
    LanguageAccuracy,
    LanguageBenchmark,
    LanguageCandidate,
    LanguageModelConfig,
    LanguagePlan,
    Texts,
    language_plan_from_document,
)
from pipeline.llm.source import find_source
from service.errors import Unprocessable
from service.submission.language import allowed_keys, device_for
from service.submission.submit import request_of_parts
from service.submission.uploads import Part
from tests.pipeline.llm.models import language_plan, texts, write_model
from tests.service.builders.app import HOST, Desk, at_desk

pytest.importorskip("transformers", reason="language models: no transformers")
pytest.importorskip("gguf", reason="language models: no gguf")

Files = dict[str, bytes]
Parts = dict[str, tuple[str, bytes]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def jsonl(role: str, count: int = 6) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts(count, role)).encode()


def plan(**sections: Any) -> bytes:
    """A plan for the double, which does what its name says."""
    lengths = {"max_tokens": 96, "cached_tokens": 8}
    base = {"name": "succeed", "language_model": {}, "texts": lengths, "context": 256}
    return json.dumps({**base, **sections}).encode()


def packed(files: Files, folder: str = "tiny/") -> bytes:
    """A .tar.gz of files."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{folder}{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return whole.getvalue()


def files_of(model: Path) -> Files:
    return {file.name: file.read_bytes() for file in model.iterdir()}


def parts(folder: Path, /, **changes: tuple[str, bytes] | None) -> Parts:
    """A whole upload, with some parts changed or left out."""
    whole: dict[str, tuple[str, bytes] | None] = {
        "model": ("tiny.tar.gz", packed(files_of(folder))),
        "plan": ("plan.yaml", plan()),
        "selection": ("s.jsonl", jsonl("selection")),
        "validation": ("v.jsonl", jsonl("validation")),
        **changes,
    }
    return {name: part for name, part in whole.items() if part is not None}


def test_an_upload_becomes_a_job_over_its_files(model: Path, tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        files = files_of(model) | {"README.md": b"# tiny", "notes/a.md": b""}
        sent = parts(model, model=("tiny.tar.gz", packed(files)))
        answer = await desk.client.post("/compile", files=sent)
        assert answer.status_code == 202, answer.text
        job = await desk.until(answer.json()["id"], "succeeded", "failed")
        assert (job["name"], job["device"], job["state"]) == ("succeed", "cpu", "succeeded")
        uploads = desk.service.folders.uploads(job["id"])
        stored = desk.service.folders.load_any_plan(job["id"])
        assert isinstance(stored, LanguagePlan)
        assert Path(stored.language_model.path) == uploads / "unpacked" / "tiny"
        assert '"$UPLOAD/unpacked/tiny"' in (uploads / "plan.json").read_text()
        assert stored.texts.selection == uploads / "selection.jsonl"
        names = {file.name for file in uploads.rglob("*") if file.is_file()}
        assert "model.safetensors" in names
        assert not {"README.md", "a.md", "model"} & names, "what nothing reads is not kept"
        same = await desk.client.post("/compile", files=sent)
        assert (same.status_code, same.json()["id"]) == (200, job["id"])
        other = parts(model, plan=("plan.yaml", plan(effort="normal", context=200)))
        assert (await desk.client.post("/compile", files=other)).json()["id"] != job["id"]

    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    at_desk(tmp_path / "home", story)


def test_a_gguf_file_needs_no_key_of_the_plan(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(load_model(find_source(str(model))), "llama", file)

    async def story(desk: Desk) -> None:
        written = json.loads(plan())
        del written["language_model"]
        sent = parts(
            model,
            model=("tiny.gguf", file.read_bytes()),
            plan=("plan.yaml", json.dumps(written).encode()),
        )
        answer = await desk.client.post("/compile", files=sent)
        assert answer.status_code == 202, answer.text
        stored = desk.service.folders.load_any_plan(answer.json()["id"])
        assert isinstance(stored, LanguagePlan)
        assert Path(stored.language_model.path).name == "model.gguf"
        cut = parts(model, model=("tiny.gguf", file.read_bytes()[:2000]))
        refused = await desk.client.post("/compile", files=cut)
        assert refused.status_code == 422
        assert "model.gguf" in refused.json()["error"]

    at_desk(tmp_path, story)


def test_a_plan_of_the_server_is_compiled_and_an_equal_one_is_the_same_job(
    model: Path, tmp_path: Path
) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    document = {"name": "succeed", **language_plan(configs, model)}
    (configs / "tiny.yaml").write_text(yaml.safe_dump(document))

    async def story(desk: Desk) -> None:
        answer = await desk.client.post("/compile", json={"config": "tiny"})
        assert answer.status_code == 202, answer.text
        await desk.until(answer.json()["id"], "succeeded")
        again = await desk.client.post("/compile", json={"config": "tiny"})
        assert (again.status_code, again.json()["id"]) == (200, answer.json()["id"])
        (configs / "selection.jsonl").write_bytes(jsonl("selection", 5))
        changed = await desk.client.post("/compile", json={"config": "tiny"})
        assert changed.status_code == 202
        (configs / "selection.jsonl").write_bytes(jsonl("selection", 2))
        refused = await desk.client.post("/compile", json={"config": "tiny"})
        assert refused.status_code == 422
        assert "2 texts" in refused.json()["error"]

    at_desk(tmp_path / "home", story, configs=configs)


def test_the_form_of_the_pages_compiles_a_language_model(model: Path, tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        form = await desk.client.get("/ui/new")
        assert 'action="/ui/language-models"' in form.text
        written = ("", plan().replace(b"\n", b"\r\n"))  # a text of a form has no file name
        chosen = parts(model, plan=written)
        sent = await desk.client.post("/ui/language-models", files=chosen)
        assert sent.status_code == 303, sent.text
        assert sent.headers["Location"].startswith("/ui/jobs/")
        wrong = parts(model, validation=None)
        refused = await desk.client.post("/ui/language-models", files=wrong)
        assert refused.status_code == 422
        assert "no part `validation`" in refused.text
        as_json = await desk.client.post("/ui/language-models", json={"config": "tiny"})
        assert as_json.status_code == 422, "only a form: a page of another site could send JSON"

    at_desk(tmp_path, story)


def test_a_plan_for_a_gpu_goes_to_the_gpu_with_the_fewest_jobs(tmp_path: Path) -> None:
    written = language_plan(tmp_path, "m", device="gpu")
    on_gpu = language_plan_from_document(written, tmp_path)
    on_cpu = on_gpu.model_copy(update={"device": "cpu"})
    devices, load = ("cpu", "gpu:0", "gpu:1"), {"gpu:0": 2, "gpu:1": 1}
    assert device_for(on_gpu, devices, load) == "gpu:1"
    assert device_for(on_gpu, devices, {}) == "gpu:0"
    assert device_for(on_cpu, devices, load) == "cpu"
    with pytest.raises(Unprocessable, match="wants a GPU, and this service has none"):
        device_for(on_gpu, ("cpu",), {})


def without(name: str) -> Callable[[Files], Files]:
    return lambda files: {key: value for key, value in files.items() if key != name}


def with_file(name: str, content: bytes = b"x") -> Callable[[Files], Files]:
    return lambda files: {**files, name: content}


def with_config(**keys: object) -> Callable[[Files], Files]:
    def change(files: Files) -> Files:
        config = json.loads(files["config.json"]) | keys
        return {**files, "config.json": json.dumps(config).encode()}

    return change


def with_index(*names: str) -> Callable[[Files], Files]:
    index = {"weight_map": {str(number): name for number, name in enumerate(names)}}
    return with_file("model.safetensors.index.json", json.dumps(index).encode())


CHANGES: list[tuple[Callable[[Files], Files], str]] = [
    (with_file("modeling_tiny.py"), "'tiny/modeling_tiny.py' in the archive is code, a pickle"),
    (with_file("pytorch_model.bin"), "is code, a pickle or another form"),
    (with_file("more/config.json", b"{}"), "an archive with 2 files config.json"),
    (without("config.json"), "an archive with 0 files config.json"),
    (without("model.safetensors"), "lacks model.safetensors"),
    (without("tokenizer.json"), "has no tokenizer"),
    (with_index("model.safetensors", "model-2.safetensors"), "lacks model-2.safetensors"),
    (with_index("../../secret.safetensors"), "expected a file in the same folder"),
    (with_config(auto_map={"AutoModel": "x.py"}), "has code of its own"),
    (with_config(model_type="gpt2"), "the architecture `gpt2` is not known"),
    (with_config(max_position_embeddings=128), "context: expected at most 128"),
    (lambda files: {**files, "model.safetensors": files["model.safetensors"][:-9]}, "bytes"),
    (with_file("config.json", b"["), "is not JSON"),
    (with_file("config.json", b"[" * 100_000), "is not JSON"),
]


TEXTS = "a language model is judged on your texts"
PARTS: list[tuple[dict[str, tuple[str, bytes] | None], str]] = [
    ({"selection": None}, f"no part `selection`: {TEXTS}"),
    ({"validation": None}, f"no part `validation`: {TEXTS}"),
    ({"selection": ("s.jsonl", jsonl("validation"))}, "is in texts.selection, too"),
    ({"selection": ("s.jsonl", b'{"texts": "a"}\n')}, "line 1: expected"),
    ({"selection": ("s.jsonl", b"[" * 100_000)}, "line 1: expected"),
    ({"selection": ("s.npz", b"PK\x03\x04\xff")}, "is not UTF-8"),
    ({"tokenizer": ("tokenizer.json", b"{}")}, "is in its file or folder"),
    ({"model": ("m.gguf", b"GGUF")}, "is damaged"),
    ({"model": ("m.gguf", b"no model")}, "does not begin with GGUF"),
    ({"model": ("m.onnx", b"no model")}, "does not begin with GGUF"),
    ({"model": ("m.tar", b"no archive")}, "the archive is damaged"),
]


PLANS: list[tuple[dict[str, Any], str]] = [
    ({"language_model": {"path": "/etc/passwd"}}, "language_model.path: no path of the server"),
    ({"language_model": "/etc/passwd"}, "language_model: no path of the server"),
    ({"texts": {"selection": "/etc/passwd"}}, "texts.selection: no path of the server"),
    ({"texts": ["/etc/passwd"]}, "texts: no path of the server"),
    ({"texts": [{"max_tokens": 96}]}, "texts: no path of the server"),
    ({"stage_timeout_s": 1}, "unknown key 'stage_timeout_s': expected one of accuracy, "),
    ({"accuracy": {"max_drop": 1}}, "unknown key 'accuracy.max_drop'"),
    ({"candidates": [{"weights": "int3"}]}, "candidates.0.weights"),
    ({"candidates": [{"weights": "int4_sym", "awq": True}]}, "expected texts.calibration"),
    ({"candidates": [{"weights": "fp16"}] * 65}, "candidates: 65, expected at most 64"),
    ({"name": "x" * 101}, "name: 101 characters"),
    ({"context": 20}, "context: 20 tokens"),
    ({"device": "gpu"}, "device: the plan wants a GPU, and this service has none"),
]


def test_what_is_wrong_is_said_at_submission_without_paths_of_the_server(
    model: Path, tmp_path: Path
) -> None:
    """One server for all cases: its helpers start slowly."""
    wrong: list[tuple[Parts, str]] = []
    for change, message in CHANGES:
        archive = packed(change(files_of(model)))
        wrong.append((parts(model, model=("tiny.tar.gz", archive)), message))
    wrong += [(parts(model, **changes), message) for changes, message in PARTS]
    for sections, message in PLANS:
        wrong.append((parts(model, plan=("plan.yaml", plan(**sections))), message))

    async def story(desk: Desk) -> None:
        for sent, message in wrong:
            answer = await desk.client.post("/compile", files=sent)
            assert answer.status_code == 422, (message, answer.text)
            refusal = answer.json()
            assert message in refusal["error"], refusal
            assert refusal["next"]
            assert str(tmp_path) not in answer.text
        uploads = desk.service.folders.home / "uploads"
        assert not list(uploads.iterdir()), "a refused upload leaves nothing"

    at_desk(tmp_path, story)


def test_an_archive_of_a_language_model_without_its_key_names_the_key(
    model: Path, tmp_path: Path
) -> None:
    async def story(desk: Desk) -> None:
        sent = parts(model, plan=("plan.yaml", b"name: succeed"), selection=None, validation=None)
        answer = await desk.client.post("/compile", files=sent)
        assert "`language_model: {}`" in answer.json()["next"]

    at_desk(tmp_path, story)


def test_a_host_that_lacks_the_packages_says_so(tmp_path: Path) -> None:
    lacks = HOST.model_copy(update={"language_models": "gguf is not installed"})

    async def story(desk: Desk) -> None:
        file = tmp_path / "model"
        file.write_bytes(b"GGUF")
        sent = {"model": Part("model", file, "", 4, "m.gguf")}
        why = "this service compiles no language models: gguf is not installed"
        with pytest.raises(Unprocessable, match=why):
            await request_of_parts(desk.service, sent, "me", lacks)

    at_desk(tmp_path / "home", story)


def test_each_key_of_a_plan_is_either_allowed_or_a_path() -> None:
    """Before allowing a new key, consider what a stranger could do with it."""
    sections = (LanguagePlan, LanguageAccuracy, LanguageCandidate, LanguageBenchmark, Goodput)
    for section in sections:
        assert sorted(allowed_keys(section)) == sorted(section.model_fields)
    paths = {"path", "calibration", "selection", "validation"}
    for files in (LanguageModelConfig, Texts):
        assert set(allowed_keys(files)) == files.model_fields.keys() - paths
