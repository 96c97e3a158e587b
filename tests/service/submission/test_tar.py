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
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        untar(archive, tmp_path / "out")
    assert (tmp_path / "out" / "engine" / "a.bin").read_bytes() == b"1" * 3_000_000
    assert (tmp_path / "out" / "engine" / "deep" / "b.txt").read_text() == "two"


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "deep/../../out.txt", "link"])
def test_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    about = tarfile.TarInfo(name)
    if name == "link":
        about.type, about.linkname = tarfile.SYMTYPE, "/etc/hostname"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(about, io.BytesIO(b""))
    stream.seek(0)
    with (
        tarfile.open(fileobj=stream) as archive,
        pytest.raises(HostError, match="expected a file inside its folder"),
    ):
        untar(archive, tmp_path / "in")
    assert not (tmp_path / "in").exists()
