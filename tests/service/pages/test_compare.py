"""Two results side by side."""

from pathlib import Path

from pipeline.report.files import load_report
from service.pages.compare import comparison_of, flat
from tests.service.builders.app import Desk, at_desk, model_bytes


def test_leaves_are_named_by_their_path() -> None:
    nested = {"a": {"b": 1, "c": [2, {"d": None}]}}
    assert flat(nested) == {"a.b": 1, "a.c[0]": 2, "a.c[1].d": None}


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
        assert [each.name for each in found.environment] == ["cpu"]
        assert [(each.name, each.second) for each in found.plan] == [("name", "another")]
        missing = await desk.client.get("/ui/compare", params={"a": jobs[0], "b": "nothing"})
        assert missing.status_code == 404

    at_desk(tmp_path, story)
