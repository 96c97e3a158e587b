"""docs/tutorials and docs/migrate hold: their commands run in order, and what is not run parses."""

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from pipeline.plan.files import plan_from_document
from tests.builders.cli import environment
from tests.service.integration.test_docs import MARK, commands

ROOT = Path(__file__).parents[2]
TUTORIALS, MIGRATE = ROOT / "docs" / "tutorials", ROOT / "docs" / "migrate"
ORDER = ("first-compile", "bert-int8", "resnet-on-gpu", "qat")  # migrations use the first's model
PAGES = [TUTORIALS / f"{name}.md" for name in ORDER] + sorted(MIGRATE.glob("*.md"))
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
NOT_EXECUTED = Counter(console=8, json=1, python=3, yaml=4)
QUICK = "benchmark={duration_s: 0.3, warmup_s: 0.05, budget_s: 0.01, threads: 1}"
INT8 = "[{backend: onnxruntime, precision: int8}, {backend: openvino, precision: int8}]"
REJECTED = ("crucible compile my-qat/qat_before.yaml",)
SHORT_TEXTS = "profiles=[{batch: [1, 2, 4], sequence: [4, 16, 128]}]"


def quick(line: str) -> str:
    """The command, with few candidates that are measured in one process each: it proves nothing
    about speed, so the verdict is `unproven`.
    """
    if not line.startswith("crucible compile"):
        return line
    if line in REJECTED:
        return f"{line} || [ $? -eq 2 ]"
    overrides = [QUICK]
    if "candidates=" not in line:
        overrides.append(f"candidates={INT8}")
    if "minilm" in line:
        overrides.append(SHORT_TEXTS)
    return line + "".join(f" --set '{override}'" for override in overrides)


def examples(page: Path) -> list[str]:
    """The Python blocks of a page that run."""
    found = BLOCK.findall(page.read_text())
    return [text for kind, title, text in found if kind == "python" and not title]


def blocks() -> list[tuple[Path, str, str, str]]:
    """Every block: its page, language, title and text."""
    return [(page, *block) for page in PAGES for block in BLOCK.findall(page.read_text())]


def run(lines: list[str], folder: Path) -> dict[str, str]:
    """Run the commands in one shell; returns what each printed.

    With one thread: on tensors this small, more only wait for each other.
    """
    script = f"""
export PATH={Path(sys.executable).parent}:$PATH
crucible() {{ {sys.executable} -m pipeline.cli "$@"; }}
set -euo pipefail
""" + "".join(f"echo '{MARK}'\n{quick(line)}\n" for line in lines)
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment({"CRUCIBLE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = result.stdout.split(MARK)[1:]
    assert result.returncode == 0, (lines[len(outputs) - 1], outputs[-1], result.stderr[-3000:])
    return dict(zip(lines, outputs, strict=True))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout, with a store that all pages share."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "calibration_data", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


EXPECTED: dict[str, dict[str, str]] = {
    "first-compile": {"python my-model/own_ask.py": "32 of 32 answers are right"},
    "bert-int8": {"bert_ask.py": "the same meaning"},
    "qat": {"compile my-qat/qat_before.yaml": "failed accuracy"},
    "from-polygraphy": {"--onnxrt": "PASSED"},
    "from-triton": {"cat model-repository": "max_batch_size: 32"},
}
"""Of each page with commands: what one of them prints, by a part of the command."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if commands(page.read_text())],
    ids=lambda page: page.stem,
)
def test_the_commands_of_the_page_run(page: Path, checkout: Path) -> None:
    if page.parent == MIGRATE and not (checkout / "my-model").exists():  # this page runs alone
        lines = commands(PAGES[0].read_text())
        run([line for line in lines if re.match(r"mkdir|cp|python \S*own_train", line)], checkout)
    outputs = run(commands(page.read_text()), checkout)
    ((part, text),) = EXPECTED[page.stem].items()
    assert [text in output for line, output in outputs.items() if part in line] == [True]
    for line, output in outputs.items():
        if line.startswith("crucible compile"):
            verdict = "rejected" if line in REJECTED else "unproven"
            assert f'{{"verdict": "{verdict}"' in output, output
    for example in examples(page):
        ran = run([f"python -c {shlex.quote(example)}"], checkout)
        assert "True" in "".join(ran.values())
        assert "False" not in "".join(ran.values())


def test_what_is_not_executed_says_so_and_parses() -> None:
    elsewhere = ("not executed: ", "executed: ")  # the second: by `make docs-gpu`
    skipped = [block for block in blocks() if block[2].startswith(elsewhere)]
    assert Counter(kind for _, kind, _, _ in skipped) == NOT_EXECUTED
    for page, kind, title, _ in blocks():
        assert not title or title.startswith(elsewhere) or kind == "text", (page, title)
    for _, kind, _, text in skipped:
        if kind == "console":
            lines = [line.removeprefix("$ ") for line in text.splitlines() if line[:2] == "$ "]
            subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)
        elif kind == "python":
            compile(text, "page", "exec")
        elif kind == "json":
            json.loads(text)


def test_every_yaml_is_a_plan_or_a_part_of_one() -> None:
    texts = [text for _, kind, _, text in blocks() if kind == "yaml"]
    assert len(texts) == 9
    for text in texts:
        plan = plan_from_document(
            {"model": {"path": "model.onnx"}, **yaml.safe_load(text)},
            base=ROOT,
            name="page",
            overrides=(),
        )
        assert plan.name == "page"


def test_the_plan_of_the_page_is_the_file() -> None:
    (plan,) = (text for page, kind, _, text in blocks() if kind == "yaml" and page == PAGES[0])
    assert plan == (TUTORIALS / "own_model.yaml").read_text()


def test_recorded_results_are_those_of_the_repository() -> None:
    printed = subprocess.run(
        [sys.executable, TUTORIALS / "gpu_table.py"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() in (TUTORIALS / "resnet-on-gpu.md").read_text()


def test_pictures_are_small_and_load_nothing() -> None:
    pictures = sorted(TUTORIALS.glob("*.svg"))
    assert [picture.stem for picture in pictures] == ["demo", "report", "service"]
    for picture in pictures:
        text = picture.read_text()
        assert len(text) < 200_000
        assert "url(http" not in text.replace('"', "")
