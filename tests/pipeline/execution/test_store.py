"""The store: made once, published whole, found again, mended when damaged, safe for two."""

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.artifacts import Artifact, Target
from pipeline.core.frozen import Frozen
from pipeline.errors import (
    BackendUnavailable,
    ChildDied,
    DamagedError,
    DiskFull,
    InternalError,
    PlanError,
    StoreError,
)
from pipeline.execution.store import Key, Store, canonical
from tests.integration.robust import needs_root, small_disk

KEY = Key("export", 1, ("abc",), canonical({"b": 1, "a": 2}))


class Text(Artifact):
    length: int


def make(folder: Path) -> Text:
    (folder / "sub").mkdir()
    (folder / "sub" / "text").write_text("hello")
    return Text(root=folder, file="sub/text", length=5)


def never(folder: Path) -> Text:
    raise AssertionError("made again")


def test_an_artifact_is_made_once_and_found_again(tmp_path: Path) -> None:
    first = Store(tmp_path).get(KEY, Text, make)
    second = Store(tmp_path).get(KEY, Text, never)
    assert (first.reused, second.reused) == (False, True)
    assert first.value == second.value
    assert second.value.path.read_text() == "hello"
    assert second.provenance.stage == "export"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "other",
    [
        Key("simplify", 1, ("abc",), KEY.options),
        Key("export", 2, ("abc",), KEY.options),
        Key("export", 1, ("abd",), KEY.options),
        Key("export", 1, ("abc",), canonical({"b": 1, "a": 3})),
        Key("export", 1, ("abc",), KEY.options, {"onnx": "1"}),
        Key("export", 1, ("abc",), KEY.options, None, Target(backend="b", version="1", device="d")),
    ],
)
def test_every_part_of_the_key_counts(other: Key) -> None:
    assert other.digest != KEY.digest


def test_the_order_of_options_does_not_count() -> None:
    assert canonical({"a": 2, "b": 1}) == KEY.options


def test_a_failure_is_not_kept_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> Text:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path).get(KEY, Text, fail)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert Store(tmp_path).get(KEY, Text, make).reused is False


CHANGED = (
    "'sub/text' has another digest than when it was written: "
    "expected sha256 2cf24dba5fb0a30e…, got 04a6f55face2f46b…"  # of "hello" and "hellO"
)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "sub" / "text").write_text("hellO"), CHANGED),
        (
            lambda folder: (folder / "sub" / "text").write_text("hell"),
            "'sub/text' has another digest",
        ),
        (lambda folder: (folder / "sub" / "text").unlink(), "'sub/text' is missing"),
        (lambda folder: (folder / "sub" / "more").write_text(""), "'sub/more' was added"),
        (lambda folder: (folder / "sub" / "more").symlink_to("/nowhere"), "'sub/more' was added"),
        (lambda folder: (folder / "artifact.json").unlink(), "'artifact.json' is missing"),
        (lambda folder: (folder / "artifact.json").write_text("{"), "JSON"),
        (lambda folder: (folder / "artifact.json").write_text("[]"), "object"),
        (lambda folder: (folder / "artifact.json").write_text("{}"), "value"),
        (lambda folder: (folder / "artifact.json").write_bytes(b"\xff\x00" * 50), "JSON"),
        (
            lambda folder: (folder / "artifact.json").write_text(
                (folder / "artifact.json").read_text()[:-40]
            ),
            "JSON",
        ),
        (
            lambda folder: edit(folder / "artifact.json", '"length": 5', '"length": 6'),
            "'artifact.json' has another digest",
        ),
        (
            lambda folder: edit(folder / "artifact.json", '"sub/text":', '"sub/else":'),
            "'artifact.json' has another digest",
        ),
    ],
)
def test_a_damaged_artifact_is_made_again_and_said(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = Store(tmp_path).get(KEY, Text, make).value.root
    damage(folder)
    store = Store(tmp_path)
    again = store.get(KEY, Text, make)
    assert again.reused is False
    assert again.value.path.read_text() == "hello"
    assert f"export {KEY.digest[:12]} was damaged and is made again" in store.notes[0].text
    assert message in store.notes[0].text
    assert Store(tmp_path).get(KEY, Text, never).value.length == 5
    assert list((tmp_path / "tmp").iterdir()) == []


def test_values_that_are_not_finite_are_no_damage(tmp_path: Path) -> None:
    def make_numbers(folder: Path) -> Numbers:
        return Numbers(values=(math.nan, math.inf, 0.1, -0.0, 1e-320))

    Store(tmp_path).get(KEY, Numbers, make_numbers)
    values = Store(tmp_path).get(KEY, Numbers, never).value.values  # type: ignore[arg-type]
    assert math.isnan(values[0])
    assert values[1:] == (math.inf, 0.1, -0.0, 1e-320)


class Numbers(Frozen):
    values: tuple[float, ...]


def test_what_a_kill_left_while_a_damaged_artifact_was_replaced_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "tmp" / f"{KEY.digest}.damaged" / "sub").mkdir(parents=True)
    store.get(KEY, Text, make)
    assert list((tmp_path / "tmp").iterdir()) == []


def _slow(
    root: Path,
    may_end: "multiprocessing.synchronize.Event",
    answers: "multiprocessing.Queue[tuple[bool, list[str]]]",
) -> None:
    """Make the text, which ends when it may: as soon as another process says that it waits."""
    waits: list[str] = []

    def hear(text: str) -> None:
        waits.append(text)
        may_end.set()

    def make_slowly(folder: Path) -> Text:
        may_end.wait(60)
        return make(folder)

    stored = Store(root, hear).get(KEY, Text, make_slowly)
    answers.put((stored.reused, waits))


def test_two_at_once_make_it_once_and_the_second_says_that_it_waits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[tuple[bool, list[str]]] = context.Queue()
    another_waits = context.Event()
    workers = [
        context.Process(target=_slow, args=(tmp_path, another_waits, answers)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    results = sorted((answers.get(timeout=120) for _ in workers), key=lambda result: result[0])
    for worker in workers:
        worker.join()
    assert [reused for reused, _ in results] == [False, True]
    assert results[0][1] == []
    assert "waiting" in results[1][1][0]


def test_a_killed_maker_leaves_nothing_that_counts(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[tuple[bool, list[str]]] = context.Queue()
    worker = context.Process(target=_slow, args=(tmp_path, context.Event(), answers))
    worker.start()
    while not (tmp_path / "tmp" / KEY.digest).exists():
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert Store(tmp_path).find(KEY, Text) is None
    assert Store(tmp_path).get(KEY, Text, make).reused is False


@needs_root
def test_a_library_that_cannot_say_why_it_failed_to_write_met_a_full_disk(tmp_path: Path) -> None:
    def fill(folder: Path) -> Text:
        with (folder / "file").open("wb") as file, contextlib.suppress(OSError):
            file.write(bytes(1 << 20))
        raise RuntimeError("unexpected pos 576 vs 534")  # so torch.save

    with small_disk(tmp_path / "home", "size=256k"):
        with pytest.raises(DiskFull, match="RuntimeError: unexpected pos"):
            Store(tmp_path / "home").get(KEY, Text, fill)
        assert Store(tmp_path / "home").get(KEY, Text, make).reused is False


REFUSALS = [
    PlanError("no candidate is left", "name another"),
    BackendUnavailable("`tensorrt` is not installed", "install it"),
    DamagedError("the engine is damaged", "compile again"),
    KeyboardInterrupt(),
]


@needs_root
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_stays_what_it_is_on_a_full_disk(tmp_path: Path, refusal: BaseException) -> None:
    """A plan's own fault was called a full disk."""

    def fill(folder: Path) -> Text:
        with (folder / "file").open("wb") as file, contextlib.suppress(OSError):
            file.write(bytes(1 << 20))
        raise refusal

    with small_disk(tmp_path / "home", "size=256k"), pytest.raises(type(refusal)) as error:
        Store(tmp_path / "home").get(KEY, Text, fill)
    assert error.value is refusal


FAULTS = [
    InternalError("RuntimeError: unexpected pos"),
    ChildDied("ended by signal 6", "try again"),
]


@needs_root
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_a_full_disk_explains_is_one(tmp_path: Path, fault: Exception) -> None:
    def fill(folder: Path) -> Text:
        with (folder / "file").open("wb") as file, contextlib.suppress(OSError):
            file.write(bytes(1 << 20))
        raise fault

    with small_disk(tmp_path / "home", "size=256k"), pytest.raises(DiskFull):
        Store(tmp_path / "home").get(KEY, Text, fill)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="CRUCIBLE_HOME"):
        Store(tmp_path / "file" / "store")


def test_a_shared_store_is_read_and_never_written(tmp_path: Path) -> None:
    Store(tmp_path / "shared").get(KEY, Text, make)
    before = sorted((tmp_path / "shared").rglob("*"))
    store = Store(tmp_path / "own", shared=tmp_path / "shared")
    assert store.get(KEY, Text, never).reused
    other = Key("export", 1, ("another",))
    assert not store.get(other, Text, make).reused
    assert sorted((tmp_path / "shared").rglob("*")) == before
    assert Store(tmp_path / "own").find(KEY, Text) is None
    assert Store(tmp_path / "own").find(other, Text) is not None


def test_a_damaged_artifact_of_the_shared_store_is_made_again_in_the_own(tmp_path: Path) -> None:
    (Store(tmp_path / "shared").get(KEY, Text, make).value.root / "sub" / "text").write_text(
        "hellO"
    )
    store = Store(tmp_path / "own", shared=tmp_path / "shared")
    assert not store.get(KEY, Text, make).reused
    assert "damaged" in store.notes[0].text
    assert store.get(KEY, Text, never).value.root.is_relative_to(tmp_path / "own")


def test_what_does_not_last_is_there_until_its_store_closes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.get(KEY, Text, make, is_cacheable=lambda text: text.length > 5)
    assert first.value.path.read_text() == "hello"
    assert store.get(KEY, Text, never).value == first.value
    assert Store(tmp_path).find(KEY, Text) is None
    artifact = Store(tmp_path).get(KEY, Text, make, is_cacheable=lambda text: text.length == 5)
    assert artifact.value.root != first.value.root
    assert first.value.path.exists(), "another may still read it"
    assert Store(tmp_path / "home").adopt(tmp_path) == ()
    del store
    gc.collect()
    assert not first.value.root.exists()
    assert Store(tmp_path / "home").get(KEY, Text, never).reused


def test_a_store_adopts_what_another_made(tmp_path: Path) -> None:
    Store(tmp_path / "job").get(KEY, Text, make)
    store = Store(tmp_path / "home")
    assert store.adopt(tmp_path / "job") == ()
    assert store.get(KEY, Text, never).value.path.read_text() == "hello"
    assert Store(tmp_path / "job").find(KEY, Text) is None
    assert store.adopt(tmp_path / "nothing") == ()


def test_what_is_there_already_is_not_replaced(tmp_path: Path) -> None:
    place = Store(tmp_path / "home").get(KEY, Text, make).value.root
    inode = place.stat().st_ino
    Store(tmp_path / "job").get(KEY, Text, make)
    assert Store(tmp_path / "home").adopt(tmp_path / "job") == ()
    assert place.stat().st_ino == inode


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "sub" / "text").write_text("hellO"), "another digest"),
        (lambda folder: (folder / "more").touch(), "'more' was added"),
        (lambda folder: (folder / "sub" / "text").unlink(), "'sub/text' is missing"),
        (
            lambda folder: (folder / "artifact.json").write_text("[]"),
            "'artifact.json' Input should be an object",
        ),
        (lambda folder: (folder / "artifact.json").unlink(), "'artifact.json' is missing"),
        (lambda folder: (folder / "link").symlink_to("/etc/passwd"), "'link' is not a plain file"),
        (
            lambda folder: os.link(folder / "sub" / "text", folder.parent / "twin"),
            "'text' is not a plain file",
        ),
        (
            lambda folder: folder.rename(folder.with_name("0" * 64)),
            "another key than that of its provenance",
        ),
        (
            lambda folder: folder.parent.rename(folder.parent.with_name("build")),
            "another key than that of its provenance",
        ),
        (
            lambda folder: (
                folder.rename(folder.parents[2] / "x"),
                folder.symlink_to(folder.parents[2] / "x"),
            ),
            "a link stands in the place",
        ),
    ],
)
def test_nothing_is_adopted_that_is_not_what_it_says(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(Store(tmp_path / "job").get(KEY, Text, make).value.root)
    store = Store(tmp_path / "home")
    (refused,) = [why for why in store.adopt(tmp_path / "job") if "twin" not in why]
    assert message in refused
    assert list((tmp_path / "home" / "artifacts").glob("*/*")) == []
