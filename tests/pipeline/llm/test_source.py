"""Sources of language models: what is missing, damaged or foreign is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import ModelError, PlanError
from pipeline.llm.hf import check_tokenizer
from pipeline.llm.source import describe, find_source
from tests.pipeline.llm.models import VOCABULARY, trained_tokenizer, write_model

pytest.importorskip("transformers", reason="language models: no transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def copied(model: Path, folder: Path) -> Path:
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_folder_is_described(model: Path) -> None:
    about = describe(find_source(str(model)), 256)
    assert (about.architecture, about.layers, about.vocabulary) == ("llama", 2, VOCABULARY)
    assert about.cache_values_per_token == 2 * 2 * 16 * 2
    assert about.parameters > VOCABULARY * 64
    assert not about.is_quantised


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _set(**keys: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _shards(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("config.json"), "has no config.json"),
        (_drop("model.safetensors"), "lacks model.safetensors"),
        (_shards, "lacks model-2.safetensors"),
        (_drop("tokenizer.json"), "has no tokenizer"),
        (_set(auto_map={"AutoModel": "code.Model"}), "has code of its own"),
        (_set(model_type="mamba"), "the architecture `mamba` is not known; known: llama"),
        (_cut, "its header says"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    ],
)
def test_a_faulty_folder_is_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = copied(model, tmp_path)
    change(folder)
    with pytest.raises(ModelError) as error:
        describe(find_source(str(folder)), 256)
    assert message in str(error.value)
    assert error.value.next_step


def test_a_context_is_as_long_as_the_model_allows(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expected at most 256, because the model was trained for"):
        describe(find_source(str(model)), 300)
    folder = copied(model, tmp_path)
    _set(model_type="mistral", sliding_window=64)(folder)
    with pytest.raises(PlanError, match="at most 64, because the model looks back"):
        describe(find_source(str(folder)), 100)


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nothing at"):
        find_source(str(tmp_path / "none"))
    with pytest.raises(PlanError, match="no package `crucible_lacks_this` is installed"):
        find_source("package:crucible_lacks_this/m.gguf")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"ELF" + bytes(100))
    with pytest.raises(ModelError, match="does not begin with GGUF"):
        find_source(str(file))
    pytest.importorskip("gguf", reason="language models: no gguf")
    file.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ModelError, match="is damaged"):
        describe(find_source(str(file)), 100)


def test_a_foreign_tokenizer_is_refused(model: Path) -> None:
    source, tokenizer = find_source(str(model)), trained_tokenizer()
    check_tokenizer(tokenizer, VOCABULARY, source)
    with pytest.raises(ModelError, match="has ids up to 383, the model knows 300"):
        check_tokenizer(tokenizer, 300, source)


def test_the_digest_of_a_gguf_file_is_that_of_its_content(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"GGUF 1")
    other.write_bytes(b"GGUF 1")
    digest = find_source(str(one)).digest
    assert find_source(str(other)).digest == digest
    other.write_bytes(b"GGUF 2")
    assert find_source(str(other)).digest != digest
