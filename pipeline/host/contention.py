"""Time for which this process waited for a CPU, from the kernel's counters.

It shows that a host was busy, and does not depend on an engine's speed. So excluding a measurement
because of it favours no side of a comparison.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

NANOSECONDS = 1e-9
TOUCHED_SHARE = 0.25
"""Share of interrupted runs that may move the median.

With half of the runs interrupted, the median moves by the length of an interruption.
"""

STEAL_FIELD = 8
"""Number of the field `steal` in the first line of /proc/stat, after the line's name.

The fields are user, nice, system, idle, iowait, irq, softirq and steal.
"""


@dataclass(frozen=True, slots=True)
class CpuClock:
    """The kernel's counters at one time. All are zero without Linux's /proc."""

    ran_s: float = 0.0  # of all threads of this process, on a CPU
    waited_s: float = 0.0  # of all threads of this process, ready to run, while others had the CPU
    machine_ticks: int = 0  # of all CPUs of this machine, busy and idle, in the kernel's ticks
    stolen_ticks: int = 0  # those of machine_ticks that the hypervisor gave to other machines
    interruptions: int = 0  # number of times that a thread with work to do lost its CPU

    def held_up_since(self, before: CpuClock, runs: int) -> float:
        """Return the share of time since `before` spent waiting for a CPU, if it moved the median.

        The result is 0 if fewer than a quarter of the `runs` in that time can have been
        interrupted: a few interruptions, however long, do not move the median of many short runs.
        """
        interruptions = self.interruptions - before.interruptions
        interruptions += self.stolen_ticks - before.stolen_ticks
        return self.waiting_since(before) if interruptions >= TOUCHED_SHARE * runs else 0.0

    def waiting_since(self, before: CpuClock) -> float:
        """Return the share of time since `before` spent waiting for a CPU, 0 to 1.

        It is the larger of two shares: of threads that waited for other processes, and of CPUs
        that the hypervisor gave to other machines. Threads that have ended are not counted.
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
    """Read the kernel's counters. Takes some microseconds per thread of this process."""
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
    """Return the ticks of all CPUs together, and the stolen ones."""
    try:
        name, *ticks = stat.read_text(encoding="ascii").partition("\n")[0].split()
    except (OSError, ValueError):
        return 0, 0
    counts = [int(count) for count in ticks[:STEAL_FIELD]]
    if name != "cpu" or len(counts) < STEAL_FIELD:
        return 0, 0
    return sum(counts), counts[-1]
