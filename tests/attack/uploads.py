"""Uploads that carry code, that are no models, or that break out of their archive."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from tests.attack.expect import counted, expect, refused_upload
from tests.attack.targets import Targets, zipped

MB = 10**6
MANY_MEMBERS = 10**5
ROOT = Path(__file__).parents[2]


class Writes:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return exec, (f"open({self._path!r}, 'w').close()",)


def code_in_pickles(targets: Targets) -> str:
    """Send pickles and TorchScript under every name, also as ONNX and safetensors."""
    mark = targets.folder / "mark"
    data = pickle.dumps(Writes(mark))
    script = zipped({"archive/data.pkl": data, "archive/version": b"3"})
    names = ("m.pt", "m.pth", "m.pkl", "m.bin", "m.pt2", "m.onnx", "m.zip", "m.safetensors")
    answers = [
        refused_upload(targets.server, name, targets.files("code", content, name), 422)
        for name in names
        for content in (data, script)
    ]
    weights = targets.files("code", data, "m.safetensors")
    weights["plan"] = ("plan.yaml", b"architecture: resnet18")
    answers.append(refused_upload(targets.server, "weights", weights, 422))
    expect(not mark.exists(), "the code ran")
    return counted(answers)


def no_model(targets: Targets) -> str:
    """Send a README, a picture, a program, and a space, under every name of a model."""
    contents = {
        "README.md": (ROOT / "README.md").read_bytes(),
        "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(500),
        "program": b"\x7fELF" + bytes(500),
        "space": b" ",
    }
    return counted(
        refused_upload(targets.server, f"{name} as {sent}", targets.files("x", data, sent), 422)
        for name, data in contents.items()
        for sent in (name, "model.onnx", "model.zip", "model.tar.gz")
    )


def file_names(targets: Targets) -> str:
    """Send a model with file names that lead elsewhere; the plan names nothing."""
    names = ("../../evil.onnx", "/tmp/evil.onnx", "C:\\evil.onnx", "évil‮.onnx", "e" * 60000)
    before, jobs = targets.server.uploads(), []
    with targets.server.client() as client:
        for name in names:
            files = {"model": (f"{name}.onnx", targets.tiny), "plan": ("/etc/evil", b"{}")}
            answer = client.post("/compile", files=files)
            expect(answer.status_code in (202, 422), f"{name[:40]}: {answer.status_code}")
            if answer.status_code == 202:
                jobs.append(answer.json())
        for job in jobs:
            client.delete(f"/jobs/{job['id']}")
    for job in jobs:
        targets.server.ended(job["id"])
        expect("/" not in job["name"], f"a job is named {job['name']}")
    written = {path.name for path in targets.server.uploads() - before}
    known = {"model.onnx", "plan", "plan.json", *(job["id"] for job in jobs)}
    expect(written <= known, f"written: {written - known}")
    outside = [
        *targets.folder.rglob("*evil*"),
        *Path("/tmp").glob("evil*"),
        *Path("/etc").glob("ev*"),
    ]
    expect(not outside, f"written: {outside}")
    return f"{len(jobs)} of {len(names)} became jobs, with files named by the server"


# -- archives ----------------------------------------------------------------


def archive_bombs(targets: Targets) -> str:
    """Send archives above the limit: zip, overlapping zip, tar.gz, gzip alone, sparse tar."""
    one = zipped({"m.onnx": bytes(200 * MB)})
    huge = gzip.compress(bytes(256 * MB), 1)
    return counted(
        refused_upload(targets.server, name, targets.files("bomb", data, f"m.{kind}"), 413, 422)
        for name, kind, data in (
            ("zip", "zip", one),
            ("overlapping zip", "zip", _overlapping()),
            ("gzip", "tar.gz", huge),
            ("tar.gz", "tar.gz", gzip.compress(_tar(("m.onnx", tarfile.REGTYPE, 200 * MB)), 1)),
            ("sparse tar", "tar", _sparse()),
        )
    )


def archive_links(targets: Targets) -> str:
    """Send archives with links, devices, absolute names and `..`."""
    members = (
        ("m.onnx", tarfile.SYMTYPE),
        ("m.onnx", tarfile.LNKTYPE),
        ("m.onnx", tarfile.CHRTYPE),
        ("m.onnx", tarfile.BLKTYPE),
        ("m.onnx", tarfile.FIFOTYPE),
        ("/etc/evil.onnx", tarfile.REGTYPE),
        ("../../evil.onnx", tarfile.REGTYPE),
        ("a/../../evil.onnx", tarfile.REGTYPE),
    )
    archives = [
        (f"{name} of type {kind!r}", "m.tar", _tar((name, kind, 0))) for name, kind in members
    ]
    archives += [(name, "m.zip", zipped({name: b"x"})) for name in ("../evil.onnx", "/evil.onnx")]
    link = zipfile.ZipInfo("m.onnx")
    link.external_attr = 0o120777 << 16
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    archives.append(("link in a zip", "m.zip", data.getvalue()))
    how = counted(
        refused_upload(targets.server, name, targets.files("links", content, sent), 422)
        for name, sent, content in archives
    )
    outside = [
        *targets.folder.rglob("evil*"),
        *Path("/etc").glob("evil*"),
        *Path("/").glob("evil*"),
    ]
    expect(not outside, f"written: {outside}")
    return how


def archive_members(targets: Targets) -> str:
    """Send archives of 10^5 members, and one whose header claims a gigabyte."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for number in range(MANY_MEMBERS):
            archive.writestr(f"{number}", b"")
    many = _tar(*((f"{number}", tarfile.REGTYPE, 0) for number in range(MANY_MEMBERS)))
    header = tarfile.TarInfo("m.onnx")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 10**9
    claims = header.tobuf(tarfile.GNU_FORMAT) + bytes(2 * MB)
    return counted(
        refused_upload(targets.server, name, targets.files("many", content, sent), 413, 422)
        for name, sent, content in (
            ("zip", "m.zip", data.getvalue()),
            ("tar", "m.tar.gz", gzip.compress(many, 1)),
            ("header", "m.tar", claims),
        )
    )


def _tar(*members: tuple[str, bytes, int]) -> bytes:
    """Return a .tar of members with a name, a type and a size."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, kind, size in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, size, "/etc/passwd"
            archive.addfile(member, io.BytesIO(bytes(size)))
    return data.getvalue()


def _sparse() -> bytes:
    """Return a .tar with one member of 1 TB that is a hole."""
    member = tarfile.TarInfo("m.onnx")
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[386:398] = block[398:410] = b"00000000000\0"  # one piece, of no bytes
    block[483:495] = b"\x80" + (10**12).to_bytes(11, "big")  # the real size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(2 * tarfile.BLOCKSIZE)


def _overlapping() -> bytes:
    """Return a .zip with 1000 names for one member of 10 MB."""
    data = zipped({"m.onnx": bytes(10 * MB)})
    start = data.rindex(b"PK\x01\x02")
    end = data.rindex(b"PK\x05\x06")
    entry, count = data[start:end], 1000
    entries = b"".join(entry.replace(b"m.onnx", b"m.%04d" % number) for number in range(count))
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(entries), start, 0)
    return data[:start] + entries + tail
