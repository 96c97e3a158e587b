"""What a child leaves behind is published only if it is what it says it is."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StoreError
from pipeline.execution.durations import History
from pipeline.execution.store import Store, read_manifest, write_manifest
from pipeline.llm.engine import SETTINGS_FILE, LanguageEngine
from pipeline.llm.results import LanguageReport
from service.jobs.publish import (
    CACHE,
    publish,
    published_any_report,
    published_engine,
    take_over,
)
from service.storage.layout import Folders, Work
from tests.pipeline.execution.test_store import KEY, Text, make, never
from tests.service.builders.jobs import write_out
from tests.service.serving.language.models import paper_model, write_report


def edit(
    change: Callable[[dict[str, Any]], None], name: str = "report.json"
) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        document = json.loads((out / name).read_text())
        change(document)
        (out / name).write_text(json.dumps(document))

    return damage


def replace_by_link(out: Path) -> None:
    (out / "report.md").unlink()
    (out / "report.md").symlink_to("/etc/passwd")


def link_hard(out: Path) -> None:
    (out.parent / "secret").write_text("secret")
    (out / "report.md").unlink()
    os.link(out.parent / "secret", out / "report.md")


def move_engine(out: Path) -> None:
    (out / "engine").rename(out.parent / "engine")
    (out / "engine").symlink_to(out.parent / "engine")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda out: (out / "report.json").unlink(), "missing files: report.json"),
    (lambda out: (out / "report.html").unlink(), "missing files: report.html"),
    (lambda out: (out / "report.json").write_text("[" * 100_000), "an invalid report"),
    (
        lambda out: (out / "report.json").write_text('{"schema_version": 1}'),
        "does not fit the schema",
    ),
    (edit(lambda report: report.update(schema_version=99)), "schema version 99"),
    (edit(lambda report: report.update(extra=1)), "does not fit the schema"),
    (edit(lambda report: report.update(winner="nobody")), "winner is not among its candidates"),
    (
        edit(lambda report: report.update(winner=None)),
        "its verdict is accepted, but it names no winner",
    ),
    (
        edit(lambda report: report.update(verdict="rejected")),
        "it names no engine, but the folder has one",
    ),
    (edit(lambda report: report.update(verdict="keep")), "winner is not among its candidates"),
    (
        edit(lambda report: report.update(winner="onnxruntime fp32")),
        "the engine in the folder is not the one that it names",
    ),
    (
        edit(lambda engine: engine.update(digest="other"), "engine/engine.json"),
        "differs from 'artifact.json'",
    ),
    (
        edit(lambda manifest: manifest["value"].update(digest="other"), "engine/artifact.json"),
        "'artifact.json' has another digest",
    ),
    (lambda out: (out / "engine" / "model.onnx").write_bytes(b"enginE"), "another digest"),
    (lambda out: (out / "engine" / "model.onnx").unlink(), "'model.onnx' is missing"),
    (lambda out: (out / "engine" / "more").write_bytes(b""), "'more' was added"),
    (lambda out: (out / "engine" / "artifact.json").unlink(), "an invalid report"),
    (lambda out: (out / "engine" / "engine.json").write_text("{"), "is not an engine"),
    (lambda out: (out / "index.html").write_text(""), "unexpected files: index.html"),
    (lambda out: os.mkfifo(out / "report.pipe"), "neither a plain file nor a folder"),
    (replace_by_link, "neither a plain file nor a folder"),
    (link_hard, "neither a plain file nor a folder"),
    (move_engine, "neither a plain file nor a folder"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_what_does_not_hold_is_not_published(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    out, place = tmp_path / "work" / "out", tmp_path / "reports" / "1"
    write_out(out, tmp_path / "store")
    damage(out)
    with pytest.raises(StoreError, match="an invalid report") as error:
        publish(out, place, Folders(tmp_path))
    assert message in error.value.message
    assert not place.exists()


def engine_of_transformers(out: Path) -> None:
    """An engine whose manifest is right, and that no worker opens."""
    shutil.rmtree(out)
    tiny = paper_model(out.parent / "other")
    engine = tiny.engine.model_copy(update={"library": "transformers"})
    write_manifest(engine.root, engine, read_manifest(engine.root).provenance)
    write_report(out, replace(tiny, engine=engine))


def engine_without_settings(out: Path) -> None:
    """An engine whose manifest is right, and that has no tokens."""
    shutil.rmtree(out)
    tiny = paper_model(out.parent / "other")
    (tiny.engine.root / SETTINGS_FILE).write_text("{}")
    write_manifest(tiny.engine.root, tiny.engine, read_manifest(tiny.engine.root).provenance)
    write_report(out, tiny)


LANGUAGE_DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (edit(lambda report: report.update(winner="nobody")), "winner is not among its candidates"),
    (edit(lambda report: report.update(winner="")), "and its engine another one"),
    (edit(lambda report: report.update(delivered=None)), "and its engine another one"),
    (edit(lambda report: report.update(delivered=None, winner="")), "it names no winner"),
    (
        edit(lambda report: report.update(delivered=None, winner="", verdict="rejected")),
        "it names no engine, but the folder has one",
    ),
    (edit(lambda report: report.update(schema_version=99)), "schema version 99"),
    (edit(lambda report: report.update(extra=1)), "does not fit the schema"),
    (edit(lambda report: report["delivered"].update(weight_bytes=2)), "not the one that it names"),
    (lambda out: (out / "engine" / SETTINGS_FILE).write_text("{}"), "another digest"),
    (lambda out: (out / "engine" / SETTINGS_FILE).unlink(), "is missing"),
    (engine_of_transformers, "expected an engine that was built, got one of transformers"),
    (engine_without_settings, "'language.json' of the language model cannot be read"),
]


@pytest.mark.parametrize(("damage", "message"), LANGUAGE_DAMAGES)
def test_a_damaged_report_of_a_language_model_is_not_published(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    out, place = tmp_path / "work" / "out", tmp_path / "reports" / "1"
    write_report(out, paper_model(tmp_path / "work"))
    damage(out)
    with pytest.raises(StoreError, match="an invalid report") as error:
        publish(out, place, Folders(tmp_path))
    assert message in error.value.message
    assert not place.exists()


def test_a_report_of_a_language_model_is_published_and_read_again(tmp_path: Path) -> None:
    out, place = tmp_path / "work" / "out", tmp_path / "reports" / "1"
    written = write_report(out, paper_model(tmp_path / "work"))
    assert publish(out, place, Folders(tmp_path)).winner == written.winner
    report, engine = published_any_report(place), published_engine(place)
    assert isinstance(report, LanguageReport)
    assert isinstance(engine, LanguageEngine)
    assert report.delivered == engine
    assert engine.label == report.winner


def test_nothing_at_all_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="an invalid report"):
        publish(tmp_path / "out", tmp_path / "place", Folders(tmp_path))


def test_a_whole_report_is_published_in_the_place_of_an_earlier_attempts(tmp_path: Path) -> None:
    out, place = tmp_path / "work" / "out", tmp_path / "reports" / "1"
    place.mkdir(parents=True)
    (place / "old").touch()
    written = write_out(out, tmp_path / "store")
    report = publish(out, place, Folders(tmp_path))
    assert (report.winner, report.verdict) == (written.winner, "accepted")
    assert (place / "engine" / "model.onnx").read_bytes() == b"engine"
    assert not (place / "old").exists()
    assert not out.exists()


def test_a_kept_baseline_that_is_unproven_is_published(tmp_path: Path) -> None:
    """A model was served during the measurements, so `keep` became `unproven`."""
    out = tmp_path / "out"
    baseline = write_out(out, tmp_path / "store").baseline
    assert baseline is not None

    def keep(report: dict[str, Any]) -> None:
        (winner,) = [each for each in report["candidates"] if each["label"] == report["winner"]]
        report.update(verdict="unproven", winner=baseline.label, delivered=winner["engine"])

    edit(keep)(out)
    report = publish(out, tmp_path / "reports" / "1", Folders(tmp_path))
    assert (report.verdict, report.winner) == ("unproven", baseline.label)


def test_what_a_job_made_is_there_for_the_next(tmp_path: Path) -> None:
    home, work = tmp_path / "home", Work(tmp_path / "home" / "jobs" / "1")
    work.home.mkdir(parents=True)
    History(home).add("build", "known", 1.0)
    (work.home / "history.jsonl").write_bytes((home / "history.jsonl").read_bytes())
    History(work.home).add("build", "new", 2.0, "plan", "cpu")
    Store(work.home).get(KEY, Text, make)
    take_over(work, home)
    assert Store(home).get(KEY, Text, never).value.path.read_text() == "hello"
    assert [(entry.subject, entry.seconds) for entry in History(home).entries()] == [
        ("known", 1.0),
        ("new", 2.0),
    ]
    assert Store(work.home).find(KEY, Text) is None


@pytest.mark.parametrize("complete", [True, False])
def test_a_timing_cache_is_taken_if_it_is_whole(tmp_path: Path, complete: bool) -> None:
    home, work, key = tmp_path / "home", Work(tmp_path / "home" / "jobs" / "1"), "ab" * 32
    for root, data in ((home, b"old"), (work.home, b"new")):
        folder = root / "timing" / key
        folder.mkdir(parents=True)
        (folder / CACHE).write_bytes(data)
        (folder / "target.json").write_text(
            json.dumps({"sha256": hashlib.sha256(data).hexdigest()})
        )
    if not complete:
        (work.home / "timing" / key / CACHE).write_bytes(b"torn")
    (work.home / "timing" / "..evil").mkdir()
    take_over(work, home)
    assert (home / "timing" / key / CACHE).read_bytes() == (b"new" if complete else b"old")
    assert [path.name for path in (home / "timing").iterdir()] == [key]
