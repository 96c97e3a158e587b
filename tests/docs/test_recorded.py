"""Blocks that run elsewhere: what is written into the page, and what fails loudly."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs import recorded
from tests.docs.recorded import BlockFailed, fill, record_gpu, run_howtos, shell, shortened

PAGE = """# Page

```console title="not executed: needs a GPU"
$ crucible doctor
$ crucible compile plan.yaml  # minutes
```

Text.

```console title="not executed: needs a GPU and trtexec"
$ trtexec --onnx=model.onnx
```

```yaml title="not executed: a part of a plan"
a: 1
```
"""


def said(lines: Sequence[str]) -> tuple[int, str]:
    return 0, "".join(f"ran {line}\n" for line in lines)


def is_crucible(tool: str) -> bool:
    return tool == "crucible"


def test_the_output_and_the_stamp_are_written_below_the_block() -> None:
    filled = fill(PAGE, said, is_crucible, "2026-11-26, revision abc, NVIDIA H200")
    assert dict(filled.counts) == {"executed": 1, "not executed": 1}
    assert '```console title="executed: 2026-11-26, revision abc, NVIDIA H200"' in filled.text
    assert '```text title="its output"\nran crucible doctor\n' in filled.text
    assert '```console title="not executed: needs a GPU and trtexec"' in filled.text
    assert '```yaml title="not executed: a part of a plan"' in filled.text


def test_a_second_recording_replaces_the_first() -> None:
    once = fill(PAGE, said, is_crucible, "first")
    twice = fill(once.text, said, is_crucible, "second")
    assert twice.counts == once.counts
    assert twice.text == once.text.replace("executed: first", "executed: second")


def test_a_tool_that_is_installed_later_is_executed() -> None:
    once = fill(PAGE, said, is_crucible, "first")
    assert fill(once.text, said, lambda _: True, "second").counts == {"executed": 2}


def test_a_failing_command_leaves_the_page_and_is_loud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert record_gpu([page], lambda _: (3, "out of memory"), is_crucible, "now") == 1
    assert page.read_text() == PAGE
    assert "FAILED page.md: exit code 3" in capsys.readouterr().err


def test_recording_nothing_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert record_gpu([page], said, lambda _: False, "now") == 1
    assert "executed: 0, not executed: 2" in capsys.readouterr().out
    assert 'title="not executed: needs a GPU and crucible"' in page.read_text()


def test_a_block_that_does_not_parse_fails_without_its_tool() -> None:
    page = PAGE.replace("--onnx=model.onnx", "--onnx=$(model.onnx")
    with pytest.raises(BlockFailed, match="cannot parse"):
        fill(page, said, is_crucible, "now")


def test_long_outputs_keep_their_end() -> None:
    lines = [f"line {number}" for number in range(100)]
    assert shortened("\n".join(lines)).splitlines() == ["... 60 lines ...", *lines[60:]]


def test_each_how_to_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in (("good", "true"), ("bad", "echo broken; false")):
        (tmp_path / f"{name}.md").write_text(f"```console\n$ {command}\n```\n")
    (tmp_path / "empty.md").write_text("no command")
    pages = [tmp_path / f"{name}.md" for name in ("good", "bad", "empty")]
    assert run_howtos(pages, shell(tmp_path, {"PATH": "/usr/bin:/bin"})) == 1
    printed = capsys.readouterr().out
    assert "ok good: 1 commands" in printed
    assert "FAILED bad: 1 commands\nbroken\n" in printed
    assert "FAILED empty" in printed
    assert "1 of 3 how-tos ran" in printed
    assert run_howtos(pages[:1], shell(tmp_path, {"PATH": "/usr/bin:/bin"})) == 0


def test_int8_is_left_out_where_nothing_calibrates_it() -> None:
    assert recorded.calibrates("configs/digits.yaml")
    assert not recorded.calibrates("configs/surgery.yaml")
    assert not recorded.calibrates("model.onnx")


def test_the_pages_exist_and_the_gpu_pages_have_blocks() -> None:
    texts = [page.read_text() for page in recorded.GPU_PAGES]
    assert sum(len(recorded.BLOCK.findall(text)) for text in texts) >= 2
    for page in recorded.HOWTOS:
        assert recorded.CONSOLE.search(page.read_text()), page
