"""Every name of a module or file of ours, wherever it stands as text, is one that exists.

Moving a module changes its imports; these names are the rest. CHANGELOG.md may keep old ones.
"""

import ast
import importlib
import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from pipeline.errors import CrucibleError
from tests.docs.operations import documented

ROOT = Path(__file__).parents[2]
CODE = ("pipeline", "service", "tests", "benchmarks", "calibration_data", "docker")
OURS = r"(?:pipeline|service|tests|benchmarks)"
MAX_MODULES = 15  # in one folder; more would hide the order of things
MAX_COLUMNS = 100

CODES = {each.code for each in documented(CrucibleError)}
"""`service.not_found` is a code of an error and looks like a module."""

# Each finder takes a text and returns the names in it.
MODULE = re.compile(rf"-m[\s\"',]+({OURS}(?:\.\w+)+)|\bmodule(?:: str)? ?= ?\"({OURS}(?:\.\w+)+)\"")
FUNCTION = re.compile(rf"(?<![\w.])({OURS}(?:\.\w+)+:\w+)")
DOTTED = re.compile(rf"`({OURS}(?:\.\w+)+)`")
PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(CODE)}|docs|configs|docker)/[\w./*-]*[\w*]/?)")
FILE = re.compile(r"(?<![\w./*{}-])([\w/]*[a-z]\w*\.py)\b(?!\.)")


def modules_in(text: str) -> list[str]:
    """`python -m pipeline.cli`, `"-m", "pipeline.cli"`, `module="service.offload.worker"`."""
    return [first or second for first, second in MODULE.findall(text)]


def functions_in(text: str) -> list[str]:
    """`pipeline.folding:fold_strides`."""
    return FUNCTION.findall(text)


def dotted_in(text: str) -> list[str]:
    """Modules and what is in them, between backticks: `pipeline.core.artifacts.Engine`."""
    return DOTTED.findall(text)


def paths_in(text: str) -> list[str]:
    """`service/http/routers`, `tests/gpu/*.py`, from the root of the checkout."""
    return PATH.findall(text)


def files_in(text: str) -> list[str]:
    """`errors.py`, `routers/oip.py`: the end of a path. Not files that a page tells to make."""
    made = re.findall(r"Save this as `(\w+\.py)`", text)
    return [name for name in FILE.findall(text) if name not in made]


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_function(name: str) -> bool:
    module, _, function = name.partition(":")
    return is_module(module) and hasattr(importlib.import_module(module), function)


def is_dotted(name: str) -> bool:
    if is_module(name) or name in CODES:
        return True
    parent, _, last = name.rpartition(".")
    return is_module(parent) and hasattr(importlib.import_module(parent), last)


def is_path(name: str) -> bool:
    """A name in capitals stands for any: `benchmarks/NAME.py`."""
    return any(ROOT.glob(re.sub(r"\b[A-Z]+\b(?!\.md)", "*", name.rstrip("/"))))


def is_file(name: str) -> bool:
    """Something of ours ends so."""
    examples = (str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.py"))
    return any(f"/{file}".endswith(f"/{name}") for file in (*code_files(), *examples))


def code_files() -> list[str]:
    files = (file for folder in CODE for file in (ROOT / folder).rglob("*.py"))
    return sorted(str(file.relative_to(ROOT)) for file in files)


def pages() -> Iterator[Path]:
    """Where people and tools read our names, but for Python."""
    yield from (
        ROOT / name
        for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
    )
    yield ROOT / ".ci" / "run"
    yield from (ROOT / "docs").rglob("*.md")
    yield from (ROOT / "service").rglob("*.md")
    yield from (ROOT / "docker").glob("Dockerfile.*")


def python_files() -> Iterator[Path]:
    yield from (ROOT / file for file in code_files() if ROOT / file != Path(__file__))


def texts_of(files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    yield from ((file, file.read_text(encoding="utf-8")) for file in files)


def prose() -> Iterator[tuple[Path, str]]:
    """Pages, our own code with its comments, and of a test what it says of itself.

    A test writes files of its own, which are none of ours.
    """
    yield from texts_of(pages())
    for file, text in texts_of(python_files()):
        of_test = file.is_relative_to(ROOT / "tests")
        yield file, ast.get_docstring(ast.parse(text)) or "" if of_test else text


def everything() -> Iterator[tuple[Path, str]]:
    yield from texts_of(pages())
    yield from texts_of(python_files())


Texts = Callable[[], Iterator[tuple[Path, str]]]
Finder = Callable[[str], list[str]]
KINDS: dict[str, tuple[Texts, Finder, Callable[[str], bool], int]] = {
    "module": (everything, modules_in, is_module, 20),
    "function": (everything, functions_in, is_function, 8),
    "dotted": (everything, dotted_in, is_dotted, 4),
    "path": (prose, paths_in, is_path, 80),
    "file": (prose, files_in, is_file, 40),
}
"""Of each kind: where to look, how to find a name, what makes it right, how many there are at
least, so that a finder which finds nothing is no proof.
"""


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_is_one_that_exists(kind: str) -> None:
    texts, find, exists, least = KINDS[kind]
    names = [(file.relative_to(ROOT), name) for file, text in texts() for name in find(text)]
    assert len(names) >= least
    known = {name: exists(name) for name in {name for _, name in names}}
    assert not [f"{file}: {name}" for file, name in names if not known[name]]


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("module", '[sys.executable, "-m", "{}"]', "pipeline.cli", "pipeline.runner"),
        ("module", "`python -m\n{}`: a worker", "service.offload.worker", "service.wires.helper"),
        ("module", 'Helpers(module="{}")', "service.grpc.offload_worker", "service.rpc.helper"),
        ("module", 'def f(module: str = "{}"):', "tests.service.serving", "tests.serving"),
        ("function", "surgery: {}", "pipeline.folding:fold_strides", "pipeline.folding:fold"),
        ("function", '"{}"', "service.architectures:resnet50_of_10", "service.shapes:resnet50"),
        ("dotted", "it imports `{}`.", "pipeline.compiler.compile", "pipeline.again"),
        ("dotted", "a frozen `{}`", "pipeline.core.artifacts.Engine", "pipeline.core.Engine"),
        ("path", "see {}.", "pipeline/compiler/compile.py", "pipeline/compile.py"),
        ("path", "the folder `{}`", "service/http/routers/", "service/rpc"),
        ("path", ".venv/bin/python {}", "benchmarks/NAME.py", "benchmarks/gpu_/NAME.py"),
        ("file", "`{}` reads those words", "exit_causes.py", "faults.py"),
        ("file", "`{}` finds them", "routers/oip.py", "routers/slow.py"),
        ("file", "see {}: why", "markdown.py", "arkdown.py"),
    ],
)
def test_a_wrong_name_is_found(kind: str, text: str, right: str, wrong: str) -> None:
    _, find, exists, _ = KINDS[kind]
    assert [(name, exists(name)) for name in find(text.format(right))] == [(right, True)]
    assert [(name, exists(name)) for name in find(text.format(wrong))] == [(wrong, False)]


def test_the_command_is_a_function_of_ours() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert list(scripts) == ["crucible"]
    assert functions_in(scripts["crucible"]) == [scripts["crucible"]]
    assert is_function(scripts["crucible"])


def test_the_page_of_the_design_has_the_arrows_and_folders_of_the_contracts() -> None:
    page = (ROOT / "docs" / "explain" / "design.md").read_text()
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layered = [each for each in linter["contracts"] if each["type"] == "layers"]
    assert [contract["containers"] for contract in layered] == [["pipeline"], ["service"]]
    for contract, package in zip(layered, ("pipeline", "service"), strict=True):
        section = page.split(f"`{package}/`:\n\n```\n")[1]
        assert section.split("\n```\n")[0].replace("\n", " ").split(" -> ") == contract["layers"]
        table = section.split("|---|---|\n")[1].split("\n\n")[0]
        rows = {name for row in table.splitlines() for name in row.split("|")[1].split(", ")}
        inside = (ROOT / package).iterdir()
        assert {name.strip(" `") for name in rows} == {
            f"{each.name}/" if each.is_dir() else each.name
            for each in inside
            if each.suffix in ("", ".py") and not each.name.startswith("__")
        }


def crowded(files: Iterable[str]) -> dict[str, int]:
    """Folders with more modules than one can take in; what is generated does not count."""
    counted = [Path(file) for file in files if not file.endswith(("__init__.py", "_pb2.py"))]
    folders = [str(file.parent) for file in counted]
    return {each: folders.count(each) for each in folders if folders.count(each) > MAX_MODULES}


def test_no_folder_holds_more_modules_than_one_can_take_in() -> None:
    files = [file for file in code_files() if file.startswith(("pipeline", "service", "tests"))]
    assert len(files) > 300
    assert crowded(files) == {}


def test_a_crowded_folder_is_found() -> None:
    full = [f"service/jobs/{number}.py" for number in range(MAX_MODULES)]
    rest = ["service/jobs/__init__.py", "service/jobs/health_pb2.py", "service/serving/one.py"]
    assert crowded([*full, *rest]) == {}
    assert crowded([*full, *rest, "service/jobs/more.py"]) == {"service/jobs": MAX_MODULES + 1}


def test_no_line_is_longer_than_the_limit() -> None:
    """Ruff passes lines that end in a comment for a tool, and lines without a space."""
    own = [file for file in code_files() if not file.endswith("_pb2.py")]
    lines = ((file, line) for file in own for line in (ROOT / file).read_text("utf-8").splitlines())
    assert [(file, line) for file, line in lines if len(line) > MAX_COLUMNS] == []
