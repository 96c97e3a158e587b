"""What docs/deploy.md shows of benchmarks/results/image_size.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT = """`python -m benchmarks image_size`<!-- not run here: it needs root, buildah and 35 GB
of disk; the table is what it measured -->
built the CPU images and one of [LitServe](https://lightning.ai/docs/litserve) with ONNX Runtime
alike, on the same Debian 12 with its own Python. A start is from the first process until `/readyz`
(LitServe: `/health`) says 200, with the image's files in the page cache:
the median of {starts} starts, the least and the most. The one model is a CNN of 10,000 weights."""
HEAD = ("image", "serves", "unpacked", "compressed", "ready after", "memory then")


def images_section(document: Mapping[str, Any] | None) -> list[str]:
    if document is None:
        return []
    rows = [
        (
            row["image"],
            row["serves"] or "",
            *map(_megabytes, (row["unpacked_mb"], row["compressed_mb"])),
            _start(row),
            _megabytes(row["memory_mb"]),
        )
        for row in document["rows"]
    ]
    table = ["| " + " | ".join(row) + " |" for row in (HEAD, ("---",) * len(HEAD), *rows)]
    host = document["environment"]
    told = (
        f"{document['created'][:10]}, {host['cpu']}, {host['cores']} cores, a load of"
        f" {host['load_1min']:.1f} at the end."
    )
    return [
        *TEXT.format(starts=max(row["starts"] for row in document["rows"])).splitlines(),
        "",
        *table,
        "",
        told,
    ]


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} MB"


def _start(row: Mapping[str, Any]) -> str:
    return (
        ""
        if row["start_s"] is None
        else f"{row['start_s']:.2f} s ({row['least_s']:.2f} to {row['most_s']:.2f})"
    )
