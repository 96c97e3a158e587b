"""What docs/deploy.md shows of benchmarks/results/image_size.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = ("image", "serves", "unpacked", "compressed", "ready after (5 starts)", "memory then")


def images_section(document: Mapping[str, Any]) -> list[str]:
    rows = [
        (row["image"], row["serves"] or "", *map(_megabytes, (row["unpacked_mb"], row["compressed_mb"])), _start(row), _megabytes(row["memory_mb"]))
        for row in document["rows"]
    ]
    environment = document["environment"]
    told = f"{document['created'][:10]}, {environment['cpu']}, {environment['cores']} cores, a load of {environment['load_1min']:.1f} at the end."
    return [*("| " + " | ".join(row) + " |" for row in (HEAD, ("---",) * len(HEAD), *rows)), "", told]


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} MB"


def _start(row: Mapping[str, Any]) -> str:
    return "" if row["start_s"] is None else f"{row['start_s']:.2f} s ({row['least_s']:.2f} to {row['most_s']:.2f})"
