"""Texts: both forms, and errors that name the line."""

from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.llm.plan import Texts
from pipeline.llm.texts import read_documents, read_texts
from tests.pipeline.llm.models import texts, write_texts


def test_lines_and_files_hold_the_same_texts(tmp_path: Path) -> None:
    given = texts(4)
    lines = read_documents(write_texts(tmp_path / "a.jsonl", given), "selection")
    folder = tmp_path / "files"
    folder.mkdir()
    for number, text in enumerate(given):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    files = read_documents(folder, "selection")
    assert lines.texts == files.texts == tuple(given)
    assert lines.digest == files.digest


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "expected a .jsonl file or a folder of .txt files"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n', "3 texts in"),
        ("a.jsonl", b'{"text": "a"}\n' * 5, "is in"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', 'line 2: expected {"text": "..."}'),
        ("a.jsonl", b'{"text": 1}\n', "line 1: expected"),
        ("a.jsonl", b"[1]\n", "line 1: expected"),
        ("a.jsonl", b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_a_faulty_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        read_documents(tmp_path / name, "selection")
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file at"):
        read_documents(tmp_path / "none.jsonl", "selection")


def test_no_text_chooses_and_proves(tmp_path: Path) -> None:
    selection = write_texts(tmp_path / "s.jsonl", texts(4))
    validation = write_texts(tmp_path / "v.jsonl", [*texts(4, "validation"), texts(1)[0]])
    with pytest.raises(DataError, match=r"texts\.validation is in texts\.selection, too"):
        read_texts(Texts(selection=selection, validation=validation))
