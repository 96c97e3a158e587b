"""A seccomp filter: which system calls this process and its children may make.

A denied call answers an error, so that libraries can go on. Only calls of another architecture
kill the process: their numbers mean other calls. Arguments in memory cannot be looked at.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# linux/audit.h, linux/seccomp.h, linux/sched.h
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # all CLONE_NEW* of clone and unshare
_SOCKET_TYPE = 0xF
_ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")
_CONNECTED = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)  # a datagram socket may change its peer

# linux/filter.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data


class _Numbers(NamedTuple):
    x86_64: int | None
    aarch64: int


_CLONE, _UNSHARE = _Numbers(56, 220), _Numbers(272, 97)
_SOCKET, _SOCKETPAIR = _Numbers(41, 198), _Numbers(53, 199)
_BIND, _LISTEN = _Numbers(49, 200), _Numbers(50, 201)

_DENIED: Mapping[int, Mapping[str, _Numbers]] = {
    errno.EACCES: {
        "connect": _Numbers(42, 203),
    },
    errno.ENOSYS: {  # callers take an older call instead
        "clone3": _Numbers(435, 435),
        "io_uring_setup": _Numbers(425, 425),
        "io_uring_enter": _Numbers(426, 426),
        "io_uring_register": _Numbers(427, 427),
    },
    errno.EPERM: {
        "ptrace": _Numbers(101, 117),
        "process_vm_readv": _Numbers(310, 270),
        "process_vm_writev": _Numbers(311, 271),
        "pidfd_getfd": _Numbers(438, 438),
        "kcmp": _Numbers(312, 272),
        "bpf": _Numbers(321, 280),
        "userfaultfd": _Numbers(323, 282),
        "perf_event_open": _Numbers(298, 241),
        "add_key": _Numbers(248, 217),
        "request_key": _Numbers(249, 218),
        "keyctl": _Numbers(250, 219),
        "mount": _Numbers(165, 40),
        "umount2": _Numbers(166, 39),
        "pivot_root": _Numbers(155, 41),
        "chroot": _Numbers(161, 51),
        "open_tree": _Numbers(428, 428),
        "move_mount": _Numbers(429, 429),
        "fsopen": _Numbers(430, 430),
        "fsconfig": _Numbers(431, 431),
        "fsmount": _Numbers(432, 432),
        "fspick": _Numbers(433, 433),
        "mount_setattr": _Numbers(442, 442),
        "setns": _Numbers(308, 268),
        "name_to_handle_at": _Numbers(303, 264),
        "open_by_handle_at": _Numbers(304, 265),
        "init_module": _Numbers(175, 105),
        "finit_module": _Numbers(313, 273),
        "delete_module": _Numbers(176, 106),
        "kexec_load": _Numbers(246, 104),
        "kexec_file_load": _Numbers(320, 294),
        "swapon": _Numbers(167, 224),
        "swapoff": _Numbers(168, 225),
        "quotactl": _Numbers(179, 60),
        "acct": _Numbers(163, 89),
        "reboot": _Numbers(169, 142),
        "syslog": _Numbers(103, 116),
        "settimeofday": _Numbers(164, 170),
        "adjtimex": _Numbers(159, 171),
        "clock_settime": _Numbers(227, 112),
        "clock_adjtime": _Numbers(305, 266),
        "sethostname": _Numbers(170, 161),
        "setdomainname": _Numbers(171, 162),
    },
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def is_known(machine: str = "") -> bool:
    """Return True if this module knows the calls of an architecture; by default of this one."""
    return (machine or platform.machine()) in _ARCHITECTURES


def is_available() -> bool:
    """Return True if the kernel has filters, and this module knows the architecture's calls."""
    return is_known() and _ACTIONS.exists()


def program(machine: str, for_gpu: bool = False) -> bytes:
    """Return the filter of an architecture as instructions of struct sock_filter.

    `for_gpu`: CUDA listens on a UNIX socket in each process that opens a GPU, so that such a socket
    may be made and bound; nothing can be connected or sent to another process by it.
    """
    steps = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        steps += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    for error, calls in _DENIED.items():
        for numbers in calls.values():
            steps += _call(getattr(numbers, machine), [_step(_RETURN, _ERRNO | error)])
    for numbers in (_CLONE, _UNSHARE):
        steps += _call(
            getattr(numbers, machine),
            [
                _step(_LOAD, _ARGUMENTS_AT),  # the low half of the first argument
                _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
                _step(_RETURN, _ERRNO | errno.EPERM),
                _step(_RETURN, _ALLOW),
            ],
        )
    for numbers in (_SOCKET, _SOCKETPAIR) if for_gpu else (_SOCKETPAIR,):
        steps += _call(
            getattr(numbers, machine),
            [
                _step(_LOAD, _ARGUMENTS_AT),
                _step(_EQUAL, socket.AF_UNIX, 0, 4),
                _step(_LOAD, _ARGUMENTS_AT + 8),
                _step(_AND, _SOCKET_TYPE),
                _step(_EQUAL, _CONNECTED[0], 2, 0),
                _step(_EQUAL, _CONNECTED[1], 1, 0),
                _step(_RETURN, _ERRNO | errno.EACCES),
                _step(_RETURN, _ALLOW),
            ],
        )
    for numbers in () if for_gpu else (_SOCKET, _BIND, _LISTEN):
        steps += _call(getattr(numbers, machine), [_step(_RETURN, _ERRNO | errno.EACCES)])
    steps.append(_step(_RETURN, _ALLOW))
    return b"".join(steps)


def restrict(for_gpu: bool = False) -> None:
    """Restrict this process and its later children. Needs no_new_privs. OSError if it fails."""
    machine = platform.machine()
    code = ctypes.create_string_buffer(program(machine, for_gpu))
    filter_ = _Program((len(code) - 1) // 8, ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(_SECCOMP[machine])
    # Kernels before 5.16 otherwise slow down all code of a filtered process against Spectre 4.
    if libc.syscall(number, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(filter_)) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _call(number: int, steps: list[bytes]) -> list[bytes]:
    """Take `steps` for the call of this number. They must end with a return."""
    return [_step(_EQUAL, number, 0, len(steps)), *steps]
