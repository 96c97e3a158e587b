"""The hand-written pages stay short enough to be read."""

import re
from pathlib import Path

from benchmarks.pages.figures import FOLDER
from benchmarks.pages.write import PAGES, PART
from tests.attack.__main__ import PAGE
from tests.docs import reference

ROOT = Path(__file__).parents[2]
MAX_WORDS = 29_100
"""25,000 before several hosts, Ray, language models, metrics, advice and timelines."""
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
GENERATED = {
    PAGE,
    *(reference.REFERENCE / name for name in reference.pages()),
    *(FOLDER / f"{name}.md" for name in PAGES),
}
OTHERS = ("README.md", "benchmarks/README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")


def hand_written() -> list[Path]:
    """The pages that nothing generates."""
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in GENERATED]
    return [*pages, *(ROOT / name for name in OTHERS)]


def words_of(text: str) -> int:
    """The words outside of blocks of code and of parts that `python -m benchmarks pages` writes.

    A word has a letter or a digit.
    """
    written = CODE.sub("", PART.sub("", text))
    return sum(1 for word in written.split() if re.search(r"[^\W_]", word))


def test_words_are_counted_outside_of_code() -> None:
    assert words_of("# One `two`\n\n```yaml\na: 1\n```\n\n| three | - | 4 |\n") == 4


def test_the_hand_written_pages_have_few_words() -> None:
    counts = {
        str(page.relative_to(ROOT)): words_of(page.read_text("utf-8")) for page in hand_written()
    }
    for name, words in sorted(counts.items(), key=lambda each: -each[1]):
        print(f"{words:6,} {name}")
    total = sum(counts.values())
    print(f"{total:6,} words, at most {MAX_WORDS:,}")
    assert len(counts) > 40
    assert total <= MAX_WORDS, f"{total - MAX_WORDS} words too many: cut or merge pages"
