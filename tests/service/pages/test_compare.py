"""Two results side by side."""

from pathlib import Path

from pipeline.core.recipe import Precision
from pipeline.report.files import load_report
from pipeline.results.layer_table import Layer, LayerTable
from service.pages.compare import MAX_LAYERS, comparison_of, flat, layers_of
from tests.service.builders.app import Desk, at_desk, model_bytes


def test_leaves_are_named_by_their_path() -> None:
    nested = {"a": {"b": 1, "c": [2, {"d": None}]}}
    assert flat(nested) == {"a.b": 1, "a.c[0]": 2, "a.c[1].d": None}


def table(**seconds: float) -> LayerTable:
    """Layers by the nodes that they compute, written `a_b`."""
    layers = tuple(
        Layer(
            name=f"kernel {name}",
            kind="gemm",
            precision=Precision.FP32,
            evidence="types",
            nodes=tuple(name.split("_")),
            seconds=each,
        )
        for name, each in seconds.items()
    )
    return LayerTable(sizes={"batch": 1}, runs=9, layers=layers)


def test_layers_are_compared_by_the_nodes_that_they_compute() -> None:
    found = layers_of(table(a=1e-3, b_c=2e-3, d=5e-3), table(c_b=9e-3, a=1e-3, d_e=4e-3))
    assert [(each.name, each.first, each.second) for each in found.rows] == [
        ("b, c", "2.00 ms", "9.00 ms"),
        ("a", "1.00 ms", "1.00 ms"),
        ("fused otherwise", "5.00 ms", "4.00 ms"),
    ]
    many = {f"n{number}": 1e-3 for number in range(MAX_LAYERS + 3)}
    rows = layers_of(table(**many), table(**many)).rows
    assert (len(rows), rows[-1].name) == (MAX_LAYERS + 1, "3 more of the same nodes")
    assert "has no table" in layers_of(None, table(a=1.0)).missing
    assert "computes the same nodes" in layers_of(table(a=1.0), table(b=1.0)).missing
    other = table(a=1.0).model_copy(update={"sizes": {"batch": 8}})
    assert "timed at batch 1 and at batch 8" in layers_of(table(a=1.0), other).missing


def test_what_differs_is_shown_and_nothing_else(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        assert "At least two jobs" in (await desk.client.get("/ui/compare")).text
        jobs = []
        for graph in ("g", "h"):
            job = (await desk.compile("succeed", model=model_bytes(graph))).json()["id"]
            await desk.until(job, "succeeded")
            jobs.append(job)
        empty = (await desk.client.get("/ui/compare")).text
        assert all(f'value="{job}"' in empty for job in jobs)
        page = (await desk.client.get("/ui/compare", params={"a": jobs[0], "b": jobs[1]})).text
        assert "not side by side" in page
        assert "The plans are equal." in page
        report = load_report(desk.service.folders.report(jobs[0]))
        other = report.environment.model_copy(update={"cpu": "another", "load_1min": 99.0})
        plan = report.plan.model_copy(update={"name": "another"})
        changed = report.model_copy(update={"environment": other, "plan": plan})
        found = comparison_of(report, changed)
        assert not found.same_host
        assert found.ratios
        assert all(each.first.startswith("1.00 [") or each.second for each in found.ratios)
        assert [each.name for each in found.environment] == ["cpu"]
        assert [(each.name, each.second) for each in found.plan] == [("name", "another")]
        missing = await desk.client.get("/ui/compare", params={"a": jobs[0], "b": "nothing"})
        assert missing.status_code == 404

    at_desk(tmp_path, story)
