"""Regions of shared memory: which files may be registered, who may use them, and what happens when
their client changes them.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.errors import (
    Conflict,
    Forbidden,
    NotFound,
    ServiceError,
    TooLarge,
    TooMany,
    Unprocessable,
)
from service.regions import (
    FOLDER,
    MAX_REGIONS,
    MAX_REGIONS_BYTES,
    OwnRegions,
    Place,
    Region,
    Regions,
    SharedInput,
)
from service.settings import GIB, Settings
from tests.service.builders.regions import shared_file

HERE = "127.0.0.1"
X = np.arange(8, dtype=np.float32).reshape(2, 4)
ALL = Place("r", X.nbytes)


def regions(enabled: bool = True, max_infer_bytes: int = 1000) -> Regions:
    settings = Settings(home=Path("/h"), shared_memory=enabled, max_infer_bytes=max_infer_bytes)
    return Regions(settings)


@pytest.fixture
def own() -> OwnRegions:
    return regions().of("key", HERE, ())


@pytest.fixture
def file() -> Iterator[Path]:
    with shared_file(X.tobytes()) as file:
        yield file


def region_of(file: Path, offset: int = 0, byte_size: int = X.nbytes) -> Region:
    return Region("r", f"/{file.name}", offset, byte_size)


def x_at(place: Place) -> dict[str, SharedInput]:
    return {"x": SharedInput(place, X.dtype, (place.byte_size // 16, 4))}


def test_a_tensor_is_read_when_it_is_wanted(own: OwnRegions, file: Path) -> None:
    own.register(region_of(file))
    tensor = own.inputs(x_at(ALL))["x"]
    np.testing.assert_array_equal(tensor.read(), X)
    file.write_bytes((2 * X).tobytes())
    np.testing.assert_array_equal(tensor.read(), 2 * X)
    part = own.inputs(x_at(Place("r", 16, offset=16)))["x"]
    np.testing.assert_array_equal(part.read(), 2 * X[1:])


def test_a_tensor_is_read_into_its_rows_of_a_batch(own: OwnRegions, file: Path) -> None:
    own.register(region_of(file))
    tensor = own.inputs(x_at(ALL))["x"]
    rows, columns = np.zeros((4, 4), np.float32), np.zeros((2, 6), np.float32)
    tensor.read_into(rows[1:3])
    tensor.read_into(columns[:, 1:5])
    np.testing.assert_array_equal(rows, np.pad(X, ((1, 1), (0, 0))))
    np.testing.assert_array_equal(columns, np.pad(X, ((0, 0), (1, 1))))


def test_an_output_is_written_to_its_place_and_nothing_else(own: OwnRegions, file: Path) -> None:
    own.register(region_of(file, offset=4, byte_size=24))
    place = own.outputs({"y": Place("r", 8, offset=4)})["y"]
    place.write(memoryview(b"12345678"))
    assert file.read_bytes() == X.tobytes()[:8] + b"12345678" + X.tobytes()[16:]
    with pytest.raises(Unprocessable, match="9 bytes for a place of 8 bytes"):
        place.write(memoryview(b"123456789"))


def test_names_are_known_until_they_are_unregistered(own: OwnRegions, file: Path) -> None:
    first = region_of(file)
    second = replace(first, name="s", offset=16, byte_size=16)
    own.register(first)
    own.register(second)
    assert (own.status(), own.status("s")) == ((first, second), (second,))
    with pytest.raises(Conflict, match="region 'r' is registered already"):
        own.register(first)
    own.unregister("r")
    for call in (own.status, own.unregister):
        with pytest.raises(NotFound, match="no region 'r' of shared memory"):
            call("r")
    own.unregister()
    assert own.status() == ()
    assert file.exists()


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        ".",
        "..",
        "/..",
        "//name",
        "../dev/shm/name",
        "/etc/passwd",
        "folder/name",
        "na\0me",
        "sem.name",
        "n" * 256,
    ],
)
def test_a_key_is_a_plain_name(own: OwnRegions, key: str) -> None:
    with pytest.raises(Unprocessable, match="is no key of shared memory"):
        own.register(Region("r", key, 0, 8))


def test_only_regular_files_are_opened(own: OwnRegions, file: Path, tmp_path: Path) -> None:
    names = [FOLDER / f"{file.name}-{kind}" for kind in ("link", "pipe", "folder")]
    link, pipe, folder = names
    try:
        link.symlink_to(file)
        os.mkfifo(pipe)
        folder.mkdir()
        for special, message in (
            (link, "symbolic link"),
            (pipe, "no regular file"),
            (folder, "no regular file"),
            (FOLDER / f"{file.name}-none", "No such file"),
        ):
            with pytest.raises(Unprocessable, match=message):
                own.register(region_of(special))
    finally:
        link.unlink(missing_ok=True)
        pipe.unlink(missing_ok=True)
        folder.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_files_of_other_users_are_refused(own: OwnRegions, file: Path) -> None:
    own.register(region_of(file))
    tensor, place = own.inputs(x_at(ALL))["x"], own.outputs({"y": ALL})["y"]
    os.chown(file, 12345, 12345)
    for call in (tensor.read, lambda: place.write(memoryview(b"1"))):
        with pytest.raises(Unprocessable, match="belongs to user 12345, expected user 0"):
            call()


@pytest.mark.parametrize(
    ("offset", "byte_size", "message"),
    [
        (0, 33, "has 32 bytes, expected at least 33"),
        (32, 1, "has 32 bytes, expected at least 33"),
        (2**64 - 1, 1, "expected at least 18446744073709551616"),
        (0, 0, "a region of 0 bytes"),
    ],
)
def test_a_region_lies_within_its_file(
    own: OwnRegions, file: Path, offset: int, byte_size: int, message: str
) -> None:
    with pytest.raises(Unprocessable, match=message):
        own.register(region_of(file, offset, byte_size))
    assert own.status() == ()


@pytest.mark.parametrize("place", [Place("r", 32, 1), Place("r", 16, 32), Place("r", 16, 2**64)])
def test_a_tensor_lies_within_its_region(own: OwnRegions, file: Path, place: Place) -> None:
    own.register(region_of(file))
    with pytest.raises(Unprocessable, match="of region 'r', which has 32 bytes"):
        own.inputs(x_at(place))
    with pytest.raises(Unprocessable, match="of region 'r', which has 32 bytes"):
        own.outputs({"y": place})
    with pytest.raises(NotFound, match="no region 's'"):
        own.inputs(x_at(replace(place, region="s")))


@pytest.mark.parametrize("left", [0, 31])
def test_a_file_that_became_shorter_is_an_error_and_kills_nobody(
    own: OwnRegions, file: Path, left: int
) -> None:
    own.register(region_of(file))
    tensor, place = own.inputs(x_at(ALL))["x"], own.outputs({"y": ALL})["y"]
    os.truncate(file, left)
    for call in (
        tensor.read,
        lambda: place.write(memoryview(X.tobytes())),
        lambda: own.inputs(x_at(ALL)),
    ):
        with pytest.raises(Unprocessable, match=f"has {left} bytes, expected at least 32"):
            call()
    assert file.stat().st_size == left  # writing would have made it longer


def test_a_file_that_was_removed_is_an_error_and_one_in_its_place_is_used(
    own: OwnRegions, file: Path
) -> None:
    own.register(region_of(file))
    file.unlink()
    with pytest.raises(Unprocessable, match="in /dev/shm: No such file"):
        own.inputs(x_at(ALL))
    file.write_bytes((3 * X).tobytes())
    np.testing.assert_array_equal(own.inputs(x_at(ALL))["x"].read(), 3 * X)


def test_the_limit_of_a_request_counts_shared_bytes(file: Path) -> None:
    own = regions(max_infer_bytes=31).of("key", HERE, ())
    own.register(region_of(file))
    with pytest.raises(TooLarge, match="inputs of 32 bytes in shared memory, expected at most 31"):
        own.inputs(x_at(ALL))


def test_a_key_has_limits(own: OwnRegions, file: Path) -> None:
    os.truncate(file, MAX_REGIONS_BYTES + 1)  # it has no content, and takes no memory
    region = region_of(file, byte_size=1)
    with pytest.raises(TooMany, match=f"1 regions with {MAX_REGIONS_BYTES + 1} bytes"):
        own.register(replace(region, byte_size=MAX_REGIONS_BYTES + 1))
    for number in range(MAX_REGIONS):
        own.register(replace(region, name=str(number)))
    with pytest.raises(TooMany, match=f"expected at most {MAX_REGIONS} of one key"):
        own.register(region)
    with pytest.raises(Unprocessable, match="a name of 256 characters"):
        own.register(replace(region, name="n" * 256))


def test_the_documentation_tells_the_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "shared-memory.md").read_text()
    assert f"{MAX_REGIONS} regions, with {MAX_REGIONS_BYTES // GIB} GiB together" in page


def test_a_key_has_only_its_own_regions(file: Path) -> None:
    every = regions()
    mine, theirs = every.of("mine", HERE, ()), every.of("theirs", HERE, ())
    mine.register(region_of(file))
    assert theirs.status() == ()
    for call in (
        lambda: theirs.status("r"),
        lambda: theirs.unregister("r"),
        lambda: theirs.inputs(x_at(ALL)),
        lambda: theirs.outputs({"y": ALL}),
    ):
        with pytest.raises(NotFound):
            call()
    theirs.unregister()
    assert every.of("mine", HERE, ()).status() == (region_of(file),)


@pytest.mark.parametrize(
    ("enabled", "address", "headers", "message"),
    [
        (False, HERE, (), "shared memory is switched off on this server"),
        (True, "10.0.0.9", (), "this request came from '10.0.0.9'"),
        (True, "::ffff:10.0.0.9", (), "this request came from '::ffff:10.0.0.9'"),
        (True, "fe80::1%eth0", (), "came from 'fe80::1%eth0'"),
        (True, "", (), "came from ''"),
        (True, HERE, ("host", "x-forwarded-for"), "through a proxy: it has 'x-forwarded-for'"),
    ],
)
def test_it_is_for_this_host_and_off_by_default(
    enabled: bool, address: str, headers: tuple[str, ...], message: str
) -> None:
    with pytest.raises(Forbidden) as error:
        regions(enabled).of("key", address, headers)
    assert message in error.value.message


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_addresses_of_this_host(address: str) -> None:
    assert regions().of("key", address, ("host", "user-agent")).status() == ()


def test_refusals_say_what_to_do_next(own: OwnRegions, file: Path) -> None:
    with pytest.raises(ServiceError) as error:
        own.register(replace(region_of(file), key="../name"))
    assert error.value.next_step == "send the key of shm_open, not a path"
