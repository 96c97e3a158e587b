"""The gate at every size that is served: which sizes it looks at, and engines that are wrong at one
of them only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.accuracy.gate import ROWS_PER_SIZE, GatePoint, feeds_at, gate_points
from pipeline.backends import BACKENDS
from pipeline.backends.base import Loaded, Session
from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.compiler.compile import compile_plan
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import DimRange, Profile, Tensors, TensorSpec
from pipeline.data.samples import SampleSet, SelectionSet, open_set
from pipeline.errors import ModelError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.plan.schema import AccuracyConfig, GeneratedData
from pipeline.results.accuracy import SizeCheck, ValidationReport
from pipeline.stages.validate import run_reference, validate
from tests.builders.cli import write_task
from tests.builders.validate import LENIENT, SAME, Bench, labelled

X = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
IDS = TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence"))
BATCH = 8  # rows of the run over the whole set

# -- which sizes -------------------------------------------------------------


def profile(batch: tuple[int, int, int], sequence: tuple[int, int, int] | None = None) -> Profile:
    dims = {"batch": batch} | ({"sequence": sequence} if sequence else {})
    return Profile(
        dims={
            name: DimRange(min=low, opt=usual, max=high)
            for name, (low, usual, high) in dims.items()
        }
    )


def rows_of_x(folder: Path, *profiles: Profile, samples: int = 20) -> SampleSet:
    np.savez(folder / "x.npz", x=np.arange(samples * 4, dtype=np.float32).reshape(samples, 4))
    return open_set(SelectionSet, (folder / "x.npz",), (X,), profiles)


def texts(folder: Path, *profiles: Profile, length: int = 16) -> SampleSet:
    ids = np.arange(20 * length, dtype=np.int64).reshape(20, length)
    np.savez(folder / "ids.npz", ids=ids)
    return open_set(SelectionSet, (folder / "ids.npz",), (IDS,), profiles)


def looked_at(samples: SampleSet, *profiles: Profile) -> list[tuple[int, str, dict[str, int]]]:
    points = gate_points(samples, profiles, BATCH)
    return [(point.profile, point.inputs, point.sizes) for point in points]


def test_one_min_opt_and_max_of_every_profile_besides_what_all_samples_ran_at(
    tmp_path: Path,
) -> None:
    profiles = (profile((1, 8, 64)), profile((2, 4, 16)))
    points = looked_at(rows_of_x(tmp_path, *profiles), *profiles)
    assert points == [
        (0, "samples", {"batch": 1}),
        (0, "samples", {"batch": 64}),
        (1, "samples", {"batch": 2}),
        (1, "samples", {"batch": 4}),
        (1, "samples", {"batch": 16}),
    ]


def test_the_batch_of_the_whole_set_is_looked_at_in_a_second_profile_too(tmp_path: Path) -> None:
    profiles = (profile((1, 8, 8)), profile((8, 8, 16)))
    points = looked_at(rows_of_x(tmp_path, *profiles), *profiles)
    assert points == [
        (0, "samples", {"batch": 1}),
        (1, "samples", {"batch": 8}),
        (1, "samples", {"batch": 16}),
    ]


def test_sizes_that_no_sample_has_are_generated(tmp_path: Path) -> None:
    profiles = (profile((1, 8, 8), (8, 16, 32)), profile((1, 1, 2), (64, 64, 128)))
    points = looked_at(texts(tmp_path, *profiles), *profiles)
    assert points == [
        (0, "samples", {"batch": 1}),
        (0, "generated", {"batch": 1, "sequence": 8}),
        (0, "generated", {"batch": 8, "sequence": 32}),
        (1, "generated", {"batch": 1, "sequence": 64}),
        (1, "generated", {"batch": 2, "sequence": 128}),
    ]


def test_batch_one_is_looked_at_where_only_generated_inputs_have_the_sizes(tmp_path: Path) -> None:
    first, second = profile((1, 8, 8), (16, 16, 16)), profile((0, 4, 4), (32, 32, 32))
    points = looked_at(texts(tmp_path, first, second), first, second)
    assert (1, "generated", {"batch": 1, "sequence": 32}) in points


def test_a_size_that_samples_have_is_not_generated_again(tmp_path: Path) -> None:
    """Samples have the sequence of min and opt, in batches of 1 too."""
    only = profile((1, 4, 8), (16, 16, 32))
    generated = [each for each in looked_at(texts(tmp_path, only), only) if each[1] == "generated"]
    assert generated == [(0, "generated", {"batch": 8, "sequence": 32})]


def test_a_fixed_shape_has_no_other_size(tmp_path: Path) -> None:
    only = profile((BATCH, BATCH, BATCH))
    assert looked_at(rows_of_x(tmp_path, only, samples=16), only) == []
    assert looked_at(rows_of_x(tmp_path)) == []


def test_whole_feeds_are_run_as_they_are_in_a_second_profile(tmp_path: Path) -> None:
    wide, other = profile((1, 4, 8)), profile((1, 2, 4))
    feeds = {f"{number}/x": np.full((3, 4), number, np.float32) for number in range(5)}
    np.savez(tmp_path / "feeds.npz", **feeds)  # type: ignore[arg-type]
    samples = open_set(SelectionSet, (tmp_path / "feeds.npz",), (X,), (wide, other))
    points = gate_points(samples, (wide, other), 1)
    second = [point for point in points if point.profile == 1]
    assert [(point.inputs, point.sizes) for point in second] == [
        ("samples", {}),
        ("generated", {"batch": 1}),
        ("generated", {"batch": 2}),
        ("generated", {"batch": 4}),
    ]
    assert [len(batch.feeds["x"]) for batch in feeds_at(second[0], samples)] == [3] * 5


# -- which inputs ------------------------------------------------------------


def at(samples: SampleSet, rows: int) -> list[Any]:
    point = GatePoint(profile=0, sizes={"batch": rows}, inputs="samples", rows=rows, parts=(0,))
    return list(feeds_at(point, samples))


def test_a_batch_larger_than_the_set_repeats_each_sample_nearly_as_often(tmp_path: Path) -> None:
    samples = rows_of_x(tmp_path, samples=20)
    (batch,) = at(samples, 64)
    firsts = batch.feeds["x"][:, 0]
    assert firsts.shape == (64,)
    _, counts = np.unique(firsts, return_counts=True)
    assert sorted(set(counts.tolist())) == [3, 4]
    assert firsts[list(batch.distinct)].tolist() == [4.0 * sample for sample in range(20)]


def test_a_last_batch_that_is_short_is_filled(tmp_path: Path) -> None:
    batches = at(rows_of_x(tmp_path, samples=20), 8)
    assert [len(batch.feeds["x"]) for batch in batches] == [8, 8, 8]
    assert [batch.distinct for batch in batches] == [None, None, (0, 2, 4, 6)]


def test_the_cost_is_bounded_for_long_sets_and_for_many_files(tmp_path: Path) -> None:
    long = rows_of_x(tmp_path, profile((1, 8, 8)), samples=5000)
    assert sum(batch.samples for batch in at(long, 1)) == ROWS_PER_SIZE
    files = []
    for number in range(40):
        files.append(tmp_path / f"{number}.npz")
        np.savez(files[-1], ids=np.full((30, 8 + number), number, np.int64))
    wide = profile((1, 16, 128), (8, 16, 64))
    samples = open_set(SelectionSet, tuple(files), (IDS,), (wide,))
    for point in gate_points(samples, (wide,), BATCH):
        rows = sum(batch.samples for batch in feeds_at(point, samples))
        assert rows <= 1.5 * ROWS_PER_SIZE


def test_generated_inputs_are_samples_cut_and_repeated_so_that_ids_stay_ids(tmp_path: Path) -> None:
    samples = texts(tmp_path, profile((1, 8, 8), (4, 16, 40)))
    longer = GatePoint(profile=0, sizes={"batch": 3, "sequence": 40}, inputs="generated")
    (batch,) = feeds_at(longer, samples)
    ids = batch.feeds["ids"]
    assert ids.shape == (3, 40)
    assert ids[1].tolist() == [16 + place % 16 for place in range(40)]
    assert batch.samples == 3


def test_without_data_generated_inputs_are_random(tmp_path: Path) -> None:
    wide = profile((1, 2, 4), (4, 8, 16))
    random = GeneratedData(generate="random", samples=4, because="a test")
    samples = open_set(SelectionSet, random, (IDS,), (wide,))
    point = GatePoint(profile=0, sizes={"batch": 4, "sequence": 16}, inputs="generated")
    (batch,) = feeds_at(point, samples)
    assert batch.feeds["ids"].shape == (4, 16)
    assert set(np.unique(batch.feeds["ids"])) <= {0, 1}


# -- engines that are wrong at one size --------------------------------------

Fault = Callable[[int, int], bool]
"""Whether answers are wrong in this profile for this many rows."""


@dataclass(frozen=True)
class Noisy:
    """A backend whose engines are ONNX Runtime's, with wrong answers where the fault says so."""

    fault: Fault
    fails: bool = False

    def load(self, engine: Engine, device: str = "") -> Loaded:
        target = engine.target.model_copy(update={"backend": "onnxruntime"})
        return NoisyLoaded(
            onnxruntime_.load(engine.model_copy(update={"target": target}), device), self
        )


@dataclass(frozen=True)
class NoisyLoaded:
    loaded: Loaded
    backend: Noisy

    def session(self, profile: int | None = None) -> Session:
        return NoisySession(self.loaded.session(profile), profile or 0, self.backend)

    def close(self) -> None:
        self.loaded.close()


class NoisySession:
    def __init__(self, session: Session, profile: int, backend: Noisy) -> None:
        self._session, self._profile, self._backend, self._rows = session, profile, backend, 0

    def bind(self, feeds: Tensors) -> None:
        self._rows = len(feeds["x"])
        self._session.bind(feeds)

    def execute(self) -> None:
        if self._backend.fails and self._backend.fault(self._profile, self._rows):
            raise ModelError("no kernel for this size", "choose another")
        self._session.execute()

    def fetch(self) -> Tensors:
        wrong = self._backend.fault(self._profile, self._rows)
        return {name: -array if wrong else array for name, array in self._session.fetch().items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


TWO_PROFILES = (profile((1, 4, 64)), profile((1, 2, 16)))


def verdict(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    backend: Noisy,
    options: AccuracyConfig | None = None,
    samples: int = 20,
) -> ValidationReport:
    monkeypatch.setitem(BACKENDS, "noisy", backend)
    engine = bench.engine(SAME).model_copy(update={"profiles": TWO_PROFILES})
    faulty = engine.model_copy(
        update={"target": engine.target.model_copy(update={"backend": "noisy"})}
    )
    x, labels = labelled(samples)
    data = bench.samples(x, labels)
    out = bench.folder / "expected"
    out.mkdir()
    expected = run_reference(engine, data, {}, BATCH, gate_points(data, TWO_PROFILES, BATCH), out)
    return validate(faulty, expected, data, options or AccuracyConfig(), {}, BATCH)


def at_fault(report: ValidationReport) -> list[str]:
    return [check.in_words(2) for check in report.sizes if check.failures]


def test_an_engine_that_is_right_at_every_size_passes_and_they_are_listed(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = verdict(bench, monkeypatch, Noisy(lambda profile, rows: False))
    assert report.passed
    assert [(check.in_words(2), check.samples) for check in report.sizes] == [
        ("batch = 1, profile 1", 20),
        ("batch = 4, profile 1", 20),
        ("batch = 64, profile 1", 20),
        ("batch = 1, profile 2", 20),
        ("batch = 2, profile 2", 20),
        ("batch = 16, profile 2", 20),
    ]
    assert all(check.drop == 0 and check.cosine == pytest.approx(1) for check in report.sizes)
    assert ValidationReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [
        (lambda profile, rows: rows == 1, ["batch = 1, profile 1", "batch = 1, profile 2"]),
        (lambda profile, rows: rows > BATCH, ["batch = 64, profile 1", "batch = 16, profile 2"]),
        (
            lambda profile, rows: profile == 1,
            ["batch = 1, profile 2", "batch = 2, profile 2", "batch = 16, profile 2"],
        ),
    ],
    ids=["only at batch 1", "only at large batches", "only in the second profile"],
)
def test_an_engine_that_is_wrong_at_one_size_fails_and_the_size_is_named(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    sizes: list[str],
) -> None:
    report = verdict(bench, monkeypatch, Noisy(fault))
    assert report.outputs[0].passed  # the whole set at one size, in the first profile
    assert report.metric is not None
    assert report.metric.passed
    assert not report.passed
    assert at_fault(report) == sizes
    assert report.failures[0].startswith(f"at {sizes[0]}: output 'logits': smallest cosine -1.0000")


def test_the_metric_alone_catches_it_where_the_plan_has_no_thresholds(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = AccuracyConfig(thresholds=LENIENT)
    report = verdict(bench, monkeypatch, Noisy(lambda profile, rows: rows == 64), options)
    assert at_fault(report) == ["batch = 64, profile 1"]
    assert "top1 drops by 1.0000" in report.failures[0]


def test_of_a_part_of_a_long_set_a_certain_drop_fails_too(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = AccuracyConfig(thresholds=LENIENT)
    backend = Noisy(lambda profile, rows: rows == 1)
    report = verdict(bench, monkeypatch, backend, options, samples=ROWS_PER_SIZE + 50)
    assert at_fault(report) == ["batch = 1, profile 1", "batch = 1, profile 2"]
    assert {check.samples for check in report.sizes} == {ROWS_PER_SIZE}


def test_an_engine_that_cannot_run_at_a_size_fails_there(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = verdict(bench, monkeypatch, Noisy(lambda profile, rows: rows == 64, fails=True))
    assert report.failures == (
        "at batch = 64, profile 1: the engine fails there: no kernel for this size",
    )


def test_an_engine_that_fails_on_the_whole_set_is_not_run_at_other_sizes(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = verdict(bench, monkeypatch, Noisy(lambda profile, rows: True))
    assert not report.passed
    assert report.sizes == ()


def test_a_size_at_which_the_reference_fails_is_not_checked_and_the_report_says_so(
    bench: Bench,
) -> None:
    engine = bench.engine(SAME).model_copy(update={"profiles": TWO_PROFILES})
    beyond = GatePoint(profile=0, sizes={"batch": 65}, inputs="samples", rows=65, parts=(0,))
    data = bench.samples(*labelled())
    out = bench.folder / "expected"
    out.mkdir()
    expected = run_reference(engine, data, {}, BATCH, (beyond,), out)
    report = validate(engine, expected, data, AccuracyConfig(), {}, BATCH)
    assert report.passed
    (check,) = report.sizes
    assert isinstance(check, SizeCheck)
    assert check.not_checked.startswith("the reference fails there: ")
    assert any("not checked at batch = 65" in note.text for note in report.notes)


# -- on a GPU ----------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_every_size_of_two_profiles_is_checked_and_both_are_proved(tmp_path: Path) -> None:
    plan = write_task(
        tmp_path,
        candidates=[{"backend": "tensorrt", "precision": "fp16"}],
        profiles=[{"batch": [1, 4, 8]}, {"batch": [16, 16, 64]}],
        benchmark={"duration_s": 0.3, "warmup_s": 0.05, "budget_s": 5},
    )
    report = compile_plan(
        load_plan(plan), Runner(Store(tmp_path / "home")), "crucible compile plan.yaml"
    )
    (candidate,) = report.candidates
    assert candidate.selection is not None, candidate.reason
    checked = [
        (check.profile, check.sizes["batch"], check.failures) for check in candidate.selection.sizes
    ]
    assert checked == [(0, 1, ()), (0, 4, ()), (1, 16, ()), (1, 64, ())]
    assert candidate.layers is not None
    (second,) = candidate.other_layers
    assert (second.profile, second.sizes["batch"]) == (1, 16)
    assert any(layer.seconds for layer in second.layers)
    assert not {layer.name for layer in second.layers} & {
        layer.name for layer in candidate.layers.layers
    }
