"""Check whether OpenVINO can use AMX here, or would kill the process.

Some virtual machines show the AMX flags but hide CPUID leaf 0x1D, which describes the tiles.
OpenVINO's oneDNN reads the flags, takes the missing description for "palette 0", configures no
tiles, and dies of SIGILL at the first one. This was seen with OpenVINO 2026.4 in a virtual machine
with 0x1C as its highest CPUID leaf. AMX itself works there if palette 1 is assumed, as ONNX Runtime
does.
"""

from __future__ import annotations

import ctypes
import mmap
import platform

TILE_LEAF = 0x1D


def tiles_described() -> bool:
    """Return True if CPUID describes at least one tile palette, or if CPUID cannot be read."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        highest_leaf = _cpuid(0)
        return highest_leaf >= TILE_LEAF and _cpuid(TILE_LEAF) >= 1  # EAX: the highest palette
    except OSError:  # a system that forbids executable memory
        return True


def _cpuid(leaf: int) -> int:
    """Return EAX of a CPUID leaf, subleaf 0."""
    # push rbx; mov eax, leaf; xor ecx, ecx; cpuid; pop rbx; ret
    code = b"\x53\xb8" + leaf.to_bytes(4, "little") + b"\x31\xc9\x0f\xa2\x5b\xc3"
    with mmap.mmap(
        -1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    ) as page:
        page.write(code)
        view = ctypes.c_char.from_buffer(page)
        value: int = ctypes.CFUNCTYPE(ctypes.c_uint32)(ctypes.addressof(view))()
        del view  # the page cannot be unmapped while it is exported
        return value
