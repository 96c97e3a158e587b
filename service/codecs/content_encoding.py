"""Content-Encoding: gzip and deflate, both ways. What is unpacked is counted, so that a small body
cannot become a large one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from service.errors import TooLarge, Unprocessable

ENCODINGS = ("gzip", "deflate")
_FORM = {
    "gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}  # deflate is zlib's format: RFC 9110, 8.4.1.2
_LEVEL = 1  # tensors hardly shrink: more effort buys little


def unpacked(body: bytes | memoryview, encoding: str, limit: int) -> bytes:
    """The body behind a Content-Encoding; TooLarge as soon as it is longer than the limit."""
    if encoding not in _FORM:
        raise Unprocessable(
            f"Content-Encoding '{encoding}'", f"expected {' or '.join(ENCODINGS)}, or none"
        )
    stream = zlib.decompressobj(_FORM[encoding])
    try:
        whole = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise Unprocessable(
            f"the body is not {encoding}: {error}", "compress it anew, or send it as it is"
        ) from None
    if len(whole) > limit:
        raise TooLarge(
            f"a body that unpacks to more than {limit} bytes",
            "send less, or have the service's limit `max_infer_bytes` raised",
        )
    if not stream.eof or stream.unused_data:
        how = "ends too early" if not stream.eof else "goes on after its end"
        raise Unprocessable(
            f"the body, sent as {encoding}, {how}", "compress it anew, or send it as it is"
        )
    return whole


def packed(parts: Iterable[bytes | memoryview], encoding: str) -> bytes:
    """One compressed body of several parts."""
    stream = zlib.compressobj(_LEVEL, wbits=_FORM[encoding])
    return b"".join([*map(stream.compress, parts), stream.flush()])


def encoding_asked(accept: str) -> str | None:
    """How the answer is to be compressed: where Accept-Encoding names one encoding and no other.

    HTTP libraries offer several by themselves, and packing tensors costs more time than it saves;
    `tritonclient`'s option names one.
    """
    named = accept.strip().lower()
    return named if named in _FORM else None
