"""Commands of pages that the tests cannot run, run where they can be.

python -m tests.docs.recorded gpu      on a GPU host: run the GPU blocks of tutorials, write their
                                       output, revision and date into the page
python -m tests.docs.recorded howtos   run the how-tos that no test runs, and print each result

A block whose tool is missing stays "not executed"; its syntax is checked, and it is counted.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
GPU_PAGES = tuple(
    ROOT / "docs" / "tutorials" / f"{name}.md" for name in ("resnet-on-gpu", "bert-int8", "qat")
)
HOWTOS = tuple(
    ROOT / "docs" / "howto" / f"{name}.md"
    for name in (
        "choose-precision",
        "fix-accuracy",
        "dynamic-shapes",
        "batch-and-latency",
        "unsupported-operators",
        "run-the-engine-in-python",
    )
)
"""Pages with commands of `crucible compile` on the example plans. tests/service/integration runs
those of the pages about the service.
"""

NEEDS_GPU = "not executed: needs a GPU"
MAX_LINES = 40
BLOCK = re.compile(
    r'^```console title="(?P<title>not executed: needs a GPU[^"]*|executed: [^"]*)"\n'
    r"(?P<text>.*?)^```\n"
    r'(?:\n```text title="its output"\n.*?^```\n)?',
    re.DOTALL | re.MULTILINE,
)
LINES = re.compile(r"^\$ (.*)", re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)

Run = Callable[[Sequence[str]], tuple[int, str]]
"""Runs commands in one shell: its exit code, and all that they printed."""
Has = Callable[[str], bool]
"""Whether a tool is installed."""


class BlockFailed(Exception):
    """A command of a page failed."""


@dataclass(frozen=True, slots=True)
class Filled:
    text: str
    counts: Counter[str]  # "executed" and "not executed"


def tools_of(lines: Sequence[str]) -> set[str]:
    """The programs that commands call, the first word of each."""
    return {shlex.split(line, comments=True)[0] for line in lines}


def check_syntax(lines: Sequence[str]) -> None:
    """Raise BlockFailed if the shell cannot parse the commands."""
    parsed = subprocess.run(
        ["bash", "-n"], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    if parsed.returncode:
        raise BlockFailed(f"bash cannot parse {lines}: {parsed.stderr.strip()}")


def fill(page: str, run: Run, has: Has, stamp: str) -> Filled:
    """The page with the output of each GPU block below it, and `stamp` in the block's title."""
    counts = Counter[str]()

    def filled(match: re.Match[str]) -> str:
        lines = LINES.findall(match["text"])
        check_syntax(lines)
        missing = sorted(tool for tool in tools_of(lines) if not has(tool))
        if missing:
            counts["not executed"] += 1
            why = f"{NEEDS_GPU} and {', '.join(missing)}"
            return f'```console title="{why}"\n{match["text"]}```\n'
        code, output = run(lines)
        if code:
            raise BlockFailed(f"exit code {code} from {lines}:\n{output[-3000:]}")
        counts["executed"] += 1
        return (
            f'```console title="executed: {stamp}"\n{match["text"]}```\n'
            f'\n```text title="its output"\n{shortened(output)}\n```\n'
        )

    return Filled(BLOCK.sub(filled, page), counts)


def shortened(output: str) -> str:
    """The last lines of an output; a page is not a log."""
    lines = [line.rstrip().replace("```", "'''") for line in output.strip().splitlines()]
    if len(lines) <= MAX_LINES:
        return "\n".join(lines)
    return "\n".join([f"... {len(lines) - MAX_LINES} lines ...", *lines[-MAX_LINES:]])


def shell(folder: Path, environment: dict[str, str]) -> Run:
    """Runs commands with bash in this folder; `crucible` is this checkout's."""

    def run(lines: Sequence[str]) -> tuple[int, str]:
        function = f'crucible() {{ {shlex.quote(sys.executable)} -m pipeline.cli "$@"; }}'
        result = subprocess.run(
            ["bash", "-c", "\n".join(["set -euo pipefail", function, *lines])],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return result.returncode, result.stdout

    return run


def record_gpu(pages: Sequence[Path], run: Run, has: Has, stamp: str) -> int:
    """Write the output of each GPU block into its page; 1 if a block failed or none ran."""
    total, failed = Counter[str](), False
    for page in pages:
        try:
            result = fill(page.read_text(encoding="utf-8"), run, has, stamp)
        except BlockFailed as error:
            failed = True
            print(f"FAILED {page.name}: {error}", file=sys.stderr)
            continue
        page.write_text(result.text, encoding="utf-8")
        total += result.counts
        print(f"{page.name}: {dict(result.counts)}")
    print(f"executed: {total['executed']}, not executed: {total['not executed']}")
    return 1 if failed or not total["executed"] else 0


def run_howtos(pages: Sequence[Path], run: Run) -> int:
    """Run the commands of each page and print its result; 1 if a page failed or has no command."""
    failed = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in CONSOLE.findall(text) for line in LINES.findall(block)]
        code, output = run(lines) if lines else (1, "the page has no command")
        print(f"{'FAILED' if code else 'ok'} {page.stem}: {len(lines)} commands", flush=True)
        if code:
            failed.append(page.stem)
            print(output[-3000:], flush=True)
    print(f"{len(pages) - len(failed)} of {len(pages)} how-tos ran")
    return 1 if failed else 0


def calibrates(source: str) -> bool:
    """Whether this model or plan of the checkout brings calibration data."""
    return source.endswith(".yaml") and "calibration:" in (ROOT / source).read_text("utf-8")


def checkout(folder: Path) -> Path:
    """A folder like a checkout, so that outputs stay out of the repository."""
    for name in ("configs", "calibration_data", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def main(kind: str) -> int:
    # Imported here: the doubles of the tests need no environment.
    from tests.builders.cli import environment
    from tests.docs.test_tutorials import quick

    def short(line: str) -> str:
        """The command with few candidates; none in int8 where no data calibrates it."""
        if line.startswith("crucible compile") and not calibrates(shlex.split(line)[2]):
            line += " --set 'candidates=[{backend: onnxruntime, precision: fp32}]'"
        return quick(line)

    with tempfile.TemporaryDirectory() as name:
        folder = checkout(Path(name))
        run = shell(folder, environment({"CRUCIBLE_HOME": str(folder / "home")}))
        if kind == "howtos":

            def run_quick(lines: Sequence[str]) -> tuple[int, str]:
                # Several pages read the demo's result.
                demo = quick("crucible compile configs/digits.yaml")
                return run([f"test -e crucible-out/digits || {demo}", *map(short, lines)])

            return run_howtos(HOWTOS, run_quick)
        if shutil.which("nvidia-smi") is None:
            print("make docs-gpu needs a host with an NVIDIA GPU: no nvidia-smi", file=sys.stderr)
            return 1
        return record_gpu(
            GPU_PAGES, run, lambda tool: tool == "crucible" or bool(shutil.which(tool)), stamp()
        )


def stamp() -> str:
    """When, at which revision and on which GPU."""
    said = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for command in (
            ["git", "rev-parse", "--short", "HEAD"],
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        )
    ]
    revision, gpu = (text.strip().splitlines()[0] for text in said)
    return f"{datetime.now(UTC):%Y-%m-%d}, revision {revision}, {gpu}"


if __name__ == "__main__":
    if sys.argv[1:] not in (["gpu"], ["howtos"]):
        raise SystemExit("usage: python -m tests.docs.recorded gpu|howtos")
    raise SystemExit(main(sys.argv[1]))
