"""Versions never change, their numbers are given once, and what is not in use goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from pipeline.core.artifacts import Engine
from pipeline.core.recipe import Precision
from pipeline.core.shapes import TensorSpec
from pipeline.errors import DamagedError
from pipeline.plan.schema import ModelConfig, Plan
from pipeline.report.bundle import load_engine
from pipeline.report.files import load_report
from service.errors import Conflict, NotFound
from service.jobs.store import DamagedRow
from service.registry.models import DeploymentOptions, Version, prunable
from service.registry.repository import Repository, promoted_engine
from service.storage.database import Database
from service.storage.layout import Folders
from service.storage.migrations import Schema
from tests.service.builders.jobs import write_out
from tests.service.serving.models import PROVED


def version(
    model: str = "m", owner: str = "me", number: int = 1, before: int | None = None
) -> Version:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
    return Version(
        model=model,
        version=number,
        owner=owner,
        job=f"job of {number}",
        created="2026-01-01T00:00:00.000+00:00",
        verdict="accepted",
        override=False,
        before=before,
        label="onnxruntime fp32",
        backend="onnxruntime",
        precision=Precision.FP32,
        target="a CPU",
        on_gpu=False,
        size_bytes=6,
        inputs=(spec,),
        outputs=(spec,),
        profiles=(),
        batch=PROVED,
        labels={"x": ("cat", "dog")},
    )


class Home:
    def __init__(self, folder: Path, location: Path | str | None = None) -> None:
        write_out(folder / "report", folder / "store")
        self.engine: Engine = load_engine(folder / "report")
        self.folders, self.database = Folders(folder), Database(location or folder / "crucible.db")
        self.repository = Repository(self.database, self.folders)

    def add(self, model: str = "m", owner: str = "me", current: bool = True) -> int:
        return self.repository.add(version(model, owner), self.engine.root, current).version


@pytest.fixture
def home(tmp_path: Path, location: Path | str) -> Iterator[Home]:
    opened = Home(tmp_path, location)
    yield opened
    opened.database.close()


def test_a_promoted_engine_is_found_beside_a_server_and_nothing_is_written(home: Home) -> None:
    assert [home.add("net") for _ in range(10)][-1] == 10
    before = {path: path.stat().st_mtime_ns for path in home.folders.home.rglob("*")}
    engine = promoted_engine(home.folders.home, "net", 2)
    assert (engine.path.read_bytes(), engine.root) == (
        b"engine",
        home.folders.version("net", 2) / "engine",
    )
    with pytest.raises(NotFound, match="no version 11 of 'net'") as refused:
        promoted_engine(home.folders.home, "net", 11)
    assert "of 'net' it has 1, 2, 3, 4, 5, 6, 7, 8, 9, 10;" in str(refused.value.next_step)
    with pytest.raises(NotFound) as refused:
        promoted_engine(home.folders.home / "other", "net", 1)
    assert "it has no model 'net'" in str(refused.value.next_step)
    assert {path: path.stat().st_mtime_ns for path in home.folders.home.rglob("*")} == before


def test_a_version_is_what_was_added_and_its_files_outlive_the_report(home: Home) -> None:
    assert [home.add(), home.add()] == [1, 2]
    model = home.repository.get("m")
    assert (
        model.current,
        [version.version for version in model.versions],
        model.deployed,
        model.options,
    ) == (2, [2, 1], False, None)
    assert model.version() == version(number=2, before=1).model_copy(update={"job": "job of 1"})
    shutil.rmtree(home.engine.root)
    engine = home.repository.engine(model.version(1))
    assert (engine.path.read_bytes(), engine.root) == (
        b"engine",
        home.folders.version("m", 1) / "engine",
    )


def test_another_owner_cannot_take_a_name_and_does_not_see_it(home: Home) -> None:
    home.add()
    with pytest.raises(Conflict, match="the name 'm' is taken"):
        home.add(owner="you")
    with pytest.raises(NotFound, match="no model 'm'"):
        home.repository.get("m", "you")
    home.add("n", "you")
    assert [model.name for model in home.repository.list("you")] == ["n"]
    assert [model.name for model in home.repository.list()] == ["m", "n"]
    with pytest.raises(NotFound, match="model 'm' has no version 7"):
        home.repository.get("m").version(7)


def test_an_engine_that_cannot_be_copied_leaves_nothing(home: Home, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        home.repository.add(version(), tmp_path / "nowhere", current=True)
    assert home.repository.list() == ()
    assert home.repository.sweep() == 0


def test_a_number_is_never_given_twice_and_the_current_version_is_never_removed(home: Home) -> None:
    home.add()
    home.add(current=False)
    home.repository.remove("m", [1, 2])
    assert (home.repository.get("m").current, len(home.repository.get("m").versions)) == (1, 1)
    assert not home.folders.version("m", 2).exists()
    assert home.add() == 3


def test_a_rollback_passes_over_a_version_that_was_removed(home: Home) -> None:
    for _ in range(3):
        home.add()
    home.repository.remove("m", [2])
    assert home.repository.get("m").version(3).before == 1
    home.repository.remove("m", [1])
    assert home.repository.get("m").version(3).before is None


def test_how_it_was_deployed_last_is_remembered(home: Home) -> None:
    home.add()
    home.repository.set_deployed("m", DeploymentOptions(instances=3))
    home.repository.set_deployed("m", None)
    model = home.repository.get("m")
    assert (model.deployed, model.options) == (False, DeploymentOptions(instances=3))


def test_old_versions_are_pruned_but_none_in_use(home: Home) -> None:
    for _ in range(7):
        home.add()
    home.repository.set_deployed("m", DeploymentOptions(version=2))
    home.repository.set_current("m", 4)
    assert home.repository.prune("m", {3}, keep=2) == (
        5,
    )  # 4 is current and 3 before it, 3 is in use and 2 before it, 2 is pinned and 1 before it
    assert [version.version for version in home.repository.get("m").versions] == [7, 6, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("used", "keep", "gone"),
    [({5}, 1, (1, 2, 3)), ({5}, 9, ()), ({2}, 1, (3, 4)), ({1}, 2, (2, 3)), (set(), 2, (1, 2, 3))],
)
def test_which_versions_need_not_be_kept(used: set[int], keep: int, gone: tuple[int, ...]) -> None:
    versions = [version(number=number, before=number - 1 or None) for number in range(1, 6)]
    assert prunable(versions, used, keep) == gone


def test_what_a_killed_promotion_left_is_swept_and_in_nobodys_way(home: Home) -> None:
    home.add()
    for left in (
        home.folders.models / ".half",
        home.folders.version("m", 2),
        home.folders.version("other", 1),
    ):
        left.mkdir(parents=True)
        (left / "file").touch()
    assert home.add() == 2
    assert not (home.folders.version("m", 2) / "file").exists()
    (home.folders.version("m", 3)).mkdir()
    assert home.repository.sweep() == 3
    assert sorted(path.name for path in home.folders.models.iterdir()) == ["m", "other"]
    assert home.repository.engine(home.repository.get("m").version()).path.is_file()


def test_jobs_whose_reports_prove_a_version_are_known(home: Home) -> None:
    home.add()
    assert home.repository.jobs() == {"job of 1"}


def test_a_damaged_row_is_named_and_the_others_are_told(home: Home) -> None:
    home.add()
    home.add("n")
    with home.database.write() as rows:
        rows.exec_driver_sql("UPDATE versions SET about = '{' WHERE model = 'm'")
    assert [model.name for model in home.repository.list()] == ["n"]
    with pytest.raises(DamagedRow, match="the database rows of model 'm'"):
        home.repository.get("m")


def test_what_a_version_held_when_it_was_loaded_is_remembered(home: Home) -> None:
    home.add()
    home.add()
    for held in (70, 50, 60, 0):
        home.repository.set_memory(version(), held)
    assert [version.memory_bytes for version in home.repository.get("m").versions] == [None, 50]


def test_a_home_of_before_gets_the_tables_and_keeps_what_it_has(tmp_path: Path) -> None:
    before = Database(tmp_path / "crucible.db", Schema("0001"))
    with before.write() as rows:
        rows.exec_driver_sql(
            "INSERT INTO keys (prefix, sha256, name, owner, scopes, created) VALUES ('p', 'x', 'n',"
            " 'o', '', 'now')"
        )
    with before.read() as rows:
        assert not sa.inspect(rows).has_table("models")
    before.close()
    home = Home(tmp_path)
    assert home.add() == 1
    with home.database.read() as rows:
        assert list(rows.scalars(sa.text("SELECT prefix FROM keys"))) == ["p"]
    home.database.close()


def test_models_of_the_schema_before_this_one_are_served_on(tmp_path: Path) -> None:
    """Its rows as it wrote them: of versions it did not know what they hold in memory."""
    old = Database(tmp_path / "crucible.db", Schema("0002"))
    with old.write() as rows:
        rows.exec_driver_sql(
            "INSERT INTO models VALUES ('m', 'me', 1, 2, 1, ?)",
            (DeploymentOptions(instances=2).model_dump_json(),),
        )
        for number, before in ((1, None), (2, 1)):
            about = version(number=number).model_dump_json(exclude={"memory_bytes", "peak_bytes"})
            rows.exec_driver_sql(
                "INSERT INTO versions VALUES ('m', ?, ?, ?, ?)",
                (number, f"job of {number}", before, about),
            )
    old.close()
    home = Home(tmp_path)
    model = home.repository.get("m")
    assert (model.owner, model.current, model.deployed, model.options) == (
        "me",
        1,
        True,
        DeploymentOptions(instances=2),
    )
    assert model.versions == (version(number=2, before=1), version(number=1))
    home.repository.set_memory(model.version(1), 70)
    assert [version.memory_bytes for version in home.repository.get("m").versions] == [None, 70]
    assert home.add() == 3
    home.database.close()


def lendable(home: Home) -> Version:
    """The first version of `m`, with the upload and the report of its job."""
    home.add()
    lent = home.repository.get("m").version()
    home.folders.save_plan(
        lent.job,
        Plan(name="p", model=ModelConfig(path=home.folders.uploads(lent.job) / "model.onnx")),
    )
    (home.folders.uploads(lent.job) / "model.onnx").write_bytes(b"model")
    shutil.copytree(home.folders.models.parent / "report", home.folders.report(lent.job))
    return lent


def test_what_was_lent_outlives_the_version_and_is_nobody_elses(home: Home) -> None:
    lent = lendable(home)
    for job in ("a", "b"):
        home.repository.lend(lent, job)
    home.add()
    home.repository.remove("m", [1])
    shutil.rmtree(home.folders.report(lent.job))
    shutil.rmtree(home.folders.uploads(lent.job))
    (home.folders.compiled("a") / "engine" / "model.onnx").write_bytes(b"written over")
    (home.folders.compiled("a") / "report.json").write_bytes(b"written over")
    place = home.folders.compiled("b")
    assert (place / "engine" / "model.onnx").read_bytes() == b"engine"
    assert (load_engine(place).digest, load_report(place).winner) == (
        home.engine.digest,
        load_report(home.folders.models.parent / "report").winner,
    )
    assert home.folders.load_plan("b").model.path == home.folders.uploads("b") / "model.onnx"
    assert (home.folders.uploads("b") / "model.onnx").read_bytes() == b"model"


def test_what_a_benchmark_measured_is_replaced_where_its_report_was_promoted(home: Home) -> None:
    lent = lendable(home)
    home.repository.lend(lent, "a")
    old = home.folders.compiled(lent.job)
    shutil.copytree(home.folders.compiled("a"), old)
    (old / "report.json").write_bytes(b"of before")
    home.repository.lend(lent, "b")
    assert load_report(home.folders.compiled("b")).winner
    assert (old / "report.json").read_bytes() == b"of before"


def test_a_version_of_which_something_is_missing_is_not_lent(home: Home) -> None:
    lent = lendable(home)
    for gone in (
        home.folders.version("m", 1),
        home.folders.report(lent.job),
        home.folders.uploads(lent.job),
    ):
        gone.rename(aside := gone.with_name("aside"))
        with pytest.raises(DamagedError, match="version 1 of 'm' is damaged"):
            home.repository.lend(lent, "a")
        aside.rename(gone)
        shutil.rmtree(home.folders.uploads("a"), ignore_errors=True)  # as whoever asked does
    home.repository.lend(lent, "a")


def test_two_servers_that_promote_a_report_at_once_add_one_version(home: Home) -> None:
    """The later one gets the version of the first, which it did not know."""
    root = home.engine.root
    first = home.repository.add(version(), root, current=True, newest=0)
    assert home.repository.add(version(), root, current=True, newest=0) == first
    assert [folder.name for folder in home.folders.models.glob("m/*")] == ["1"]
    assert list(home.folders.models.glob(".*")) == []
    again = home.repository.add(version(), root, current=True, newest=1)
    assert (first.version, again.version) == (1, 2), "it was promoted again on purpose"
    with pytest.raises(Conflict, match="is taken"):
        home.repository.add(version(owner="other"), root, current=True, newest=0)
