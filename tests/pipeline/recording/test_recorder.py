"""The recorder counts and keeps the calls of modules, within its limits, and never breaks them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.recording.recorder import MAX_FORMS, Recorder, Reservoir, Slot

Start = Callable[..., Recorder]


class Pair(torch.nn.Module):
    """Takes a pair and an optional mask, changes its input in place, and calls another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)

    def forward(
        self, pair: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        first, second = pair
        first.add_(1)
        total = first + second
        return self.inner(total if mask is None else total * mask)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Attach a recorder to torch until the end of the test."""
    recorders: list[Recorder] = []

    def attached(samples: int = 100, max_bytes: int = 1 << 20, wanted: str = "") -> Recorder:
        recorder = Recorder(tmp_path, samples, max_bytes, wanted)
        recorder.attach(torch)
        recorders.append(recorder)
        return recorder

    yield attached
    for recorder in recorders:
        recorder.detach()


def kept(recorder: Recorder) -> list[dict[str, np.ndarray]]:
    slots = [
        slot
        for seen in recorder.modules.values()
        for form in seen.forms.values()
        for slot in form.reservoir.slots
    ]
    loaded = []
    for slot in slots:
        with np.load(slot.path) as arrays:
            loaded.append({name: arrays[name] for name in arrays.files})
    return loaded


def test_a_call_is_kept_as_it_was_before_forward(start: Start) -> None:
    recorder = start()
    module = Pair().eval()
    with torch.inference_mode():
        answer = module((torch.zeros(3, 4), torch.ones(3, 4)), mask=torch.full((3, 1), 2.0))
    assert len(recorder.modules) == 1  # the nested call does not count
    (seen,) = recorder.modules.values()
    (form,) = seen.forms.values()
    assert form.names == ("pair_0", "pair_1", "mask")
    assert form.shapes == {((3, 4), (3, 4), (3, 1)): 1}
    (call,) = kept(recorder)
    assert (call["in_0"] == 0).all()  # forward added 1 to it
    np.testing.assert_array_equal(call["out_0"], answer.numpy())


def test_positional_none_and_constants_make_forms_of_their_own(start: Start) -> None:
    recorder = start()
    module = torch.nn.LeakyReLU().eval()
    pair = Pair().eval()
    for _ in range(2):
        module(torch.zeros(1, 4))
        module(torch.zeros(1, 4, dtype=torch.float16))
    pair((torch.zeros(1, 4), torch.zeros(1, 4)), None)
    pair((torch.zeros(1, 4), torch.zeros(1, 4)))
    calls = {type(seen.module).__name__: seen for seen in recorder.modules.values()}
    assert [form.shapes.total() for form in calls["LeakyReLU"].forms.values()] == [2, 2]
    assert [form.constants for form in calls["Pair"].forms.values()] == [
        (None, None, None),
        (None, None),
    ]


@pytest.mark.gpu
def test_inputs_on_a_gpu_are_copied_to_the_host_as_fp32(start: Start) -> None:
    recorder = start()
    module = torch.nn.Linear(4, 2).eval().half().cuda()
    module(torch.full((1, 4), 0.5, dtype=torch.float16, device="cuda"))
    (call,) = kept(recorder)
    np.testing.assert_array_equal(call["in_0"], np.full((1, 4), 0.5, np.float32))


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, factor: object) -> torch.Tensor:
        return x * 2


def test_calls_that_cannot_be_stored_are_left_out_with_the_reason(start: Start) -> None:
    recorder = start()
    module = Scaled()
    module(torch.zeros(1), 1.0)
    module.eval()
    module(torch.zeros(1), object())
    module(torch.zeros(1, dtype=torch.complex64), 1.0)
    for factor in range(MAX_FORMS + 1):
        module(torch.zeros(1), factor)
    (seen,) = recorder.modules.values()
    assert seen.calls == MAX_FORMS + 4
    assert dict(seen.left_out) == {
        "in training mode: call its eval() first": 1,
        "an argument of the type object": 1,
        "a sparse, quantised or complex tensor as an argument": 1,
        f"called in more than {MAX_FORMS} ways": 1,
    }


def test_a_wanted_class_is_recorded_inside_another(start: Start) -> None:
    recorder = start(wanted="Linear")
    Pair().eval()((torch.zeros(1, 4), torch.zeros(1, 4)))
    assert [type(seen.module).__name__ for seen in recorder.modules.values()] == ["Linear"]
    assert [name.rpartition(".")[2] for name in recorder.other_classes] == ["Pair"]


def test_a_compiled_module_counts_as_the_module_itself(start: Start) -> None:
    recorder = start()
    module = torch.nn.Linear(4, 2).eval()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        expected = module(torch.ones(2, 4))
        assert torch.equal(compiled(torch.ones(2, 4)), expected)
    (seen,) = recorder.modules.values()
    assert (seen.module is module, seen.calls) == (True, 2)


def test_a_failure_of_the_recorder_is_a_warning_and_the_script_goes_on(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = start()
    module = torch.nn.Linear(4, 2).eval()
    shutil.rmtree(tmp_path)
    with torch.no_grad():
        assert module(torch.ones(1, 4)).shape == module(torch.ones(1, 4)).shape == (1, 2)
    assert isinstance(recorder.failure, OSError)
    assert capfd.readouterr().err.count("the script goes on") == 1


def test_an_exception_of_the_module_passes_and_its_call_does_not_count(start: Start) -> None:
    recorder = start()
    module = torch.nn.Linear(4, 2).eval()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.ones(1, 3))
    module(torch.ones(1, 4))
    (seen,) = recorder.modules.values()
    (form,) = seen.forms.values()
    assert form.shapes == {((1, 4),): 1}


def test_the_scripts_random_numbers_stay_the_same(start: Start) -> None:
    def numbers() -> torch.Tensor:
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 2).eval()
        for _ in range(20):
            module(torch.rand(1, 4))
        return torch.rand(3)

    expected = numbers()
    start(samples=3)
    assert torch.equal(numbers(), expected)


def test_bytes_on_disk_stay_below_the_limit(start: Start, tmp_path: Path) -> None:
    limit = 20_000
    recorder = start(samples=1000, max_bytes=limit)
    module = torch.nn.Linear(100, 2).eval()
    for number in range(200):
        module(torch.full((1, 100), float(number)))
    other = torch.nn.Linear(100, 3).eval()
    other(torch.zeros(60, 100))  # alone above the limit
    calls = kept(recorder)
    assert sum(array.nbytes for call in calls for array in call.values()) <= limit
    assert len(calls) == len(list(tmp_path.glob("call_*.npz"))) > 10
    assert dict(recorder.modules[id(other)].left_out) == {"larger than the limit of --max-mib": 1}
    assert max(call["in_0"].max() for call in calls) > 100  # late calls are there


def test_a_reservoir_keeps_early_and_late_calls_alike(tmp_path: Path) -> None:
    reservoir = Reservoir(100)
    for number in range(2000):
        place = reservoir.draw()
        if place is not None:
            path = tmp_path / str(number)
            path.touch()
            reservoir.put(place, Slot(path, 1))
        if number == 1000:
            reservoir.halve()
    numbers = [int(slot.path.name) for slot in reservoir.slots]
    assert len(numbers) == len(list(tmp_path.iterdir())) == 50
    # a uniform sample of 50 has 25 late ones, with a standard deviation of 3.5
    assert 11 <= sum(number >= 1000 for number in numbers) <= 39
