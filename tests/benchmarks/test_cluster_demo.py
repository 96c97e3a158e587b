"""The plans of the cluster's demo; `make cluster-demo` runs the whole."""

from pathlib import Path

from benchmarks.faults.cluster.demo import MODEL, write_plans
from pipeline.plan.files import load_plan


def test_both_plans_ask_for_two_targets_that_differ(tmp_path: Path) -> None:
    write_plans(tmp_path / "configs")
    first, again = (
        load_plan(tmp_path / "configs" / f"{name}.yaml") for name in (MODEL, f"{MODEL}-again")
    )
    assert [target.threads for target in first.targets] == [1, 2]
    assert first.model.weights is not None
    assert first.model.weights.is_file()
    assert first.benchmark != again.benchmark, "else the second compile would reuse the first"
