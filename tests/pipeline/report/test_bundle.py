"""A delivered engine is what was built, or it is refused by the name of the file that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.artifacts import Engine
from pipeline.errors import DamagedError, ModelError
from pipeline.report.bundle import deliver_engine, has_manifest, load_engine, read_engine
from tests.builders.cli import crucible_here
from tests.integration.kills import engine_of, some_engine
from tests.service.builders.jobs import write_out

EARLIER_MANIFEST = Path(__file__).parents[2] / "data" / "earlier_engine.json"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_of(tmp_path / "store", b"built")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_threads(folder: Path) -> None:
    document = json.loads((folder / "engine.json").read_text())
    document["threads"] += 1
    (folder / "engine.json").write_text(json.dumps(document))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: flip(folder / "weights.bin"), "'weights.bin' has another digest than when it"),
    (lambda folder: (folder / "model.onnx").write_bytes(b""), "'model.onnx' has another digest"),
    (lambda folder: (folder / "weights.bin").unlink(), "'weights.bin' is missing"),
    (lambda folder: (folder / "more.bin").touch(), "'more.bin' was added"),
    (lambda folder: flip(folder / "artifact.json"), "artifact.json"),
    (lambda folder: (folder / "artifact.json").write_text("{"), "'artifact.json'"),
    (lambda folder: (folder / "engine.json").write_text("{"), "is not an engine of this version"),
    (lambda folder: (folder / "engine.json").write_text("[]"), "is not an engine of this version"),
    (change_threads, "'engine.json' differs from 'artifact.json'"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_file_that_is_not_what_it_was_is_named(
    tmp_path: Path,
    engine: Engine,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    deliver_engine(engine, tmp_path / "engine")
    assert load_engine(tmp_path) == engine.model_copy(update={"root": tmp_path / "engine"})
    damage(tmp_path / "engine")
    with pytest.raises(DamagedError) as refused:
        load_engine(tmp_path)
    assert message in refused.value.message
    assert "compile the model again" in refused.value.next_step


def test_an_engine_without_a_manifest_opens(tmp_path: Path, engine: Engine) -> None:
    """Of a delivery by a Crucible that wrote none: nothing is known against its files."""
    deliver_engine(engine, tmp_path / "engine")
    assert has_manifest(load_engine(tmp_path))
    (tmp_path / "engine" / "artifact.json").unlink()
    flip(tmp_path / "engine" / "weights.bin")
    assert not has_manifest(load_engine(tmp_path))


def test_an_engine_of_an_earlier_build_opens(tmp_path: Path) -> None:
    """Its manifest holds the build options under the names of that time, such as
    `workspace_bytes`.
    """
    text = EARLIER_MANIFEST.read_text()
    assert "workspace_bytes" in text
    (tmp_path / "artifact.json").write_text(text)
    (tmp_path / "engine.json").write_text(json.dumps(json.loads(text)["value"]))
    (tmp_path / "model.onnx").write_bytes(b"built")
    assert load_engine(tmp_path).digest.startswith("3f3f5947")
    flip(tmp_path / "model.onnx")
    with pytest.raises(DamagedError, match=r"'model\.onnx' has another digest"):
        load_engine(tmp_path)


def test_an_engine_from_no_store_gets_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    engine = some_engine().model_copy(update={"root": tmp_path / "built"})
    engine.path.write_bytes(b"built")
    deliver_engine(engine, tmp_path / "engine")
    assert load_engine(tmp_path).path.read_bytes() == b"built"
    flip(tmp_path / "engine" / engine.file)
    with pytest.raises(DamagedError):
        load_engine(tmp_path)


def test_what_is_damaged_in_the_store_is_not_delivered(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "out").mkdir()
    deliver_engine(engine, tmp_path / "out" / "engine")
    flip(engine.path)
    with pytest.raises(DamagedError, match="has another digest"):
        deliver_engine(engine, tmp_path / "out" / "engine")
    assert load_engine(tmp_path / "out").path.read_bytes() == b"built"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["engine"]


def test_what_killed_deliveries_left_is_removed_and_nothing_else(
    tmp_path: Path,
    engine: Engine,
) -> None:
    for name in (".engine.12", ".engine.12.old", ".engine.old"):
        (tmp_path / "out" / name).mkdir(parents=True)
    mine = {".engine.mine", "engine.12", "notes.txt"}
    for name in mine:
        (tmp_path / "out" / name).touch()
    deliver_engine(engine, tmp_path / "out" / "engine")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"engine", *mine}


def test_a_folder_without_an_engine_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected engine\.json"):
        read_engine(tmp_path)


COMMANDS = [
    ("bench", "out"),
    ("validate", "out"),
    ("export", "--triton", "net/1", "models", "--from", "out"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_run_a_delivered_engine_refuse_a_damaged_one(
    tmp_path: Path,
    command: tuple[str, ...],
) -> None:
    write_out(tmp_path / "out", tmp_path / "store")
    flip(tmp_path / "out" / "engine" / "model.onnx")
    result = crucible_here(*command, cwd=tmp_path)
    assert (result.code, result.out) == (1, "")
    assert "host.damaged the engine in 'out/engine' is damaged: 'model.onnx' has" in result.err
    assert "next compile the model again" in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_an_engine_that_cannot_be_checked_is_said_to_be(tmp_path: Path) -> None:
    write_out(tmp_path / "out", tmp_path / "store")
    (tmp_path / "out" / "engine" / "artifact.json").unlink()
    result = crucible_here("export", "--triton", "net/1", "models", "--from", "out", cwd=tmp_path)
    assert "changes of its files cannot be detected" in result.err
    assert result.code == 1  # it is no engine at all


def test_a_file_beside_an_engine_is_sealed_with_it(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "words.json").write_text("{}")
    beside = {"tokenizer.json": tmp_path / "words.json"}
    folder = tmp_path / "engine"
    deliver_engine(engine, folder, beside=beside)
    delivered = load_engine(folder)
    assert (folder / "tokenizer.json").read_text() == "{}"
    (tmp_path / "words.json").unlink()  # what is delivered again brings its own
    deliver_engine(delivered, tmp_path / "again", beside=beside)
    assert load_engine(tmp_path / "again").model_dump() == delivered.model_dump()
    (folder / "tokenizer.json").write_text("{ }")
    with pytest.raises(DamagedError, match=r"'tokenizer\.json' has another digest"):
        load_engine(folder)


def test_a_damaged_engine_is_not_sealed_with_a_file(tmp_path: Path, engine: Engine) -> None:
    deliver_engine(engine, tmp_path / "engine")
    flip(tmp_path / "engine" / "weights.bin")
    damaged = read_engine(tmp_path / "engine")
    (tmp_path / "words.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"weights\.bin"):
        deliver_engine(damaged, tmp_path / "out", beside={"t.json": tmp_path / "words.json"})
    assert not (tmp_path / "out").exists()
