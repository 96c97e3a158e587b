"""Replace a folder by another one, so that one of them is there at every moment.

    replace_folder(new, target)     `new` becomes `target`; the old folder is removed last
    current_folder(target)          where the folder is, also after a killed `replace_folder`

Linux exchanges two names in one step (renameat2 with RENAME_EXCHANGE, since 3.15). A file system
without that, such as NFS, needs two renames: the old folder is renamed to `.NAME.old` before the
new one takes its name. A process that is killed between the two leaves the old folder there:
`current_folder` finds it, and the next `replace_folder` puts it back.
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
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # kernel or file system cannot do it

Exchange = Callable[[Path, Path], bool]
"""Exchange two names; False if this host cannot."""


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange two names of one file system in one step.

    Return False if the kernel or the file system cannot do that.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc from 2.28 on
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def replace_folder(new: Path, target: Path, exchange: Exchange = exchange_names) -> None:
    """Rename the folder `new` to `target`. The old folder is removed last.

    Both are in one file system, and no other process replaces `target` meanwhile. Leftovers of an
    earlier call that was killed are put back or removed first. If `target` is a file, it stays, and
    OSError is raised.
    """
    aside = _aside(target)
    if aside.is_dir() and not target.exists():
        aside.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
    if not target.is_dir():
        new.rename(target)
    elif exchange(new, target):
        shutil.rmtree(new)  # the old folder has this name now
    else:
        target.rename(aside)
        try:
            new.rename(target)
        except BaseException:
            if not target.exists():
                aside.rename(target)
            raise
        shutil.rmtree(aside)


def current_folder(target: Path) -> Path:
    """Return where the folder `target` is.

    It has another name only after a `replace_folder` that was killed between its two renames.
    """
    aside = _aside(target)
    return aside if aside.is_dir() and not target.exists() else target


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder. Yields False if its file system has no locks for folders.

    The kernel releases it when this process ends.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # NFS locks only writable files, and a folder cannot be opened for writing
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")
