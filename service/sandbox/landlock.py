"""Landlock: what this process and its children may do with files, TCP, signals and abstract
sockets, as far as the kernel's version of Landlock has it (linux/landlock.h).

    version 2   files; moving a file between folders
    version 3   truncating a file
    version 4   TCP: connect and bind
    version 5   ioctl on devices
    version 6   signals, and UNIX sockets with an abstract name, to processes outside
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

MIN_VERSION = 2  # version 1 forbids all moves between folders, which the store needs

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_VERSION_FLAG, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_FIRST_RIGHTS = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP = 0b11  # bind and connect
_SCOPES = 0b11  # abstract sockets and signals


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("tcp", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Return the kernel's version of Landlock; 0 if there is none."""
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def held_by(abi: int) -> str:
    """Describe what a version of Landlock holds."""
    parts = ["files"]
    if abi >= 4:
        parts.append("TCP")
    if abi >= 5:
        parts.append("ioctl")
    if abi >= 6:
        parts += ["signals", "abstract sockets"]
    return ", ".join(parts)


def restrict(read: Iterable[str], write: Iterable[str], devices: Iterable[str]) -> None:
    """Restrict this process and its later children to reading and executing what lies below
    `read`, to everything except new devices and sockets below `write`, and to using `devices`.

    Paths that do not exist are left out. Needs no_new_privs. OSError if the kernel refuses.
    """
    abi = version()
    files = _FIRST_RIGHTS | _REFER
    if abi >= 3:
        files |= _TRUNCATE
    if abi >= 5:
        files |= _IOCTL_DEV
    attributes = _Ruleset(files, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _call(_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    try:
        new = _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK
        for paths, rights in (
            (read, _READ),
            (write, files & ~new & ~_IOCTL_DEV),
            (devices, _OF_FILES & ~_EXECUTE | _READ_DIR),
        ):
            for path in paths:
                _allow(ruleset, path, rights & files)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(rights, descriptor)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return int(result)
