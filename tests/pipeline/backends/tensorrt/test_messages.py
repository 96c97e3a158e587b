"""What TensorRT's own logger prints is heard wherever a process prints, and still arrives there.
TensorRT-RTX needs no GPU for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends.tensorrt.messages import (
    builders_logger_of,
    listening,
    logger_of,
    messages_of,
)
from pipeline.core.progress import Progress
from pipeline.errors import ChildDied
from pipeline.execution.child_process import call_in_child

ROOT = Path(__file__).parents[4]
TWO_LINES = "could not find any implementation\nfor node a"


@pytest.fixture(name="trt")
def _trt() -> Any:
    trt = pytest.importorskip("tensorrt_rtx")
    messages_of(trt).clear()
    return trt


def say(trt: Any) -> None:
    logger = builders_logger_of(trt)
    logger.log(trt.Logger.INFO, "detected 1 input")
    logger.log(trt.Logger.WARNING, "a first word")
    logger.log(trt.Logger.ERROR, TWO_LINES)
    logger.log(trt.Logger.INTERNAL_ERROR, "a last word")


HEARD = [("WARNING", "a first word"), ("ERROR", TWO_LINES), ("INTERNAL_ERROR", "a last word")]


def test_what_is_printed_to_a_file_is_heard_and_stays_there(
    trt: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    say(trt)
    with listening(trt):
        say(trt)
    assert messages_of(trt) == HEARD  # once: what was printed before was no answer to this
    assert capfd.readouterr().out.count("a last word") == 2


def test_what_is_printed_to_a_pipe_is_heard_and_arrives_there(trt: Any) -> None:
    code = (
        "import tensorrt_rtx as trt; from tests.pipeline.backends.tensorrt.test_messages import"
        " *\nprint('before', flush=True)\nwith listening(trt): say(trt); os.write(1, b'not"
        " TensorRT\\n')\nsay(trt); assert [text for _, text in messages_of(trt)] == ['a first"
        " word', TWO_LINES, 'a last word\\nnot TensorRT'], messages_of(trt)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "before"
    assert [line for line in lines if "TensorRT" in line] == ["not TensorRT"]
    assert sum("a first word" in line for line in lines) == 2


BESIDE = """
import os, sys, threading, tensorrt_rtx as trt
from pipeline.backends.tensorrt.messages import *
os.write(1, b" 50%|####")
gone = threading.Event()
def others():
    while not gone.is_set():
        os.write(2, b"#")
threading.Thread(target=others, daemon=True).start()
with listening(trt):
    for number in range(500):
        builders_logger_of(trt).log(trt.Logger.ERROR, f"error {number}")
gone.set()
heard = [text.partition(chr(10))[0].rstrip("#") for _, text in messages_of(trt)]
assert heard == [f"error {number}" for number in range(500)], heard[:5]
"""


def test_what_others_print_to_the_same_log_hides_nothing(trt: Any, tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        environ = os.environ | {"PYTHONUNBUFFERED": "1"}  # as below the service
        result = subprocess.run(
            [sys.executable, "-c", BESIDE],
            cwd=ROOT,
            env=environ,
            stdout=log,
            stderr=log,
            check=False,
        )
    assert result.returncode == 0, (tmp_path / "log").read_text()[-300:]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("os.close(1)", "pass"),
        ("reader, writer = os.pipe(); os.dup2(writer, 1); os.close(writer)", "os.close(reader)"),
    ],
    ids=["closed", "a pipe that nobody reads any more"],
)
def test_a_stdout_that_takes_nothing_is_no_reason_to_fail(
    trt: Any, before: str, after: str
) -> None:
    code = (
        "import os, tensorrt_rtx as trt\nfrom tests.pipeline.backends.tensorrt.test_messages"
        " import *\n"
    )
    code += f"{before}\nwith listening(trt):\n  say(trt)\n  {after}\n"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}os._exit(7)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (7, "")


def test_an_error_does_not_silence_what_was_said(trt: Any) -> None:
    def say_and_fail() -> None:
        with listening(trt):
            say(trt)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        say_and_fail()
    assert messages_of(trt) == HEARD


def test_the_last_words_before_a_crash_are_in_the_log(trt: Any) -> None:
    with pytest.raises(ChildDied, match="a last word"):
        call_in_child(crash, name="build")


def crash(progress: Progress) -> None:
    import tensorrt_rtx as trt

    with listening(trt):
        say(trt)
        os.abort()


def test_our_logger_hears_without_listening(trt: Any) -> None:
    logger_of(trt).log(trt.Logger.WARNING, "while it runs")
    logger_of(trt).log(trt.Logger.INFO, "nothing")
    assert messages_of(trt) == [("WARNING", "while it runs")]
