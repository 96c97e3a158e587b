"""The page of figures says what the results say."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_in_step_with_the_results() -> None:
    code = "import sys; sys.path.insert(0, 'benchmarks'); from tables import page; print(page(), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == (ROOT / "docs" / "benchmarks.md").read_text(), "run: python benchmarks/tables.py"


def test_every_result_holds_its_environment_and_its_targets() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for file in results:
        document = json.loads(file.read_text())
        assert document["environment"]["cpu_flags"], file
        assert document["rows"], file
        assert document["targets"], file
