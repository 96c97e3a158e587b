"""The NVIDIA GPUs of this host: their properties, their present state and their peaks.

Everything comes from NVML through pynvml, except SM count and bus width. Nothing here makes a CUDA
context. NVML does not answer every question for every GPU: it has no busy share for a GPU that is
split into MIG slices, and no memory size for a GPU that shares the host's memory. Such a value is
None.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core.frozen import Frozen
from pipeline.core.recipe import Precision

TIMEOUT_S = 20.0  # for nvidia-smi: a driver without its persistence daemon takes seconds to start
# CUdevice_attribute in cuda.h: MULTIPROCESSOR_COUNT and GLOBAL_MEMORY_BUS_WIDTH
SM_COUNT, MEMORY_BUS_BITS = 16, 37
VISIBLE = "CUDA_VISIBLE_DEVICES"
UNKNOWN = "unknown"
NO_PID = (None, 0, 2**32 - 1)  # NVML_VALUE_NOT_AVAILABLE of nvml.h, as an unsigned int


class Gpu(Frozen):
    """One GPU. A value that NVML does not give is None."""

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


MEMORY = "memory"


class MemoryLevel(Frozen):
    """A cache, or the memory behind all caches."""

    name: str  # "L2"
    size_bytes: int | None  # that all threads together can use; None: unlimited
    bytes_per_s: float  # read and written together, by all threads


class Peaks(Frozen):
    """The highest rates of a device's arithmetic and memory.

    A precision is absent if the device has no fast path for it, or if its rate is unknown.
    """

    device: str = ""  # GPU name, or CPU model with its number of threads
    source: str = ""  # "known: ...", or "measured 2026-01-31"
    flops_per_s: dict[Precision, float]  # dense, one multiply-add is two; of integers for int8
    bytes_per_s: float | None
    caches: tuple[MemoryLevel, ...] = ()  # the smallest first; empty: their speed is not known

    def level_of(self, count: float) -> MemoryLevel:
        """Return the smallest level that holds so many bytes. The memory's rate must be known."""
        assert self.bytes_per_s
        memory = MemoryLevel(name=MEMORY, size_bytes=None, bytes_per_s=self.bytes_per_s)
        fitting = (each for each in self.caches if each.size_bytes and count <= each.size_bytes)
        return next(fitting, memory)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one GPU, in bytes."""

    used: int
    free: int
    total: int


# -- NVML --------------------------------------------------------------------


class NvmlDevice:
    """One GPU while NVML is open. A value that NVML does not give is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def _answer(self, function: Callable[..., Any], *arguments: object) -> Any:
        if self._handle is None:
            return None
        return _answer(self._nvml, function, self._handle, *arguments)

    @property
    def is_readable(self) -> bool:
        """False for a GPU that this process may not open, or that has failed."""
        return self._handle is not None

    def name(self) -> str | None:
        return _text(self._answer(self._nvml.nvmlDeviceGetName))

    def uuid(self) -> str | None:
        """Return the UUID as nvidia-smi writes it."""
        return _text(self._answer(self._nvml.nvmlDeviceGetUUID))

    def compute_capability(self) -> str | None:
        version = self._answer(self._nvml.nvmlDeviceGetCudaComputeCapability)
        return None if version is None else f"{version[0]}.{version[1]}"

    def memory(self) -> Memory | None:
        """Return the memory in use by all processes, the free memory and the total."""
        info = self._answer(self._nvml.nvmlDeviceGetMemoryInfo)
        return None if info is None else Memory(info.used, info.free, info.total)

    def busy_percent(self) -> float | None:
        """Return the share of the last second in which a kernel ran."""
        rates = self._answer(self._nvml.nvmlDeviceGetUtilizationRates)
        return None if rates is None else float(rates.gpu)

    def sm_clock_mhz(self) -> int | None:
        return self._number(self._nvml.nvmlDeviceGetClockInfo, self._nvml.NVML_CLOCK_SM)

    def memory_clock_mhz(self) -> int | None:
        return self._number(self._nvml.nvmlDeviceGetClockInfo, self._nvml.NVML_CLOCK_MEM)

    def max_sm_clock_mhz(self) -> int | None:
        return self._number(self._nvml.nvmlDeviceGetMaxClockInfo, self._nvml.NVML_CLOCK_SM)

    def max_memory_clock_mhz(self) -> int | None:
        return self._number(self._nvml.nvmlDeviceGetMaxClockInfo, self._nvml.NVML_CLOCK_MEM)

    def power_w(self) -> float | None:
        milliwatts = self._number(self._nvml.nvmlDeviceGetPowerUsage)
        return None if milliwatts is None else milliwatts / 1000

    def temperature_c(self) -> int | None:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return self._number(self._nvml.nvmlDeviceGetTemperature, sensor)

    def energy_j(self) -> float | None:
        """Return the energy that the GPU has used since its driver was loaded."""
        millijoules = self._number(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1000

    def process_bytes(self, pid: int) -> int | None:
        """Return the memory of a process.

        None if NVML does not list it under this number, as in a container, or not its memory.
        """
        processes = self._answer(self._nvml.nvmlDeviceGetComputeRunningProcesses) or ()
        used = (process.usedGpuMemory for process in processes if process.pid == pid)
        return next(used, None)

    def compute_pids(self) -> tuple[int | None, ...] | None:
        """Return the processes with a compute context; None in it stands for an unknown number."""
        processes = self._answer(self._nvml.nvmlDeviceGetComputeRunningProcesses)
        if processes is None:
            return None
        pids = (process.pid for process in processes)
        return tuple(None if pid in NO_PID else int(pid) for pid in pids)

    def _number(self, function: Callable[..., Any], *arguments: object) -> int | None:
        answer = self._answer(function, *arguments)
        return None if answer is None else int(answer)


class Nvml:
    """NVML while it is open. Without a driver it has no devices, and `reason` says why."""

    def __init__(self, nvml: Any, reason: str = "") -> None:
        self._nvml, self.reason = nvml, reason

    def driver(self) -> str | None:
        return _text(self._answer(self._nvml.nvmlSystemGetDriverVersion))

    def devices(self) -> tuple[NvmlDevice, ...]:
        """Return all GPUs of the host, in the order of nvidia-smi."""
        count = self._answer(self._nvml.nvmlDeviceGetCount) or 0
        by_index = self._nvml.nvmlDeviceGetHandleByIndex
        handles = [self._answer(by_index, number) for number in range(count)]
        return tuple(NvmlDevice(self._nvml, handle) for handle in handles)

    def visible_devices(self) -> tuple[NvmlDevice, ...]:
        """Return the GPUs that CUDA_VISIBLE_DEVICES allows. The first is gpu:0."""
        devices = self.devices()
        uuids = [device.uuid() or "" for device in devices]
        return tuple(devices[n] for n in visible_indices(uuids, os.environ.get(VISIBLE)))

    def device(self, name: str) -> NvmlDevice | None:
        """Return the GPU or MIG slice with this number or UUID, as in CUDA_VISIBLE_DEVICES."""
        if name.isdigit():
            handle = self._answer(self._nvml.nvmlDeviceGetHandleByIndex, int(name))
        else:
            handle = self._answer(self._nvml.nvmlDeviceGetHandleByUUID, name)
        return None if handle is None else NvmlDevice(self._nvml, handle)

    def _answer(self, function: Callable[..., Any], *arguments: object) -> Any:
        return None if self.reason else _answer(self._nvml, function, *arguments)


@contextlib.contextmanager
def open_nvml(nvml: Any = None) -> Iterator[Nvml]:
    """Open NVML. Without a driver it has no devices. `nvml` is pynvml, or a double."""
    import pynvml

    library, reason = nvml or pynvml, ""
    try:
        library.nvmlInit()
    except library.NVMLError_LibraryNotFound:
        reason = _reason_without_library()
    except library.NVMLError as error:
        reason = f"NVML failed: {error}"
    try:
        yield Nvml(library, reason)
    finally:
        if not reason:
            with contextlib.suppress(library.NVMLError):
                library.nvmlShutdown()


def _answer(nvml: Any, function: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of a function of NVML; None if it fails."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(answer: Any) -> str | None:
    """Return an answer as text. Old versions of pynvml return bytes."""
    text: str | None = answer.decode() if isinstance(answer, bytes) else answer
    return text


def _reason_without_library() -> str:
    if _libcuda() is None:
        return "no NVIDIA driver (neither libnvidia-ml.so.1 nor libcuda.so.1 is here)"
    return (
        "libcuda.so.1 is here but libnvidia-ml.so.1 is not, which comes with nvidia-smi (in a"
        " container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    )


# -- the GPUs of this host ---------------------------------------------------


def find_gpus(nvml: Any = None) -> Gpus:
    """Return the GPUs that NVML lists and CUDA_VISIBLE_DEVICES allows.

    `nvml` is pynvml, or a double.
    """
    with open_nvml(nvml) as opened:
        driver = opened.driver() or UNKNOWN
        usable = [device for device in opened.visible_devices() if device.is_readable]
        if usable:
            return Gpus(devices=tuple(_gpu(device, driver) for device in usable))
        readable = [device for device in opened.devices() if device.is_readable]
        names = ", ".join(device.name() or UNKNOWN for device in readable)
    if not names:
        return Gpus(reason=opened.reason or "NVML lists no GPU")
    value = os.environ.get(VISIBLE)
    return Gpus(reason=f"no GPU may be used: {VISIBLE}='{value}' hides {names}")


def visible(device: str, parent: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES of a child: empty for the CPU; for `gpu:1` the second GPU that
    the parent sees. `parent`: its value, None if it is not set.
    """
    if not device.startswith("gpu:"):
        return ""
    number = int(device.removeprefix("gpu:"))
    return str(number) if parent is None else parent.split(",")[number].strip()


def memory_in_use(uuid: str, nvml: Any = None) -> int | None:
    """Return the bytes of a GPU's memory that all processes use; None if NVML does not tell.

    `nvml` is pynvml, or a double.
    """
    with open_nvml(nvml) as opened:
        device = opened.device(uuid)
        memory = device.memory() if device else None
    return memory.used if memory else None


def _gpu(device: NvmlDevice, driver: str) -> Gpu:
    memory = device.memory()
    return Gpu(
        name=device.name() or UNKNOWN,
        uuid=device.uuid() or "",
        compute_capability=device.compute_capability() or UNKNOWN,
        driver=driver,
        memory_bytes=memory.total if memory else 0,
        sm_clock_mhz=device.max_sm_clock_mhz(),
        memory_clock_mhz=device.max_memory_clock_mhz(),
    )


def visible_indices(uuids: Sequence[str], variable: str | None) -> tuple[int, ...]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES names.

    `variable` is its value, None if it is not set. A UUID may be shortened. As for CUDA, the list
    ends at the first entry that names no GPU. Numbers are those of nvidia-smi. CUDA itself numbers
    the fastest GPU first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID; among equal GPUs both orders agree.
    """
    # The UUID of a MIG slice does not tell which GPU it is on.
    if variable is None or variable.startswith("MIG-"):
        return tuple(range(len(uuids)))
    indices: list[int] = []
    for entry in map(str.strip, variable.split(",")):
        if entry.startswith("GPU-"):
            matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        else:
            matches = [index for index in range(len(uuids)) if entry == str(index)]
        if len(matches) != 1:
            break
        indices += matches
    return tuple(indices)


# -- SM count and bus width --------------------------------------------------


def with_hardware(gpus: Gpus, cuda: Any = None) -> Gpus:
    """Add SM count and bus width, which only libcuda gives.

    `cuda` is the loaded library, or a double. cuInit makes no context and takes no GPU memory. A
    value that the driver does not give stays None.
    """
    library = cuda or (_libcuda() if gpus.devices else None)
    if library is None or library.cuInit(0) != 0:
        return gpus
    count = _int_of(library.cuDeviceGetCount) or 0
    known = dict(_hardware(library, ordinal) for ordinal in range(count))
    devices = tuple(gpu.model_copy(update=known.get(gpu.uuid, {})) for gpu in gpus.devices)
    return gpus.model_copy(update={"devices": devices})


def _hardware(cuda: Any, ordinal: int) -> tuple[str, dict[str, int | None]]:
    """Return a GPU's UUID as nvidia-smi writes it, its SM count and its bus width.

    CUDA numbers GPUs in an order of its own, so they are matched by UUID.
    """
    device = _int_of(cuda.cuDeviceGet, ordinal)
    raw = (ctypes.c_ubyte * 16)()
    digits = bytes(raw).hex() if cuda.cuDeviceGetUuid(ctypes.byref(raw), device) == 0 else ""
    uuid = "GPU-" + "-".join(
        digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    )
    sizes = {
        name: _int_of(cuda.cuDeviceGetAttribute, code, device)
        for name, code in (("sm_count", SM_COUNT), ("memory_bus_bits", MEMORY_BUS_BITS))
    }
    return uuid, sizes


def _int_of(function: Any, *arguments: object) -> int | None:
    """Return the int that a function of libcuda writes to its first argument; None if it fails."""
    answer = ctypes.c_int()
    return answer.value if function(ctypes.byref(answer), *arguments) == 0 else None


def _libcuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


# -- peaks -------------------------------------------------------------------

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
"""Dense rates by compute capability; fp16 and fp8 with fp16 accumulation.

Other generations are left out, because a guess would be worse than no number.
"""

GEFORCE_HALVED = {"8.6", "8.9", "12.0"}
"""Compute capabilities with GeForce cards that run at half the rate if they accumulate in fp32.

bf16 and tf32 always accumulate in fp32. The same whitepapers state this.
"""

KNOWN = "known: NVIDIA's rates per SM and clock, at the highest clocks"


def peaks(gpu: Gpu) -> Peaks:
    """Return a GPU's peaks at its highest clocks.

    It keeps them only as long as power and temperature allow. NVIDIA's data sheets often state
    lower ones.
    """
    per_clock = FLOPS_PER_SM_AND_CLOCK.get(gpu.compute_capability, {})
    halved = (
        {Precision.TF32, Precision.BF16}
        if "GeForce" in gpu.name and gpu.compute_capability in GEFORCE_HALVED
        else set()
    )
    cycles_per_s = (gpu.sm_count or 0) * (gpu.sm_clock_mhz or 0) * 1e6  # of all SMs together
    flops_per_s: dict[Precision, float] = {}
    if cycles_per_s:
        for precision, flops in per_clock.items():
            flops_per_s[precision] = flops * cycles_per_s / (2 if precision in halved else 1)
    bytes_per_s = None
    if gpu.memory_clock_mhz and gpu.memory_bus_bits:
        # double data rate
        bytes_per_s = 2 * gpu.memory_clock_mhz * 1e6 * gpu.memory_bus_bits / 8
    return Peaks(device=gpu.name, source=KNOWN, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
