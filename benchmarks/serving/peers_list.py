"""The servers that Crucible is held against, each in an environment of its own with these
versions.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMON = ("numpy==2.4.6", "onnxruntime==1.31.1")


@dataclass(frozen=True, slots=True)
class Peer:
    """One server. The first package is its own; packages that it brings along are as they come."""

    name: str
    script: str
    packages: tuple[str, ...]
    path: str = "/infer"
    oip: bool = False  # takes the Open Inference Protocol, not bare bytes
    python: str = "3.11"
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return self.packages[0].partition("==")[2]


FASTAPI = "FastAPI"
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "90",
}
PEERS = (
    Peer(
        FASTAPI,
        "fastapi_.py",
        ("fastapi==0.165.0", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0", *COMMON),
    ),
    Peer("LitServe", "litserve_.py", ("litserve==0.2.19", *COMMON)),
    Peer("BentoML", "bentoml_.py", ("bentoml==1.4.39", *COMMON)),
    Peer("Ray Serve", "ray_.py", ("ray[serve]==2.60.0", *COMMON), environ=RAY),
    Peer(
        "PyTriton",
        "pytriton_.py",
        ("nvidia-pytriton==0.7.0", "numpy==1.26.4", "onnxruntime==1.31.1"),
        path="/v2/models/model/infer",
        oip=True,
        # Triton loads this host's libpython3.11.so, which must be of the same build as the
        # environment
        python="/usr/bin/python3.11",
    ),
    Peer("mosec", "mosec_.py", ("mosec==0.9.8", *COMMON), path="/inference"),
)


def installed(peer: Peer, folder: Path) -> Path:
    """The peer's own Python, made if it is not there; CalledProcessError with what uv says if that
    fails.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise FileNotFoundError(
            "uv, which makes the environments of the peers, is not on the PATH:"
            " https://docs.astral.sh/uv"
        )
    root = folder / peer.script.removesuffix("_.py")
    python, done = root / "bin" / "python", root / "installed"
    wanted = "\n".join(peer.packages)
    if not done.is_file() or done.read_text(encoding="utf-8") != wanted:
        _quietly([uv, "venv", "--clear", "--python", peer.python, str(root)])
        _quietly(
            [uv, "pip", "install", "--compile-bytecode", "--python", str(python), *peer.packages]
        )
        done.write_text(wanted, encoding="utf-8")
    return python


def _quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
