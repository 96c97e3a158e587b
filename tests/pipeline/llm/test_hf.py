"""How torch is told to compute."""

from collections.abc import Iterator

import pytest
import torch

from pipeline.llm import hf


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("of_torch", "usable", "asked", "used"),
    [
        (4, 2, 0, 2),  # a container with a quota
        (1, 2, 0, 1),  # OMP_NUM_THREADS
        (1, 2, 3, 3),  # the plan
    ],
)
def test_torch_computes_on_the_cores_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, of_torch: int, usable: int, asked: int, used: int
) -> None:
    monkeypatch.setattr(hf, "usable_cores", lambda: usable)
    torch.set_num_threads(of_torch)
    hf.use_cores(asked)
    assert torch.get_num_threads() == used
