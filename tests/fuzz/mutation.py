"""Change valid messages a little, so that most of a parser still sees what it expects.

Everything is decided by the given Random, so that a seed gives the same cases again.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

Make = Callable[[Random], bytes]
"""Makes one case."""

MAX_BYTES = 64 * 1024  # of a case; copies of copies would grow without end
SIZES = (0, 1, 2, 7, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, -1)
NUMBERS = (b"0", b"-1", b"1", b"255", b"4294967296", b"9223372036854775808", b"1e999", b"NaN")
DIGITS = re.compile(rb"\d+")
WORDS = re.compile(rb"[A-Za-z_][\w./-]*|[{}\[\]():,'\"<>=;&*!|%-]")
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30),
    *(1e308, float("inf"), float("nan"), "", "x", "0", "-1", "../x", "/etc/passwd", "\0", "\n"),
    *("é😀", "\ud800", "a" * 300, [], {}, [[]], {"": 0}, [0] * 70, ["x", "x"], {"x": {"x": 1}}),
)
"""Values that JSON can hold and that few readers expect."""


def bytes_from(*seeds: bytes) -> Make:
    """Mutate the bytes of one of the seeds."""
    return lambda random: mutated(random, seeds)


def mutated(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return a seed after none to eight changes of its bytes."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 4, 8))):
        random.choice(CHANGES)(random, data, seeds)
    return bytes(data[:MAX_BYTES])


def _place(random: Random, data: bytearray) -> int:
    """An offset; every second one is near the start, where headers are."""
    return random.randrange(min(len(data), random.choice((64, MAX_BYTES))) + 1)


def _flip(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[_place(random, data) % len(data)] ^= 1 << random.randrange(8)


def _overwrite(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    """Write a number of up to eight bytes, such as a length, over what is there."""
    width = random.choice((1, 2, 4, 8))
    value = random.choice(SIZES) % 2 ** (8 * width)
    at = _place(random, data)
    data[at : at + width] = value.to_bytes(width, random.choice(("little", "big")))


def _insert(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(random, data)
    data[at:at] = random.choice((random.randbytes(random.randrange(1, 9)), b"\0" * 40))


def _delete(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(random, data)
    del data[at : at + random.choice((1, 2, 8, 100))]


def _cut(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    del data[random.randrange(len(data) + 1) :]


def _repeat(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(random, data)
    data[at:at] = data[at : at + random.randrange(1, 65)] * random.choice((1, 2, 20))


def _splice(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = random.choice(seeds)
    begin = random.randrange(len(other) + 1)
    at = _place(random, data)
    data[at : at + random.randrange(65)] = other[begin : begin + random.randrange(65)]


def _renumber(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if found := list(DIGITS.finditer(data)):
        chosen = random.choice(found)
        data[chosen.start() : chosen.end()] = random.choice(NUMBERS)


def _swap_word(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    """Put a word or a sign of a seed in the place of another one."""
    words = WORDS.findall(random.choice(seeds)[:4096])
    if words and (found := list(WORDS.finditer(data[:4096]))):
        chosen = random.choice(found)
        data[chosen.start() : chosen.end()] = random.choice(words)


CHANGES = (*(_flip, _overwrite, _insert, _delete, _cut, _repeat, _splice, _renumber, _swap_word),)


# -- messages with a structure of their own --------------------------------------


def json_from(*documents: object) -> Make:
    """Mutate the values of one of the documents; of every fourth the bytes, too."""
    texts = [json.dumps(document).encode() for document in documents]

    def make(random: Random) -> bytes:
        if random.random() < 0.25:
            return mutated(random, texts)
        return json.dumps(changed(random, random.choice(documents))).encode()

    return make


def changed(random: Random, document: object) -> object:
    """Return a copy of a JSON document with one to three values replaced, removed or repeated."""
    copy = _copy(document)
    for _ in range(random.choice((1, 1, 2, 3))):
        places = list(_places(copy))
        if not places:
            return random.choice(ODD)
        holder, key = random.choice(places)
        match random.randrange(6):
            case 0:
                del holder[key]
            case 1:
                holder[key] = [holder[key]]
            case 2 if isinstance(holder, list):
                holder.extend(holder[:20])
            case 2:
                holder[random.choice(("x", "", key + "x", "kind"))] = holder.pop(key)
            case 3:
                other, place = random.choice(places)
                holder[key] = _copy(other[place])
            case _:
                holder[key] = _copy(random.choice(ODD))
    return copy


def _copy(document: object) -> Any:
    return json.loads(json.dumps(document))


def _places(value: Any) -> Any:
    """Every key of every list and object, with what it is in."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items) if isinstance(value, dict | list) else ():
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def zip_from(members: Mapping[str, Make], method: int = zipfile.ZIP_DEFLATED) -> Make:
    """Pack mutated members with correct checksums, so that a reader gets as far as their bytes."""

    def make(random: Random) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as archive:
            for name, content in members.items():
                info = zipfile.ZipInfo(_renamed(random, name))  # dated 1980, unlike a name alone
                info.compress_type = method
                info.external_attr = random.choice((0, 0, 0, 0o100644 << 16, 0o120777 << 16))
                archive.writestr(info, content(random))
        return stream.getvalue()

    return make


def tar_from(members: Mapping[str, Make], packed: bool) -> Make:
    """Pack mutated members with odd headers and correct checksums."""
    kinds = (*(tarfile.REGTYPE,) * 8, *(tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE))

    def make(random: Random) -> bytes:
        stream = io.BytesIO()
        form = random.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
        with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
            for name, content in members.items():
                data = content(random)
                info = tarfile.TarInfo(_renamed(random, name)[:45])
                info.type, info.size = random.choice(kinds), len(data)
                if random.random() < 0.1:
                    info.pax_headers = {random.choice(PAX): random.choice(("0", "-1", "x", "é"))}
                archive.addfile(info, io.BytesIO(data))
        return gzip.compress(stream.getvalue(), 1, mtime=0) if packed else stream.getvalue()

    return make


PAX = ("size", "path", "mtime", "GNU.sparse.major", "GNU.sparse.map", "GNU.sparse.size", "uid")


def _renamed(random: Random, name: str) -> str:
    return random.choice((*(name,) * 9, f"../{name}", f"/{name}", f"d/{name}", "é" * 200, "."))


def one_of(*makes: Make) -> Make:
    """Make each case by one of these."""
    return lambda random: random.choice(makes)(random)
