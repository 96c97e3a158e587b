"""Install, from a folder of wheels and without a network, what this Python lacks: `python
tests/gpu/install_wheels.py WHEELS SITE`.

Large wheels come in parts (`fetch_wheels.sh` makes them) and are joined first. What the host has
already is left as it is. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        sys.exit("usage: python tests/gpu/install_wheels.py WHEELS SITE")
    wheels, site = Path(arguments[0]), Path(arguments[1])
    if not wheels.is_dir():
        sys.exit(
            f"expected a folder of wheels, got '{wheels}'\n  next: tests/gpu/fetch_wheels.sh fills"
            " one on a host with a network"
        )
    with tempfile.TemporaryDirectory() as folder:
        joined = [
            join(sums, Path(folder))
            for sums in sorted(wheels.rglob("*.whl.sha256"))
            if lacks(sums.name)
        ]
        lacking = [wheel for wheel in sorted(wheels.rglob("*.whl")) if lacks(wheel.name)] + joined
        if lacking:
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-index",
                "--no-deps",
                "--no-compile",
                "--no-cache-dir",
                "--upgrade",
            ]
            subprocess.run([*pip, "--target", str(site), *map(str, lacking)], check=True)
    print(
        f"{len(lacking)} wheels of {wheels} put into {site}:"
        f" {', '.join(distribution(wheel.name) for wheel in lacking) or 'all is here'}"
    )


def distribution(file: str) -> str:
    """pydantic_core-2.50.4-cp312-... -> pydantic-core."""
    return re.sub(r"[-_.]+", "-", file.partition("-")[0]).lower()


def lacks(file: str, path: Iterable[str] | None = None) -> bool:
    """Whether no version of a wheel's package is installed (on `path`, by default where this Python
    looks).
    """
    return not any(
        importlib.metadata.distributions(
            name=distribution(file), path=list(sys.path if path is None else path)
        )
    )


def join(sums: Path, folder: Path) -> Path:
    """The whole wheel from its parts, which lie anywhere beside or below the file with its sum;
    exits unless they are all there and right.
    """
    expected, name = sums.read_text(encoding="ascii").split()
    parts = sorted(sums.parent.rglob(f"{name}.part[0-9][0-9]"))
    wheel, digest = folder / name, hashlib.sha256()
    with wheel.open("wb") as sink:
        for part in parts:
            block = part.read_bytes()
            digest.update(block)
            sink.write(block)
    if digest.hexdigest() != expected:
        here = ", ".join(part.name for part in parts) or "none"
        sys.exit(
            f"the parts of {name} do not make the whole (here: {here})\n  next: bring all parts"
            f" along, or leave out {sums}"
        )
    return wheel


if __name__ == "__main__":
    main(sys.argv[1:])
