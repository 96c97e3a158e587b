"""Put a folder where another one is, so that one of both is there at every moment.

    replace_folder(work, place)     `work` becomes `place`; what was there is removed last
    standing(place)                 where the folder lies, also after a killed `replace_folder`

Linux exchanges two names in one step (renameat2 with RENAME_EXCHANGE, since 3.15). A file system
without that, such as NFS, needs two renames: the old folder steps aside to `.NAME.old` before the
new one takes its name. A process that is killed between the two leaves the old folder there:
`standing` finds it, and the next `replace_folder` puts it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

AT_FDCWD = -100  # of fcntl.h: paths are relative to the current folder
RENAME_EXCHANGE = 2  # of linux/fs.h
WITHOUT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # kernel or file system cannot do it

Exchange = Callable[[Path, Path], bool]
"""Exchange two names; False if this host cannot."""


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange what two names of one file system stand for, in one step.

    Return False where the kernel or the file system cannot do that.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc from 2.28 on
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in WITHOUT:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def replace_folder(new: Path, place: Path, exchange: Exchange = exchange_names) -> None:
    """Make the folder `new` the folder `place`; what was there is removed last.

    Both lie in one file system, and nobody else replaces `place` meanwhile. What an earlier call
    left that was killed is put back or removed first. A file at `place` stays: that is an OSError.
    """
    aside = _aside(place)
    if aside.is_dir() and not place.exists():
        aside.rename(place)
    shutil.rmtree(aside, ignore_errors=True)
    if not place.is_dir():
        new.rename(place)
    elif exchange(new, place):
        shutil.rmtree(new)  # the old one has this name now
    else:
        place.rename(aside)
        try:
            new.rename(place)
        except BaseException:
            if not place.exists():
                aside.rename(place)
            raise
        shutil.rmtree(aside)


def standing(place: Path) -> Path:
    """Return where the folder `place` lies.

    Elsewhere only after a `replace_folder` that was killed between its two renames.
    """
    aside = _aside(place)
    return aside if aside.is_dir() and not place.exists() else place


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder; False where its file system has none.

    The kernel releases it when this process ends.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # NFS locks only what can be written, which a folder cannot
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _aside(place: Path) -> Path:
    return place.with_name(f".{place.name}.old")
