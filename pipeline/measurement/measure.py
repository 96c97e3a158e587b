"""The clock of all latencies: samples, warm-up, blocks, bootstrap intervals, peak memory, and the
fingerprint of the host.

Times inside one block resemble each other more than times of different blocks do (the clock
frequency, the neighbours, the state of the caches last for a while). So the unit of the statistics
here is the block: thousands of runs in one block are one observation. Where an engine ran in
several processes, the process is the unit: see pipeline/measurement/comparison.py.
docs/measurement.md explains the method.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from pipeline.core import Frozen
from pipeline.host.gpu import find_gpus

Clock = Callable[[], float]
"""Seconds from an arbitrary start, never going back."""

monotonic: Clock = time.perf_counter

CONFIDENCE = 0.95
RESAMPLES = 2000
DRIFT = 0.05  # medians that differ by more than this share have moved
TAIL_VALUES = (
    10  # a percentile needs at least this many values beyond it: p99 needs 1,000, p95 200, p90 100
)
FEW_BLOCKS = 6  # below, resampled blocks are too few for quantiles (see `_widened`)
EARLIEST_END = 0.1  # of a block's time, where enough runs are in it
GRID = 1000  # points on which a resampled median is looked up: far finer than its error
NANOSECOND_DIGITS = 9  # of a rounded time; the clock knows no more

Floats = NDArray[np.float64]


class Interval(Frozen):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def excludes(self, number: float) -> bool:
        return not self.low <= number <= self.high


class Samples(Frozen):
    """Raw times of one measured region, warm-up apart."""

    values_s: tuple[float, ...]
    blocks: tuple[int, ...] = ()  # how many consecutive values each block holds; empty: one block
    processes: tuple[
        int, ...
    ] = ()  # how many consecutive blocks each process gave; empty: one process
    generations: tuple[
        int, ...
    ] = ()  # in which generation of a race each process ran; empty: 0, 1, 2, ...
    waiting: tuple[
        float, ...
    ] = ()  # share of its time that each process waited for a CPU; empty: not recorded
    warmup_s: tuple[float, ...] = ()
    clock: Literal["host", "device"] = "host"
    stable: bool = True  # False: the median still moved between blocks

    @model_validator(mode="after")
    def _blocks_hold_all(self) -> Samples:
        if self.blocks and (min(self.blocks) < 1 or sum(self.blocks) != len(self.values_s)):
            raise ValueError(
                f"expected blocks of at least one value, {len(self.values_s)} together, got"
                f" {self.blocks}"
            )
        if self.processes and (min(self.processes) < 1 or sum(self.processes) != len(self.blocks)):
            raise ValueError(
                f"expected processes of at least one block, {len(self.blocks)} together, got"
                f" {self.processes}"
            )
        for values in (self.generations, self.waiting):
            if values and len(values) != max(1, len(self.processes)):
                raise ValueError(
                    f"expected one value for each of {len(self.processes)} processes, got {values}"
                )
        return self

    @property
    def median_s(self) -> float:
        return self.percentile_s(50)

    def percentile_s(self, percent: float) -> float:
        """A percentile; ValueError if there are too few raw values to know it."""
        value = self.percentile_or_absent(percent)
        if value is None:
            raise ValueError(
                f"p{percent:g} needs {values_needed(percent)} values, there are"
                f" {len(self.values_s)}: measure for longer"
            )
        return value

    def percentile_or_absent(self, percent: float) -> float | None:
        """A percentile for a table; None (a gap in the table) if there are too few raw values to
        know it.
        """
        return (
            float(np.percentile(self.values_s, percent))
            if len(self.values_s) >= values_needed(percent)
            else None
        )

    def by_block(self) -> tuple[Floats, ...]:
        """The values of each block, in order."""
        values = np.asarray(self.values_s, dtype=np.float64)
        return tuple(np.split(values, np.cumsum(self.blocks)[:-1])) if self.blocks else (values,)

    def process_medians_s(self) -> Floats:
        """The median of each process's values, in order: [processes]."""
        if not self.processes:
            return np.array([self.median_s])
        ends = np.cumsum(self.blocks)[np.cumsum(self.processes)[:-1] - 1]
        return np.array([np.median(part) for part in np.split(np.asarray(self.values_s), ends)])


def values_needed(percent: float) -> int:
    """How many raw values a percentile needs: ten beyond it, or one for the median."""
    beyond = min(percent, 100 - percent)
    return (
        1
        if percent == 50
        else math.ceil(round(TAIL_VALUES * 100 / beyond, 6))
        if beyond > 0
        else sys.maxsize
    )


def samples_from_blocks(
    blocks: Sequence[Sequence[float]],
    warmup_s: Sequence[float],
    clock: Literal["host", "device"] = "host",
    processes: Sequence[int] = (),
    generations: Sequence[int] = (),
    waiting: Sequence[float] = (),
) -> Samples:
    """Join blocks; `stable` is False if the median of the later half lies over 5 % off that of the
    earlier.
    """
    medians = [float(np.median(block)) for block in blocks]
    half = len(medians) // 2
    return Samples(
        values_s=tuple(value for block in blocks for value in block),
        blocks=tuple(len(block) for block in blocks),
        processes=tuple(processes),
        generations=tuple(generations),
        waiting=tuple(waiting),
        warmup_s=tuple(warmup_s),
        clock=clock,
        stable=len(medians) < 2 or not _moved(medians[:half], medians[half:]),
    )


def thinned(values: Sequence[float], most: int) -> tuple[float, ...]:
    """Every k-th value, so that at most `most` are left."""
    return tuple(values[:: max(1, math.ceil(len(values) / most))])


# -- taking times ------------------------------------------------------------


def measure_block(
    run: Callable[[], object],
    clock: Clock = monotonic,
    min_s: float = 0.5,
    min_runs: int = 1,
    enough_runs: int | None = None,
) -> tuple[float, ...]:
    """Time `run` again and again, for at least `min_s` and `min_runs`. `run` must have finished its
    work when it returns.

    With `enough_runs` it ends before `min_s` once there are so many, but not before a tenth of
    `min_s`.
    """
    times: list[float] = []
    begin = end = clock()
    while len(times) < min_runs or end - begin < min_s:
        if (
            enough_runs is not None
            and len(times) >= max(enough_runs, min_runs)
            and end - begin >= min_s * EARLIEST_END
        ):
            break
        start = clock()
        run()
        end = clock()
        times.append(round(end - start, NANOSECOND_DIGITS))
    return tuple(times)


@dataclass(frozen=True, slots=True)
class WarmUpOptions:
    """When warm-up may end: after so many runs *and* so long, once the median has settled; or after
    `max_s`.
    """

    min_runs: int = 10
    min_s: float = 0.2
    max_s: float = 10.0


def warm_up(
    run: Callable[[], object], options: WarmUpOptions, clock: Clock = monotonic
) -> tuple[float, ...]:
    """Run until the medians of the last two quarters agree within 5 %; returns every time, which is
    shown but counts for nothing.
    """
    times = list(measure_block(run, clock, options.min_s, options.min_runs))
    while not _settled(times) and sum(times) < options.max_s:
        times += measure_block(run, clock, options.min_s / 2, max(1, options.min_runs // 2))
    return tuple(times)


def _settled(times: Sequence[float]) -> bool:
    third, fourth = times[len(times) // 2 : len(times) * 3 // 4], times[len(times) * 3 // 4 :]
    return not times or (len(times) >= 4 and not _moved(third, fourth))


def _moved(earlier: Sequence[float], later: Sequence[float]) -> bool:
    return abs(float(np.median(later)) / float(np.median(earlier)) - 1) > DRIFT


def peak_memory_bytes() -> int:
    """The most memory that this process itself has held.

    Linux: VmHWM. There, ru_maxrss also counts the parent, whose memory a child shares until it
    starts its own program.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


# -- intervals ---------------------------------------------------------------


def ratio_of_medians(
    baseline: Samples, candidate: Samples, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Median of the baseline over that of the candidate, with a bootstrap over whole blocks: for
    code that is timed in one process.

    It knows nothing of how processes differ; `comparison.compare` does. Equally many blocks on both
    sides are rounds of one interleaved run: block i of both is drawn together, so that what slowed
    a round cancels. ValueError with one block.
    """
    ours, theirs = baseline.by_block(), candidate.by_block()
    if min(len(ours), len(theirs)) < 2:
        raise ValueError(
            f"expected at least 2 blocks on each side, got {len(ours)} and {len(theirs)}: measure"
            " for longer"
        )
    random = np.random.default_rng(seed)
    drawn = _draws(random, len(ours), resamples)
    also_drawn = drawn if len(theirs) == len(ours) else _draws(random, len(theirs), resamples)
    logs = np.log(_medians(ours, drawn) / _medians(theirs, also_drawn))
    value = math.log(baseline.median_s / candidate.median_s)
    low, high = _widened(value, logs, min(len(ours), len(theirs)))
    return Interval(value=math.exp(value), low=math.exp(low), high=math.exp(high))


def bootstrap_mean(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean of independent values (one per sample of a set, such as paired drops) with its
    bootstrap 95 % interval.
    """
    array = np.asarray(values, dtype=np.float64)  # [n]
    return bootstrap(lambda drawn: float(array[drawn].mean()), array.size, seed, resamples)


def bootstrap(
    figure: Callable[[NDArray[np.int64]], float],
    samples: int,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """A figure of independent samples with its bootstrap 95 % interval: `figure` takes the numbers
    of those it is to be computed of.

    Resamples that have no such figure (NaN: a class that was not drawn) are left out. ValueError
    with fewer than two samples.
    """
    if samples < 2:
        raise ValueError(
            f"expected at least 2 values, got {samples}: one value says nothing about others"
        )
    random = np.random.default_rng(seed)
    value = figure(np.arange(samples))
    found = np.array([figure(random.integers(0, samples, samples)) for _ in range(resamples)])
    found = found[np.isfinite(found)]
    low, high = _widened(value, found, samples) if found.size else (value, value)
    return Interval(value=value, low=low, high=high)


def _draws(random: np.random.Generator, blocks: int, resamples: int) -> Floats:
    """How often each block is drawn: [resamples, blocks]."""
    return random.multinomial(blocks, np.full(blocks, 1 / blocks), size=resamples).astype(
        np.float64
    )


def _medians(blocks: Sequence[Floats], drawn: Floats) -> Floats:
    """The median of every resample, without building it: it lies between the smallest and the
    largest block median.

    On a grid of values there, the share of a resample at or below a point is a weighted sum of the
    blocks' counts.
    """
    ordered = [np.sort(block) for block in blocks]
    medians = [np.median(block) for block in ordered]
    pooled = np.unique(np.concatenate([*ordered, medians]))
    grid = pooled[(pooled >= min(medians)) & (pooled <= max(medians))]
    grid = grid[np.linspace(0, len(grid) - 1, min(GRID, len(grid))).round().astype(int)]
    below = np.stack([np.searchsorted(block, grid, side="right") for block in ordered]).astype(
        np.float64
    )  # [blocks, grid]
    half = drawn @ np.array([len(block) for block in ordered]) / 2  # [resamples]
    found: Floats = grid[(drawn @ below >= half[:, None]).argmax(axis=1)]
    return found


def _widened(value: float, resampled: Floats, n: int) -> tuple[float, float]:
    """The 95 % interval of a bootstrap over n units, widened because n is small.

    The plain percentile interval is too narrow by sqrt((n - 1) / n), and its normal quantile should
    be Student's: Hesterberg, What Teachers Should Know About the Bootstrap (2015). Resamples cannot
    reach beyond the units they are drawn from, so with very few units the same factor multiplies
    their standard deviation instead.
    """
    normal = NormalDist()
    factor = student_quantile(n - 1) * math.sqrt(n / (n - 1))
    if n < FEW_BLOCKS:
        half = factor * float(resampled.std())
        return value - half, value + half
    tail = normal.cdf(-factor)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return min(value, float(low)), max(value, float(high))


def student_quantile(degrees: int) -> float:
    """Student's t at 97.5 %; from a table, then by Cornish and Fisher's expansion (Abramowitz and
    Stegun 26.7.5), right to 0.001.
    """
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
    if degrees <= len(table):
        return table[degrees - 1]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first, second, third = (
        z**3 + z,
        5 * z**5 + 16 * z**3 + 3 * z,
        3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z,
    )
    return z + first / (4 * degrees) + second / (96 * degrees**2) + third / (384 * degrees**3)


# -- the host ----------------------------------------------------------------

SPEED_FLAGS = frozenset(
    """avx avx2 fma f16c avx_vnni avx_vnni_int8 avx_ne_convert avx512f avx512bw avx512vl avx512_vnni
    avx512_bf16 avx512_fp16 avx10 amx_tile amx_int8 amx_bf16 amx_fp16 asimd asimddp asimdhp bf16
    i8mm sve sve2 sme""".split()  # noqa: SIM905
)
"""CPU flags, as Linux spells them, for which the libraries have kernels of their own (x86, then
Arm).
"""

PACKAGES = (
    *(
        "numpy",
        "onnx",
        "onnxruntime",
        "onnxsim",
        "onnxscript",
        "onnx-graphsurgeon",
        "polygraphy",
        "openvino",
        "nncf",
    ),
    *("torch", "torchvision", "tensorrt-rtx", "nvidia-modelopt", "cuda-bindings"),
    *(
        "tensorrt",
        "tensorrt-cu12",
        "tensorrt-cu12-bindings",
        "tensorrt-cu13",
        "tensorrt-cu13-bindings",
    ),  # as it was installed
)


class Environment(Frozen):
    """The host on which figures were taken; two reports compare only where these agree."""

    cpu: str
    cpu_flags: tuple[
        str, ...
    ]  # avx2, avx512_vnni, amx_int8, ...: those that change the speed of inference
    cores: int  # that this process may use
    memory_bytes: int
    os: str
    python: str
    packages: dict[str, str]
    gpus: tuple[str, ...] = ()  # names of those that may be used
    gpu_driver: str | None = None
    governor: str | None = (
        None  # of the CPU's clock; None where the host does not tell (virtual machines)
    )
    load_1min: float = 0.0  # of all processes, just before


def environment() -> Environment:
    """This host as it is now. Imports no heavy library, and starts no process."""
    import psutil

    gpus = find_gpus().devices
    return Environment(
        cpu=cpu_name(),
        cpu_flags=cpu_flags(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        os=platform.platform(),
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := _installed(name))},
        gpus=tuple(gpu.name for gpu in gpus),
        gpu_driver=gpus[0].driver if gpus else None,
        governor=_first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or None,
        load_1min=round(os.getloadavg()[0], 2),
    )


def cpu_name() -> str:
    """The CPU's model name, or its architecture where Linux gives no name (Arm)."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> tuple[str, ...]:
    """The instruction sets of this CPU that change the speed of inference, sorted; empty where
    /proc/cpuinfo is missing.
    """
    info = _cpuinfo()
    return tuple(
        sorted(SPEED_FLAGS & set((info.get("flags") or info.get("Features") or "").split()))
    )


def usable_cores() -> int:
    """How many cores this process may keep busy: its affinity, and the quota of its container."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _first_line(Path("/sys/fs/cgroup/cpu.max")).partition(
        " "
    )  # "150000 100000", or "max 100000"
    return (
        max(1, min(cores, math.ceil(int(quota) / int(period))))
        if quota.isdigit() and period.isdigit()
        else cores
    )


def _cpuinfo() -> dict[str, str]:
    """/proc/cpuinfo of the first CPU."""
    file = Path("/proc/cpuinfo")
    first = (
        file.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        if file.is_file()
        else ""
    )
    return {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in first.splitlines())
    }


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(file: Path) -> str:
    return (
        file.read_text(encoding="ascii", errors="replace").partition("\n")[0].strip()
        if file.is_file()
        else ""
    )
