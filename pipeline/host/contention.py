"""How long this process waited for a CPU, as the kernel counts it: evidence that a host was busy.

It says nothing about how fast an engine is, so a measurement may be thrown away because of it
without favouring either side of a comparison.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

NANOSECONDS = 1e-9
TOUCHED_SHARE = (
    0.25  # of the runs: half of them would move the median by as much as an interruption takes
)
# of the first line of /proc/stat, after its name: user nice system idle iowait irq softirq steal
STEAL_FIELD = 8


@dataclass(frozen=True, slots=True)
class CpuClock:
    """What the kernel has counted so far. All zero where it does not count (no Linux, or no
    /proc).
    """

    ran_s: float = 0.0  # of all threads of this process, on a CPU
    waited_s: float = 0.0  # of all threads of this process, ready to run, while others had the CPU
    machine_ticks: int = 0  # of all CPUs of this machine, busy and idle, in the kernel's ticks
    stolen_ticks: int = 0  # of those, taken by the hypervisor for other machines
    interruptions: int = (
        0  # how often a thread of this process lost its CPU although it had work to do
    )

    def held_up_since(self, before: CpuClock, runs: int) -> float:
        """Share of the time since `before` in which this process was kept from a CPU, if that moved
        the median.

        0 where fewer than a quarter of the `runs` in that time can have been touched: the median of
        many short runs does not move when a few of them are interrupted, however long.
        """
        touched = (
            self.interruptions - before.interruptions + self.stolen_ticks - before.stolen_ticks
        )
        return self.waiting_since(before) if touched >= TOUCHED_SHARE * runs else 0.0

    def waiting_since(self, before: CpuClock) -> float:
        """Share of the time since `before` in which this process was kept from a CPU, 0 to 1.

        The larger of two shares: threads that waited for other processes, and CPUs that the
        hypervisor gave to other machines. Threads that ended meanwhile are not counted.
        """
        waited = max(0.0, self.waited_s - before.waited_s)
        ran = max(0.0, self.ran_s - before.ran_s)
        stolen = self.stolen_ticks - before.stolen_ticks
        ticks = self.machine_ticks - before.machine_ticks
        return max(
            waited / (waited + ran) if waited > 0 else 0.0,
            stolen / ticks if ticks > 0 else 0.0,
        )


def cpu_clock(proc: Path = Path("/proc")) -> CpuClock:
    """The kernel's counts of now. Takes some microseconds per thread of this process."""
    ran = waited = 0
    for thread in (proc / "self" / "task").glob("*/schedstat"):
        try:
            on_cpu, ready, _ = thread.read_text(encoding="ascii").split()
        except (OSError, ValueError):  # the thread has ended
            continue
        ran, waited = ran + int(on_cpu), waited + int(ready)
    machine, stolen = _machine_ticks(proc / "stat")
    interruptions = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return CpuClock(ran * NANOSECONDS, waited * NANOSECONDS, machine, stolen, interruptions)


def _machine_ticks(stat: Path) -> tuple[int, int]:
    """Ticks of all CPUs together, and those that were stolen."""
    try:
        name, *ticks = stat.read_text(encoding="ascii").partition("\n")[0].split()
    except (OSError, ValueError):
        return 0, 0
    counts = [int(count) for count in ticks[:STEAL_FIELD]]
    if name != "cpu" or len(counts) < STEAL_FIELD:
        return 0, 0
    return sum(counts), counts[-1]
