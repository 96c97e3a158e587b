"""Uploads: streamed to files under limits; archives that lie, reach outside or explode are refused,
and nothing is left.
"""

import asyncio
import hashlib
import io
import struct
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from service.errors import Forbidden, TooLarge, Unprocessable
from service.submission.uploads import CheckToken, Limits, Part, receive, unpack

LIMITS = Limits(upload_bytes=100_000, plan_bytes=1000, unpacked_bytes=200_000)
TYPE = "multipart/form-data; boundary=XX"


def part(name: str, content: bytes, filename: str = "f") -> bytes:
    head = (
        f'--XX\r\nContent-Disposition: form-data; name="{name}";'
        f' filename="{filename}"\r\nContent-Type: application/octet-stream\r\n\r\n'
    )
    return head.encode() + content + b"\r\n"


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--XX--\r\n"


def take(
    content: bytes,
    folder: Path,
    content_type: str = TYPE,
    step: int = 7,
    end: Exception | None = None,
    check_token: CheckToken | None = None,
) -> dict[str, Part]:
    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(content), step):
            yield content[start : start + step]
        if end:
            raise end

    return asyncio.run(receive(stream(), content_type, folder, LIMITS, check_token))


def field(name: str, text: bytes) -> bytes:
    return (
        f'--XX\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + text + b"\r\n"
    )


def is_t(token: str) -> None:
    if token != "t":
        raise Forbidden(f"the token is '{token}'")


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_the_form_of_a_browser_has_a_token_before_its_files(tmp_path: Path, step: int) -> None:
    token, model, none = field("csrf", b"t"), part("model", b"m"), part("selection", b"", "")
    sent = body(token, none, model)
    parts = take(sent, tmp_path / "u", step=step, check_token=is_t)
    assert list(parts) == ["model"]
    assert [path.name for path in (tmp_path / "u").iterdir()] == ["model"]
    for refused, message in (
        (body(model, token), "the token is ''"),
        (body(field("csrf", b"x"), model), "the token is 'x'"),
    ):
        with pytest.raises(Forbidden, match=message):
            take(refused, tmp_path / "v", step=step, check_token=is_t)
    long = body(token, part("selection", b"x" * 2000, ""), model)
    with pytest.raises(Unprocessable, match="'selection' has more than 1024 bytes"):
        take(long, tmp_path / "v", step=step, check_token=is_t)
    with pytest.raises(Unprocessable, match="a part named 'csrf' is not known"):
        take(sent, tmp_path / "v", step=step)
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_parts_arrive_whole_however_they_are_cut(tmp_path: Path, step: int) -> None:
    model = bytes(range(256)) * 20 + b"--XX and \r\n-- are no boundaries here"
    parts = take(
        body(part("model", model, "../../etc/passwd"), part("plan", b"name: a")),
        tmp_path / "u",
        step=step,
    )
    assert list(parts) == ["model", "plan"]
    assert parts["model"].path == tmp_path / "u" / "model"  # never the client's name
    assert parts["model"].path.read_bytes() == model
    assert (parts["model"].sha256, parts["model"].size) == (
        hashlib.sha256(model).hexdigest(),
        len(model),
    )
    assert parts["plan"].path.read_bytes() == b"name: a"


@pytest.mark.parametrize(
    ("content", "content_type", "message"),
    [
        (b"{}", "application/json", "expected multipart/form-data"),
        (b"", "", "type 'none'"),
        (b"", "multipart/form-data", "multipart/form-data without its boundary"),
        (b"rubbish", TYPE, "no multipart/form-data"),
        (body(part("plan", b"a: 1")), TYPE, "no part `model`; got plan"),
        (body(part("model", b"a"), part("model", b"b")), TYPE, "two parts named 'model'"),
        (
            body(part("model", b"model.onnx", filename="")),
            TYPE,
            "the part 'model' has no file name, expected a file",
        ),
        (
            body(part("model", b"a"), part("selection", b"x.npz", filename="")),
            TYPE,
            "the part 'selection' has no file name",
        ),
        (body(part("weights", b"a")), TYPE, "a part named 'weights' is not known"),
        (body(part("model", b"a"))[:-8], TYPE, "ended before its last boundary"),
        (part("model", b"a" * 50)[:-20], TYPE, "ended before its last boundary"),
        (
            body(part("model", b"a"), part("plan", b"x" * 1001)),
            TYPE,
            "a plan of more than 1000 bytes",
        ),
    ],
)
def test_what_is_no_upload_says_so_and_leaves_nothing(
    tmp_path: Path, content: bytes, content_type: str, message: str
) -> None:
    with pytest.raises(Unprocessable, match=message):
        take(content, tmp_path / "u", content_type)
    assert not (tmp_path / "u").exists()


def test_a_client_that_hangs_up_or_sends_too_much_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        take(part("model", b"a" * 5000), tmp_path / "u", end=ConnectionError())
    assert not (tmp_path / "u").exists()
    with pytest.raises(TooLarge, match="more than 100000 bytes"):
        take(
            body(part("model", b"a" * 60_000), part("calibration", b"a" * 60_000)),
            tmp_path / "u",
            step=4096,
        )
    assert not (tmp_path / "u").exists()


def zipped(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/"), content)


def tarred(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for info, content in members:
            info.size = len(content) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(content))


def file_info(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def as_part(path: Path) -> Part:
    return Part("model", path, "", path.stat().st_size, path.name)


def test_a_model_with_external_data_comes_out_of_either_kind(tmp_path: Path) -> None:
    zipped(tmp_path / "a.zip", m__model_onnx=b"x")  # no .onnx yet: see below
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("m/model.onnx", b"graph")
        archive.writestr("m/weights.bin", b"w" * 1000)
    tarred(
        tmp_path / "c.tar.gz",
        (file_info("model.onnx"), b"graph"),
        (file_info("deep/weights.bin"), b"w" * 1000),
    )
    for archive_file, inner in (("b.zip", "m/model.onnx"), ("c.tar.gz", "model.onnx")):
        folder = tmp_path / f"out-{archive_file}"
        assert unpack(as_part(tmp_path / archive_file), folder, LIMITS) == folder / inner
        assert (folder / inner).read_bytes() == b"graph"
    with pytest.raises(Unprocessable, match=r"0 \.onnx files"):
        unpack(as_part(tmp_path / "a.zip"), tmp_path / "out-a", LIMITS)


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.onnx", b"\0" * 10_000_000)


def outside(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../model.onnx", b"x")


def absolute(path: Path) -> None:
    tarred(path, (file_info("/etc/model.onnx"), b"x"))


def backslash(path: Path) -> None:
    tarred(path, (file_info("..\\model.onnx"), b"x"))


def link(path: Path) -> None:
    tarred(path, (file_info("model.onnx", tarfile.SYMTYPE, "/etc/passwd"), b""))


def hard_link(path: Path) -> None:
    tarred(path, (file_info("model.onnx", tarfile.LNKTYPE, "../../crucible.db"), b""))


def device(path: Path) -> None:
    tarred(path, (file_info("model.onnx", tarfile.CHRTYPE), b""))


def zip_link(path: Path) -> None:
    info = zipfile.ZipInfo("model.onnx")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, "/etc/passwd")


def twice(path: Path) -> None:
    tarred(path, (file_info("model.onnx"), b"x"), (file_info("model.onnx"), b"y"))


def under_a_file(path: Path) -> None:
    tarred(path, (file_info("model.onnx"), b"x"), (file_info("model.onnx/weights"), b"y"))


def two_models(path: Path) -> None:
    tarred(path, (file_info("a.onnx"), b"x"), (file_info("b.onnx"), b"y"))


def cut(path: Path) -> None:
    tarred(path, (file_info("model.onnx"), bytes(range(256)) * 300), mode="w:gz")
    path.write_bytes(path.read_bytes()[:200])


def rubbish(path: Path) -> None:
    path.write_bytes(b"PK rubbish" * 100)


def many(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(10_002):
            archive.writestr(f"{number}", b"")


def many_folders(path: Path) -> None:
    tarred(path, *((file_info(f"{number}", tarfile.DIRTYPE), b"") for number in range(10_002)))


def broken_deflate(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.onnx", b"abc" * 1000)
    data = path.read_bytes()
    start = data.index(b"model.onnx") + len(b"model.onnx")
    path.write_bytes(data[:start] + b"\xff" * 8 + data[start + 8 :])


def other_method(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("model.onnx", b"abc")


def large_directory(path: Path) -> None:
    """Of 100 MB, of zeros that cost nothing on the disk."""
    size = 100_000_000
    with path.open("wb") as file:
        file.seek(size)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, size, 0, 0))


def large_name(path: Path) -> None:
    tarred(path, (file_info("n" * 1_000_000), b"x"), mode="w:gz")


def large_list_of_holes(path: Path) -> None:
    """A sparse file in pax' form 1.0: its map is the beginning of its content, and as long as it
    says.
    """
    info = file_info("model.onnx")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "model.onnx",
        "GNU.sparse.realsize": "1",
    }
    tarred(path, (info, b"1000000\n" + b"0\n" * 500_000))


def path_too_long(path: Path) -> None:
    tarred(path, (file_info("/".join(["d" * 255] * 16)), b"x"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (outside, "lies outside"),
        (absolute, "lies outside"),
        (backslash, "lies outside"),
        (link, "link or a device"),
        (hard_link, "link or a device"),
        (device, "link or a device"),
        (zip_link, "link or a device"),
        (twice, "damaged"),
        (under_a_file, "damaged"),
        (two_models, r"2 \.onnx files"),
        (cut, "damaged"),
        (rubbish, "damaged"),
        (many, "more than 10000 files"),
        (many_folders, "more than 10000 files"),
        (broken_deflate, "damaged"),
        (other_method, "a method other than deflate"),
        (large_directory, "whose directory has 100000000 bytes"),
        (large_name, "a header of more than 65536 bytes"),
        (large_list_of_holes, "a header of more than 65536 bytes"),
        (path_too_long, "damaged"),
    ],
)
def test_a_bad_archive_is_refused(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "archive")
    with pytest.raises(Unprocessable, match=message):
        unpack(as_part(tmp_path / "archive"), tmp_path / "u" / "unpacked", LIMITS)
    assert not (tmp_path / "u" / "model.onnx").exists()


def test_a_bomb_is_stopped_at_the_limit(tmp_path: Path) -> None:
    bomb(tmp_path / "archive")
    assert (tmp_path / "archive").stat().st_size < 20_000
    with pytest.raises(TooLarge, match="unpacks to more than 200000 bytes"):
        unpack(as_part(tmp_path / "archive"), tmp_path / "unpacked", LIMITS)
    assert (tmp_path / "unpacked" / "model.onnx").stat().st_size <= LIMITS.unpacked_bytes
