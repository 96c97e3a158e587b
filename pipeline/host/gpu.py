"""Which NVIDIA GPUs this host has, and what each could reach: asked of nvidia-smi, and of the
driver without making a CUDA context.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from pipeline.core import Frozen, Precision

QUERY = "name,uuid,compute_cap,driver_version,memory.total,clocks.max.sm,clocks.max.memory"
TIMEOUT_S = 20.0  # a cold driver without its persistence daemon takes seconds to answer
SM_COUNT, MEMORY_BUS_BITS = (
    16,
    37,
)  # CUdevice_attribute in cuda.h: MULTIPROCESSOR_COUNT, GLOBAL_MEMORY_BUS_WIDTH
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpu(Frozen):
    """One GPU. None: the tools do not say ("[N/A]" where the GPU shares the host's memory)."""

    name: str
    compute_capability: str  # "8.9"
    driver: str
    memory_bytes: int
    uuid: str = ""  # "GPU-6d5a129b-187e-..."
    sm_clock_mhz: int | None = None  # the highest it may reach
    memory_clock_mhz: int | None = None
    sm_count: int | None = None  # this and the bus width: see `with_hardware`
    memory_bus_bits: int | None = None


class Gpus(Frozen):
    """All GPUs that this process may use."""

    devices: tuple[Gpu, ...] = ()
    reason: str = ""  # why there are none


class Peaks(Frozen):
    """What a device's arithmetic and memory could reach; a precision it has no fast path for, or
    nobody knows of, is absent.
    """

    device: str = ""  # GPU name, or CPU model with its number of threads
    source: str = ""  # "known: ...", or "measured 2026-01-31"
    flops_per_s: dict[Precision, float]  # dense, one multiply-add is two; of integers for int8
    bytes_per_s: float | None


def find_gpus(command: str = "nvidia-smi") -> Gpus:
    """The GPUs that `command` (nvidia-smi, or another program that answers like it) lists and
    CUDA_VISIBLE_DEVICES leaves.
    """
    program = shutil.which(command)
    if program is None:
        return Gpus(reason=_reason_without_tool())
    try:
        done = subprocess.run(
            [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(reason=f"nvidia-smi gave no answer: {error}")
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())
        return Gpus(reason=f"nvidia-smi failed with exit code {done.returncode}: {said}")
    devices = tuple(
        _gpu_from_line(line)
        for line in done.stdout.splitlines()
        if line.count(",") == QUERY.count(",")
    )
    if not devices:
        return Gpus(reason="nvidia-smi lists no GPU")
    wanted = os.environ.get(VISIBLE)
    places = visible_places([gpu.uuid for gpu in devices], wanted)
    visible = tuple(devices[place] for place in places)
    hidden = (
        f"no GPU may be used: {VISIBLE}='{wanted}' hides {', '.join(gpu.name for gpu in devices)}"
    )
    return Gpus(devices=visible, reason="" if visible else hidden)


def _gpu_from_line(line: str) -> Gpu:
    name, uuid, capability, driver, mebibytes, sm, memory = (
        part.strip() for part in line.split(",")
    )
    return Gpu(
        name=name,
        uuid=uuid,
        compute_capability=capability,
        driver=driver,
        memory_bytes=(_number(mebibytes) or 0) * 2**20,
        sm_clock_mhz=_number(sm),
        memory_clock_mhz=_number(memory),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def visible_places(uuids: Sequence[str], wanted: str | None) -> tuple[int, ...]:
    """Return the places of the GPUs that CUDA_VISIBLE_DEVICES names.

    As for CUDA, the list ends at the first entry that names none. Numbers count as nvidia-smi does.
    CUDA itself counts the fastest first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID: alike where all are
    of one kind. `wanted` is the variable, None if it is not set; a UUID may be cut short.
    """
    if wanted is None or wanted.startswith("MIG-"):  # a slice; of which GPU the list does not say
        return tuple(range(len(uuids)))
    chosen: list[int] = []
    for entry in map(str.strip, wanted.split(",")):
        if entry.startswith("GPU-"):
            named = [place for place, uuid in enumerate(uuids) if uuid.startswith(entry)]
        else:
            named = [place for place in range(len(uuids)) if entry == str(place)]
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)


def _reason_without_tool() -> str:
    if _libcuda() is None:
        return "no NVIDIA driver (neither nvidia-smi nor libcuda.so.1 is here)"
    return (
        "libcuda.so.1 is here but nvidia-smi is not (in a container:"
        " NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    )


# -- what it is made of
# ------------------------------------------------------------------------------


def with_hardware(gpus: Gpus, cuda: Any = None) -> Gpus:
    """The same GPUs with SM count and bus width, which only libcuda tells (`cuda`: the loaded
    library, or a double).

    cuInit makes no context and takes no GPU memory. What the driver does not answer stays None.
    """
    library = cuda or (_libcuda() if gpus.devices else None)
    if library is None or library.cuInit(0) != 0:
        return gpus
    known = dict(
        _hardware(library, ordinal) for ordinal in range(_asked(library.cuDeviceGetCount) or 0)
    )
    return gpus.model_copy(
        update={
            "devices": tuple(gpu.model_copy(update=known.get(gpu.uuid, {})) for gpu in gpus.devices)
        }
    )


def _hardware(cuda: Any, ordinal: int) -> tuple[str, dict[str, int | None]]:
    """The UUID of a GPU as nvidia-smi writes it, and what it is made of. CUDA's order is its own,
    so the UUID is what joins them.
    """
    device = _asked(cuda.cuDeviceGet, ordinal)
    raw = (ctypes.c_ubyte * 16)()
    digits = bytes(raw).hex() if cuda.cuDeviceGetUuid(ctypes.byref(raw), device) == 0 else ""
    uuid = "GPU-" + "-".join(
        digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    )
    sizes = {
        name: _asked(cuda.cuDeviceGetAttribute, code, device)
        for name, code in (("sm_count", SM_COUNT), ("memory_bus_bits", MEMORY_BUS_BITS))
    }
    return uuid, sizes


def _asked(function: Any, *arguments: object) -> int | None:
    """The int that a function of libcuda writes to its first argument; None if it fails."""
    answer = ctypes.c_int()
    return answer.value if function(ctypes.byref(answer), *arguments) == 0 else None


def _libcuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


# -- what it could reach
# ------------------------------------------------------------------------------

_RTX = {
    Precision.FP32: 256,
    Precision.TF32: 512,
    Precision.FP16: 1024,
    Precision.BF16: 1024,
    Precision.INT8: 2048,
}

FLOPS_PER_SM_AND_CLOCK: dict[str, dict[Precision, int]] = {
    # Tesla V100 whitepaper (WP-08608): V100 SXM2 has 80 SMs at 1530 MHz, 15.7 TFLOP/s fp32, 125 on
    # tensor cores.
    "7.0": {Precision.FP32: 128, Precision.FP16: 1024},
    # Turing whitepaper (WP-09183): RTX 2080 Ti FE 68 SMs at 1635 MHz, 113.8 TFLOP/s fp16, 227.7
    # TOP/s int8. T4: 40 SMs, 65 and 130.
    "7.5": {Precision.FP32: 128, Precision.FP16: 1024, Precision.INT8: 2048},
    # A100 whitepaper: 108 SMs at 1410 MHz, 19.5 TFLOP/s fp32, 156 tf32, 312 fp16 and bf16, 624
    # TOP/s int8.
    "8.0": {
        Precision.FP32: 128,
        Precision.TF32: 1024,
        Precision.FP16: 2048,
        Precision.BF16: 2048,
        Precision.INT8: 4096,
    },
    # GA102 whitepaper: RTX 3090 82 SMs at 1695 MHz, 35.6 TFLOP/s fp32, 142 fp16, 71 bf16, 35.6
    # tf32, 285 TOP/s int8. A40: 84 SMs, tf32 74.8.
    "8.6": _RTX,
    # Ada whitepaper: RTX 4090 128 SMs at 2520 MHz, 82.6 TFLOP/s fp32, 330 fp16, 165 bf16, 82.6
    # tf32, 661 int8 and fp8. L4: 58 SMs, fp16 121.
    "8.9": {**_RTX, Precision.FP8: 2048},
    # H100 whitepaper: SXM5 132 SMs, 66.9 TFLOP/s fp32 at 1980 MHz; 495 tf32, 989 fp16, 1979 fp8 and
    # int8 are stated at 1830 MHz.
    "9.0": {
        Precision.FP32: 256,
        Precision.TF32: 2048,
        Precision.FP16: 4096,
        Precision.BF16: 4096,
        Precision.INT8: 8192,
        Precision.FP8: 8192,
    },
    # HGX B200 data sheet, per GPU (148 SMs): 75 TFLOP/s fp32, dense 1,125 tf32, 2,250 fp16, 4,500
    # fp8 and int8, at about 1860 MHz.
    "10.0": {
        Precision.FP32: 256,
        Precision.TF32: 4096,
        Precision.FP16: 8192,
        Precision.BF16: 8192,
        Precision.INT8: 16384,
        Precision.FP8: 16384,
    },
    # RTX Blackwell whitepaper: RTX 5090 170 SMs at 2407 MHz, 104.8 TFLOP/s fp32, 419 fp16, 209.5
    # bf16, 104.8 tf32, 838 int8 and fp8.
    "12.0": {**_RTX, Precision.FP8: 2048},
}
"""Dense, by compute capability; fp16 and fp8 with fp16 accumulation. Other generations are left
out: no number is better than a guess.
"""

GEFORCE_HALVED = {"8.6", "8.9", "12.0"}
"""There GeForce cards multiply at half the rate where they accumulate in fp32 (the same
whitepapers), which bf16 and tf32 always do.
"""


KNOWN = "known: NVIDIA's rates per SM and clock, at the highest clocks"


def peaks(gpu: Gpu) -> Peaks:
    """At the GPU's highest clocks, which it keeps only as long as power and temperature allow;
    NVIDIA's data sheets often state lower ones.
    """
    per_clock = FLOPS_PER_SM_AND_CLOCK.get(gpu.compute_capability, {})
    halved = (
        {Precision.TF32, Precision.BF16}
        if "GeForce" in gpu.name and gpu.compute_capability in GEFORCE_HALVED
        else set()
    )
    cycles_per_s = (gpu.sm_count or 0) * (gpu.sm_clock_mhz or 0) * 1e6  # of all SMs together
    flops = {
        precision: each * cycles_per_s / (2 if precision in halved else 1)
        for precision, each in per_clock.items()
        if cycles_per_s
    }
    memory = (
        2 * gpu.memory_clock_mhz * 1e6 * gpu.memory_bus_bits / 8
        if gpu.memory_clock_mhz and gpu.memory_bus_bits
        else None
    )  # double data rate
    return Peaks(device=gpu.name, source=KNOWN, flops_per_s=flops, bytes_per_s=memory)
