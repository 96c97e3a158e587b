"""Our decoder from a plan to answers at once, on a CPU."""

from pathlib import Path

import pytest

from tests.service.language_jobs.torch_story import language_story


@pytest.mark.slow
def test_a_language_model_is_submitted_and_answers_in_slots(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="language models: no transformers")
    language_story(tmp_path, "cpu")
