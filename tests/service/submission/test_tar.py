"""Folders as tars, and tars as folders."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from pipeline.errors import HostError
from service.submission.tar import size_of_tar, tar, untar


def test_a_folder_comes_out_as_it_went_in(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"1" * 3_000_000)
    (folder / "deep" / "b.txt").write_text("two")
    packed = b"".join(tar(folder))
    assert len(packed) == size_of_tar(folder)
    untar(io.BytesIO(packed), tmp_path / "out")
    assert (tmp_path / "out" / "engine" / "a.bin").read_bytes() == b"1" * 3_000_000
    assert (tmp_path / "out" / "engine" / "deep" / "b.txt").read_text() == "two"


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "deep/../../out.txt", "link"])
def test_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    about = tarfile.TarInfo(name)
    if name == "link":
        about.type, about.linkname = tarfile.SYMTYPE, "/etc/hostname"
    with pytest.raises(HostError, match="expected a file inside its folder"):
        untar(archive_of(about), tmp_path / "in")
    assert not (tmp_path / "in").exists()


def archive_of(*members: tarfile.TarInfo) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            member.size = 1 if member.isreg() else 0
            archive.addfile(member, io.BytesIO(b"x"))
    stream.seek(0)
    return stream


def with_size(size: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo("a")
    member.pax_headers = {"GNU.sparse.size": size}
    return member


@pytest.mark.parametrize(
    "archive",
    [
        archive_of(tarfile.TarInfo(".")),  # a file in the place of the folder
        archive_of(tarfile.TarInfo("a"), tarfile.TarInfo("a/b")),
        archive_of(with_size("x")),
        io.BytesIO(archive_of(tarfile.TarInfo("a")).getvalue()[:512]),  # cut off
        io.BytesIO(b"no archive"),
    ],
)
def test_a_damaged_archive_is_refused(tmp_path: Path, archive: io.BytesIO) -> None:
    with pytest.raises(HostError, match="the archive is damaged"):
        untar(archive, tmp_path)
