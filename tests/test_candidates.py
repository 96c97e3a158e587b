"""What stops a candidate on its way is its state and reason; what stops the check of a mislabelled one hides nothing of that."""

from pipeline.candidates import stopped
from pipeline.core import Precision, Recipe
from pipeline.report import Candidate

RECIPE = Recipe(backend="tensorrt", precision=Precision.INT8, realised_in="flags")


def test_what_stops_a_candidate_is_its_state_and_reason() -> None:
    found = stopped(Candidate(label="a", recipe=RECIPE, state="failed"), "refused", "no such kernel")
    assert (found.state, found.reason) == ("refused", "no such kernel")


def test_a_mislabelled_engine_that_cannot_be_checked_stays_mislabelled() -> None:
    wrong = Candidate(label="a", recipe=RECIPE, state="mislabelled", reason="called int8, but runs fp16")
    found = stopped(wrong, "failed", "out of the GPU's memory")
    assert (found.state, found.reason) == ("mislabelled", "called int8, but runs fp16; its answers were not checked: out of the GPU's memory")
