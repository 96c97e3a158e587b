from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from service.sandbox import layers
from service.sandbox.control_groups import ControlGroups
from service.sandbox.layers import Layer, Sandbox, give_tree, program_files, without
from service.sandbox.proof import prove
from service.storage.database import Database
from service.storage.layout import Folders, Work

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")


def found(home: Path) -> Sandbox:
    sandbox = Sandbox(home)
    sandbox.find()
    return sandbox


def test_the_acts_of_a_strangers_code_fail_and_nothing_is_left(tmp_path: Path) -> None:
    database = Database(tmp_path / "crucible.db")
    database.close()
    sandbox = found(tmp_path)
    held = sandbox.held("cpu")
    if not {"Landlock", "seccomp"} <= set(held):
        pytest.skip(f"this host holds only {', '.join(held) or 'nothing'}")
    proof = prove(sandbox, tmp_path / "crucible.db")
    assert (proof.fault, proof.succeeded) == ("", ())
    assert len(proof.acts) == 17 * len(sandbox.devices)
    assert f"all {len(proof.acts)} forbidden acts of a job's code failed" in proof.lines
    assert list((tmp_path / "jobs").iterdir()) == []
    assert list((tmp_path / "models").iterdir()) == []


def test_without_layers_the_acts_succeed(tmp_path: Path) -> None:
    database = Database(tmp_path / "crucible.db")
    database.close()
    proof = prove(Sandbox(tmp_path), tmp_path / "crucible.db")
    assert {"connect to the server", "read the key database", "outlive the job"} <= set(
        proof.succeeded
    )
    assert any(line.startswith("code of a job could: ") for line in proof.lines)


def test_a_gpu_that_does_not_open_in_the_layers_is_used_without_them(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path)
    names = ("own user", "Landlock", "seccomp", "control groups")
    sandbox.table = tuple(Layer(name=name, held=True, detail="") for name in names)
    assert sandbox.held("gpu:0") == names
    sandbox.gpu_fault = "it does not open"
    assert sandbox.held("gpu:0") == ("own user", "control groups")
    assert sandbox.held("cpu") == names


def test_acts_that_cannot_be_tried_prove_nothing(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path)
    sandbox.gpu_fault = "it does not open"
    proof = prove(sandbox, tmp_path / "crucible.db")
    assert len(proof.succeeded) == 17
    assert "the GPU: it does not open" in proof.lines[-1]


def test_the_home_is_not_among_the_programs_files(tmp_path: Path) -> None:
    home = Path(sys.prefix).resolve() / "share" / "home"
    assert not any(home.is_relative_to(path) for path in program_files(home))
    for name in ("a", "b", "home"):
        (tmp_path / name).mkdir()
    assert set(without(tmp_path, tmp_path / "home")) == {tmp_path / "a", tmp_path / "b"}
    assert list(without(tmp_path, Path("/elsewhere"))) == [tmp_path]


@is_root
def test_a_folder_changes_hands_without_its_links(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    outside.write_text("kept")
    (folder / "sub" / "link").symlink_to(outside)
    (folder / "hard").hardlink_to(outside)
    (folder / "file").write_text("")
    give_tree(folder, 64_000, 64_000)
    owners = {path.name: path.lstat().st_uid for path in folder.rglob("*")}
    assert owners == {"sub": 64_000, "link": 64_000, "hard": os.geteuid(), "file": 64_000}
    assert outside.stat().st_uid == os.geteuid()


@is_root
def test_each_child_is_a_user_of_its_own(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "home")
    sandbox.layers = layers.Layers(own_user=True)
    folders = Folders(tmp_path / "home")
    boxes = []
    for name in ("1", "2"):
        folders.work(name).prepare()
        folders.uploads(name).mkdir(parents=True)
        uploads = (folders.uploads(name),)
        boxes.append(sandbox.enter(name, folders.work(name), "cpu", read=uploads))
    first, second = (box.confinement.uid for box in boxes)
    assert first != second
    assert folders.work("1").root.stat().st_uid == first
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) & 0o010
    for box in boxes:
        box.close()
    assert folders.work("1").root.stat().st_uid == os.geteuid()
    assert sandbox.enter("3", folders.work("1"), "cpu").confinement.uid == first


def test_a_group_of_version_2_is_written(tmp_path: Path) -> None:
    own = tmp_path / "groups" / "service"
    own.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/service\n")
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    (own / "cgroup.procs").write_text("")
    groups = ControlGroups.find(tmp_path / "groups", tmp_path / "cgroup")
    assert not isinstance(groups, str)
    group = groups.create("job", 1000, 10)
    assert (own / "crucible-job" / "memory.max").read_text() == "1000"
    assert (own / "crucible-job" / "pids.max").read_text() == "10"
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert group.entrances == (str(own / "crucible-job" / "cgroup.procs"),)
    (own / "crucible-job" / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert group.memory_kills == 1


@pytest.mark.parametrize(
    ("line", "controllers", "reason"),
    [
        ("0::/service", "cpu", "no controller memory, pids"),
        ("3:cpu:/service", "", "no controllers of memory and processes"),
    ],
)
def test_why_there_are_no_groups(tmp_path: Path, line: str, controllers: str, reason: str) -> None:
    own = tmp_path / "groups" / "service"
    own.mkdir(parents=True)
    (tmp_path / "cgroup").write_text(line + "\n")
    if controllers:
        (own / "cgroup.controllers").write_text(controllers)
    found_reason = ControlGroups.find(tmp_path / "groups", tmp_path / "cgroup")
    assert isinstance(found_reason, str)
    assert reason in found_reason


def test_the_kernels_groups_hold_memory_where_they_can_be_written(tmp_path: Path) -> None:
    groups = ControlGroups.find()
    if isinstance(groups, str):
        pytest.skip(groups)
    sandbox = Sandbox(tmp_path)
    sandbox._groups = groups
    work = Work(tmp_path / "work")
    work.prepare()
    box = sandbox.enter("memory", work, "cpu", memory_bytes=64 * 2**20)
    subprocess.run(
        box.command((sys.executable, "-c", "x = b'1' * 200 * 2**20")), capture_output=True
    )
    assert box.ran_out_of_memory
    box.close()
    assert not any(path.exists() for path in map(Path, box.confinement.control_groups))


def test_users_are_not_changed_where_they_could_not_reach_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tuple(
        Layer(name=name, held=name == "own user", detail="")
        for name in ("own user", "Landlock", "seccomp", "control groups")
    )
    monkeypatch.setattr(layers, "find_layers", lambda: (table, None))
    (tmp_path / "closed").mkdir(mode=0o700)
    sandbox = found(tmp_path / "closed" / "home")
    assert not sandbox.layers.own_user
    assert f"cannot pass through '{tmp_path / 'closed'}'" in sandbox.table[0].detail
