"""What the kernel's counts say of a busy host."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.host.contention import CpuClock, cpu_clock


def proc(root: Path, threads: dict[str, str], stat: str) -> Path:
    for number, text in threads.items():
        folder = root / "self" / "task" / number
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(text)
    (root / "stat").write_text(stat)
    return root


def test_counts_are_summed_over_threads_and_cpus(tmp_path: Path) -> None:
    stat = "cpu  10 0 10 60 5 0 5 10 0 0\ncpu0 1 2 3\n"
    counts = cpu_clock(
        proc(tmp_path, {"1": "2000000000 500000000 3", "2": "1000000000 0 1", "3": "rubbish"}, stat)
    )
    assert (counts.ran_s, counts.waited_s) == pytest.approx((3.0, 0.5))
    assert (counts.machine_ticks, counts.stolen_ticks) == (100, 10)


@pytest.mark.parametrize("stat", ["", "intr 1 2 3", "cpu 1 2"])
def test_where_the_kernel_does_not_count_nothing_waited(tmp_path: Path, stat: str) -> None:
    counts = cpu_clock(proc(tmp_path, {}, stat))
    assert counts.waiting_since(CpuClock()) == 0.0
    assert cpu_clock(tmp_path / "missing").waiting_since(CpuClock()) == 0.0


def test_the_share_is_of_the_time_a_thread_could_have_run() -> None:
    before = CpuClock(ran_s=1.0, waited_s=1.0)
    assert CpuClock(ran_s=1.5, waited_s=2.5).waiting_since(before) == pytest.approx(0.75)
    assert CpuClock(ran_s=0.5, waited_s=0.5).waiting_since(before) == 0.0, "a thread has ended"


def test_what_the_hypervisor_took_counts_as_well() -> None:
    before = CpuClock(machine_ticks=1000, stolen_ticks=10)
    assert CpuClock(machine_ticks=1100, stolen_ticks=60).waiting_since(before) == pytest.approx(0.5)


def test_a_few_interruptions_of_many_runs_do_not_move_the_median() -> None:
    after = CpuClock(ran_s=1.0, waited_s=1.0, interruptions=20)
    assert after.held_up_since(CpuClock(), runs=1000) == 0.0
    assert after.held_up_since(CpuClock(), runs=40) == pytest.approx(0.5)


def test_the_counts_of_this_process_grow() -> None:
    first = cpu_clock()
    second = cpu_clock()
    assert second.ran_s >= first.ran_s
    assert second.machine_ticks >= first.machine_ticks > 0
    assert 0.0 <= second.waiting_since(first) <= 1.0
