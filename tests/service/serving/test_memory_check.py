"""A load is weighed against the memory that is free."""

from pathlib import Path

import psutil
import pytest

from service.errors import Conflict
from service.registry.models import LanguageSize, Version
from service.serving.memory_check import (
    Cache,
    Need,
    check_fit,
    fitting_instances,
    fitting_tokens,
    free_bytes,
    need_of,
)
from tests.service.http.test_access_log import Nvml
from tests.service.registry.test_repository import version


def known(memory: int | None, peak: int, size: int) -> Version:
    return version().model_copy(
        update={"memory_bytes": memory, "peak_bytes": peak, "size_bytes": size}
    )


@pytest.mark.parametrize(
    ("memory", "peak", "size", "needed", "how"),
    [
        (5, 9, 2, 5, "as when it was loaded before"),
        (1, 9, 2, 2, "as when it was loaded before"),  # what the device said cannot be all
        (0, 9, 2, 9, "as in its benchmark"),  # the device could not be asked
        (None, 9, 2, 9, "as in its benchmark"),
        (None, 0, 2, 2, "its files alone"),
    ],
)
def test_what_is_known_best_counts(
    memory: int | None, peak: int, size: int, needed: int, how: str
) -> None:
    assert need_of(known(memory, peak, size)) == Need(needed, how)


@pytest.mark.parametrize(
    ("memory", "on_gpu", "needed"),
    [(None, True, 2**30 + 2**20), (None, False, 2**20), (2**25, True, 2**25)],
)
def test_a_language_model_has_a_reserve_until_a_gpu_has_loaded_it(
    memory: int | None, on_gpu: bool, needed: int
) -> None:
    size = LanguageSize(context=64, vocabulary=8, cache_bytes_per_token=2.0**20)
    model = known(memory, 0, 2**20).model_copy(update={"on_gpu": on_gpu, "language": size})
    assert need_of(model).bytes == needed
    assert fitting_tokens(model, needed + 6 * 2**20) == 3
    cache = Cache("max_batch", 3, 2**26)
    with pytest.raises(Conflict) as error:
        check_fit(model, 1, needed + cache.bytes - 1, "gpu:0", cache)
    assert error.value.next_step.endswith("set `max_batch` to 2 at most")


def test_both_numbers_are_told() -> None:
    fits = known(None, 0, 2**20)
    check_fit(fits, 2, 2 * 2**20, "cpu")
    free = (None, 0, 2**20, 2 * 2**20 - 1, 2 * 2**20, 9 * 2**20)
    assert [fitting_instances(fits, 3, each) for each in free] == [3, 1, 1, 1, 2, 3]
    with pytest.raises(
        Conflict,
        match=(
            r"^'m' with 2 instances needs at least 2\.0 MiB \(its files alone\), 1\.5 MiB of gpu:0"
            r" are free"
        ),
    ):
        check_fit(fits, 2, 3 * 2**19, "gpu:0")
    with pytest.raises(Conflict, match=r"^'m' with 1 instance needs at least 1\.0 MiB"):
        check_fit(fits, 1, 2**20 - 1, "cpu")


@pytest.mark.parametrize(
    ("most", "used", "free"), [("1000", "400", 600), ("1000", "2000", 0), ("max", "5", None)]
)
def test_a_container_has_what_its_limit_leaves(
    tmp_path: Path, most: str, used: str, free: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    available = free_bytes("cpu", tmp_path)
    assert available is not None
    assert available == free if free is not None else 0 < available <= psutil.virtual_memory().total


def test_a_machine_without_a_limit(tmp_path: Path) -> None:
    free = free_bytes("cpu", tmp_path)
    assert free is not None
    assert 0 < free <= psutil.virtual_memory().total


def test_a_gpu_has_what_nvml_says_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert free_bytes("gpu:0", tmp_path, Nvml(3)) == 7000 - 2
    assert free_bytes("gpu:1", tmp_path, Nvml(3)) == 7000 - 1


def test_where_nobody_tells_what_is_free_nothing_is_refused(tmp_path: Path) -> None:
    """On GPUs that share the machine's memory NVML does not tell; a load used to end with 500."""
    nvml = Nvml(2, lacks={"memory": {0}, "handle": {1}})
    assert [free_bytes(f"gpu:{n}", tmp_path, nvml) for n in range(3)] == [None] * 3
    assert nvml.opened == 0
    check_fit(known(None, 0, 2**40), 2, None, "gpu:0")


@pytest.mark.parametrize(
    ("cache", "advice"),
    [
        (Cache("max_batch", 64, 2**20), "set `max_batch` to 3 at most"),
        (Cache("cache_tokens", 900, 2**13, least=384), "set `cache_tokens` to 384 at most"),
        (Cache("cache_tokens", 900, 2**13, least=385), "use fewer instances or another device"),
        (Cache("max_batch", 2, 2**22), "use fewer instances or another device"),
    ],
)
def test_a_cache_that_is_too_large_names_what_fits(cache: Cache, advice: str) -> None:
    model = known(None, 0, 2**20)
    check_fit(model, 1, 2**20 + cache.bytes, "gpu:0", cache)
    with pytest.raises(Conflict, match=r"needs at least \d+\.0 MiB .* of cache\)") as error:
        check_fit(model, 1, 2**22, "gpu:0", cache)
    assert error.value.next_step == f"unload another model, or {advice}"
