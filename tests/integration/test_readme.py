"""The README is short, and its commands run from top to bottom or say why they cannot."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.builders.cli import environment
from tests.service.integration.test_docs import SHELL, URL, commands, is_server, served

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
NOT_RUN = re.compile(r"<!-- not run here: [^>]+ -->\n```console\n.*?```", re.DOTALL)
BLOCK = re.compile(r"```(console|python)\n(.*?)```", re.DOTALL)


def script() -> list[str]:
    """All that a reader pastes after `make demo`: commands, and Python as a command."""
    lines = []
    for language, text in BLOCK.findall(NOT_RUN.sub("", README)):
        if language == "python":
            lines.append(f"python3 - <<'END'\n{text}END")
        else:
            lines += commands(f"```console\n{text}```")
    return lines


def test_it_is_short_and_begins_with_the_two_commands() -> None:
    assert len(README.split()) <= 900
    assert [line.split("#")[0].strip() for line in script()[:2]] == ["make demo", "make test"]
    assert len(NOT_RUN.findall(README)) == README.count("<!-- not run here")


@pytest.mark.slow
def test_its_commands_lead_to_an_engine_and_to_an_answer(tmp_path: Path) -> None:
    lines = [line for line in script()[2:] if not is_server(line)]
    home = tmp_path / "home"
    with served("crucible serve", home) as url:
        result = subprocess.run(
            ["bash", "-c", "\n".join([SHELL, *lines]).replace(URL, url)],
            cwd=tmp_path,
            env=environment({"CRUCIBLE_HOME": str(home), "CRUCIBLE_URL": url}),
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    assert (tmp_path / "crucible-out" / "model" / "report.html").is_file()
    assert re.search(r"^\{'\w+': \(1, 4\)\}$", result.stdout, re.MULTILINE)
    assert '"outputs":{' in result.stdout
