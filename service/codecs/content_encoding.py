"""Content-Encoding: compress and decompress bodies with gzip and deflate.

Decompression counts the bytes, so that a small body cannot become a large one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from service.errors import TooLarge, Unprocessable

ENCODINGS = ("gzip", "deflate")
# Values of zlib's `wbits`. The encoding deflate is zlib's format: RFC 9110, 8.4.1.2.
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
PIECE_BYTES = 16 * 2**20  # unpacked at a time; each piece copies the packed rest
_LEVEL = 1  # tensors compress badly: a higher level saves few bytes


def unpacked(
    body: bytes | memoryview, encoding: str, limit: int, grow: Callable[[int], None]
) -> memoryview:
    """Decompress a body; TooLarge as soon as it is longer than `limit` bytes. `grow` is called
    with the bytes of each piece, and may refuse them.
    """
    if encoding not in _WBITS:
        raise Unprocessable(
            f"expected a Content-Encoding of {' or '.join(ENCODINGS)}, or none, got '{encoding}'",
            "send the body uncompressed, or compress it with one of these",
        )
    stream = zlib.decompressobj(_WBITS[encoding])
    content, rest = bytearray(), body
    try:
        while not stream.eof and len(content) <= limit:
            piece = stream.decompress(rest, min(PIECE_BYTES, limit + 1 - len(content)))
            rest = stream.unconsumed_tail
            if not piece and not rest:  # cut short
                break
            grow(len(piece))
            content += piece
    except zlib.error as error:
        raise Unprocessable(
            f"the body is not {encoding}: {error}", "compress it again, or send it uncompressed"
        ) from None
    if len(content) > limit:
        raise TooLarge(
            f"the body unpacks to more than {limit} bytes",
            "send a smaller body, or ask for a higher `max_infer_bytes` of the service",
        )
    if not stream.eof or stream.unused_data:
        problem = "ends too early" if not stream.eof else "has data after its end"
        raise Unprocessable(
            f"the body, sent as {encoding}, {problem}", "compress it again, or send it uncompressed"
        )
    return memoryview(content)


def packed(parts: Iterable[bytes | memoryview], encoding: str) -> bytes:
    """Compress several parts to one body."""
    stream = zlib.compressobj(_LEVEL, wbits=_WBITS[encoding])
    return b"".join([*map(stream.compress, parts), stream.flush()])


def accepted_encoding(accept: str) -> str | None:
    """Return the encoding of the answer: that of an Accept-Encoding with exactly one encoding.

    HTTP libraries offer several encodings by default, and compressing tensors costs more time than
    it saves. The option of `tritonclient` names one.
    """
    encoding = accept.strip().lower()
    return encoding if encoding in _WBITS else None
