"""`python -m benchmarks` and the table in benchmarks/README.md: the same names, each a module."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as entry
from benchmarks.run_all import NAMES

ROOT = Path(__file__).parents[2]
README = ROOT / "benchmarks" / "README.md"


def table() -> dict[str, list[str]]:
    """The cells of every row of README.md's table, by the name in the first one."""
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", README.read_text(encoding="utf-8"), flags=re.M)
    cells_by_name = {name: cells.split(" | ") for name, cells in rows}
    assert len(cells_by_name) == len(rows)
    return cells_by_name


def test_the_table_has_every_benchmark_with_its_question() -> None:
    assert list(table()) == list(entry.BENCHMARKS)
    assert {name: cells[0] for name, cells in table().items()} == entry.QUESTIONS
    assert {len(cells) for cells in table().values()} == {5}


def test_every_result_file_is_in_the_table_and_every_link_leads_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert {link for link in links if not (README.parent / link).is_file()} == set()
    results = {f"results/{file.name}" for file in (README.parent / "results").glob("*.json")}
    assert results == {link for link in links if link.startswith("results/")}


def test_every_link_to_a_section_of_a_page_has_its_heading() -> None:
    links = re.findall(r"(docs/benchmarks/[\w-]+\.md)#([\w-]+)", README.read_text(encoding="utf-8"))
    assert links
    for page, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
        anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
        assert anchor in anchors, (page, anchor)


@pytest.mark.parametrize("name", entry.BENCHMARKS)
def test_every_name_is_a_module_with_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m benchmarks {name} " in capsys.readouterr().out


def test_a_model_of_a_peer_is_not_taken_from_the_command_line_of_the_benchmark() -> None:
    """The peers' module reads sys.argv, and the benchmark imports it."""
    command = [sys.executable, "-m", "benchmarks", "serving", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--instances" in result.stdout


def test_every_command_in_the_texts_is_a_name() -> None:
    texts = [ROOT / "README.md", ROOT / "Makefile", README, *(ROOT / "docs").rglob("*.md")]
    named = set[str]()
    for file in texts:
        named |= set(re.findall(r"-m benchmarks (\w+)", file.read_text(encoding="utf-8")))
    assert {"pages", "peak", "gpu_models", "soak", "run_all"} <= named
    assert named - {"NAME"} <= set(entry.BENCHMARKS)
    assert set(NAMES) <= set(entry.BENCHMARKS)


def test_without_a_name_all_are_listed() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name, question in entry.QUESTIONS.items():
        assert re.search(rf"^{name} +{re.escape(question)}$", result.stdout, flags=re.M)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("same_engin", "near it: same_engine; "), ("xyzzy", "")],
    ids=["near", "far"],
)
def test_an_unknown_name_is_refused(name: str, hint: str) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main([name])
    assert ended.value.code == (
        f"no benchmark is named '{name}'\n  next: {hint}`python -m benchmarks` lists them"
    )


def test_no_folder_has_more_than_fifteen_modules() -> None:
    folders = {file.parent for file in (ROOT / "benchmarks").rglob("*.py")}
    sizes = {
        folder.name: sum(file.name != "__init__.py" for file in folder.glob("*.py"))
        for folder in folders
    }
    assert {"cpu", "gpu", "serving", "pages", "peers"} <= set(sizes)
    assert {name: size for name, size in sizes.items() if size > 15} == {}
