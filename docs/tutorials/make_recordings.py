"""Run the commands of the three recordings, and write demo.svg, report.svg and service.svg here.

From the root of the checkout, in the environment of `make demo`, on a quiet host:

    python docs/tutorials/make_recordings.py
"""

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COLUMNS = 130
LINES = 60  # of one command; the rest is cut off
COMMAND = f'crucible() {{ {sys.executable} -m pipeline.cli "$@"; }}\n'
MODEL = (
    "import onnx; onnx.save(onnx.parser.parse_model("
    '\'<ir_version: 8, opset_import: ["": 17]> tiny (float[batch, 16] x) => (float[batch, 16] y)'
    " { y = Softmax(x) }'), 'model.onnx')"
)
INPUT = "import numpy; numpy.save('x.npy', numpy.random.rand(1, 16).astype('float32'))"
PORT = 8017
RECORDINGS = {
    "demo": ("crucible compile configs/digits.yaml --out demo | head -n -1",),
    "report": ("crucible report demo",),
    "service": (
        "crucible submit model.onnx --profile batch=1:8:64 --wait | head -n -1",
        "crucible promote tiny $(crucible jobs --json | python -c"
        ' \'import json, sys; print(json.load(sys.stdin)["jobs"][0]["id"])\') --override',
        "crucible load tiny",
        "crucible infer x.npy --model tiny",
        "crucible models",
    ),
}


def run(command: str, folder: Path) -> str:
    """Return what a command prints to stdout, with its colours. Its stderr is shown, not kept."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",  # stdout is no terminal here
        "CRUCIBLE_URL": f"http://127.0.0.1:{PORT}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", COMMAND + command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f"'{command}' failed with exit code {result.returncode}: {result.stdout}")
    return result.stdout


def record(name: str, folder: Path) -> None:
    """Run the commands of a recording, and write its SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for command in RECORDINGS[name]:
        lines = run(command, folder).splitlines()
        console.print(Text(f"$ {command}", style="bold"))
        for line in lines[:LINES]:
            console.print(Text.from_ansi(line))
        if len(lines) > LINES:
            console.print(Text(f"[{len(lines) - LINES} more lines]", style="dim"))
    svg = console.export_svg(title=f"crucible: {name}", unique_id=name)
    without_web_fonts = re.sub(r"local\(([^)]*)\),\s*url\([^;]*;", r"local(\1);", svg)
    (HERE / f"{name}.svg").write_text(without_web_fonts, encoding="utf-8")


def wait_for_service() -> None:
    """Return when the service accepts jobs, at the latest after a minute."""
    for _ in range(120):
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/readyz").status_code == 200:
                return
        except httpx.ConnectError:
            pass
        time.sleep(0.5)
    sys.exit("the service does not start")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("configs", "calibration_data"):
            (folder / name).symlink_to(ROOT / name)
        for script in (MODEL, INPUT):
            subprocess.run([sys.executable, "-c", script], cwd=folder, check=True)
        record("demo", folder)
        record("report", folder)
        server = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "serve"],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "CRUCIBLE_HOME": str(folder / "home"),
                "CRUCIBLE_SERVICE_PORT": str(PORT),
            },
        )
        try:
            wait_for_service()
            record("service", folder)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
