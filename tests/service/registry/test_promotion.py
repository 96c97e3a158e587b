"""Only an accepted report becomes a version; an unproven one by an override that is logged, a
rejected one never.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.core import DimRange
from pipeline.errors import DamagedError
from pipeline.results.report import Verdict
from pipeline.serving_inputs import InputRecipe, Padding, ServingConfig
from service.auth import LOCAL
from service.errors import Conflict, NotFound
from service.registry.models import PromoteRequest, suggested
from service.registry.promotion import prove
from tests.service.registry.test_repository import version
from tests.service.serving.engines import linear, play
from tests.service.serving.models import Shelf, shelf


async def refused(of: type[Exception], here: Shelf, asked: PromoteRequest) -> str:
    with pytest.raises(of) as caught:
        await here.deployments.promote(LOCAL, "m", asked)
    assert (await here.deployments.views(LOCAL)).models == ()
    return str(caught.value)


def test_a_version_tells_what_its_report_says(tmp_path: Path) -> None:
    serving = ServingConfig(
        padding=(Padding(input="x", axis=1),),
        image=InputRecipe(input="x", size=(8, 8)),
        labels={"y": ("cat", "dog")},
    )

    async def story() -> None:
        async with shelf(tmp_path) as here:
            job = here.report(serving=serving)
            view = await here.deployments.promote(
                LOCAL, "m", PromoteRequest(report=job, override=True)
            )
            found = view.current
            assert (
                found.version,
                found.job,
                found.verdict,
                found.override,
                found.before,
                found.owner,
            ) == (1, job, "accepted", False, None, "local")
            assert (found.image, found.labels, found.batch) == (
                serving.image,
                serving.labels,
                here.host.batch,
            )
            assert (found.backend, found.label) == (
                "onnxruntime",
                here.repository.engine(found).recipe.label,
            )
            assert here.host.proofs == [(serving.padding, "cpu")]
            again = await here.deployments.promote(LOCAL, "m", PromoteRequest(report=job))
            assert again == view  # nothing is made twice
            assert here.leases.devices.held == ()

    play(story)


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("verdict", ["rejected", "unproven"])
def test_what_was_not_accepted(tmp_path: Path, verdict: Verdict, override: bool) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            asked = PromoteRequest(report=here.report(verdict), override=override)
            if verdict == "unproven" and override:
                with capture_logs() as logged:
                    view = await here.deployments.promote(LOCAL, "m", asked)
                assert view.current.override
                assert [
                    (each["log_level"], each["verdict"])
                    for each in logged
                    if each["event"] == "model.override"
                ] == [("warning", "unproven")]
                return
            said = await refused(Conflict, here, asked)
            assert f"verdict is {verdict}" in said
            assert "because" in said

    play(story)


def test_a_baseline_that_was_kept_is_served_without_an_override(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            view = await here.deployments.promote(
                LOCAL, "m", PromoteRequest(report=here.report("keep"), override=True)
            )
            assert (view.current.verdict, view.current.override) == ("keep", False)

    play(story)


def test_there_must_be_a_report_and_a_whole_engine(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            assert "no job 'nobody'" in await refused(
                NotFound, here, PromoteRequest(report="nobody")
            )
            job = here.report()
            (here.folders.report(job) / "engine" / "model.onnx").write_bytes(b"torn")
            assert "is damaged" in await refused(DamagedError, here, PromoteRequest(report=job))
            await here.deployments.promote(LOCAL, "mine", PromoteRequest(report=here.report()))
            with pytest.raises(Conflict, match="the name 'mine' is taken"):
                await here.deployments.promote(
                    LOCAL, "mine", PromoteRequest(report=here.report(owner="other"))
                )

    play(story)


def test_rollbacks_go_back_to_the_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            for _ in range(3):
                await here.promote()
            back = [(await here.deployments.rollback(LOCAL, "m")).current.version for _ in range(2)]
            assert back == [2, 1]
            with pytest.raises(Conflict, match="version 1 of 'm' was the first"):
                await here.deployments.rollback(LOCAL, "m")
            assert await here.promote() == 4
            assert (
                await here.deployments.rollback(LOCAL, "m")
            ).current.version == 1  # and not 3, which was undone

    play(story)


def test_the_proof_is_taken_in_a_child(tmp_path: Path) -> None:
    async def story() -> None:
        engine = linear(tmp_path)
        found = await prove(engine, (), "cpu")
        assert (found.proved, found.maximum, found.axes) == (True, 16, {"x": 0, "y": 0})
        engine.path.write_bytes(b"torn")
        with pytest.raises(Conflict, match="the engine does not run here"):
            await prove(engine, (), "cpu")

    play(story)


def test_the_profile_that_requests_suggest() -> None:
    seen: Counter[tuple[tuple[str, int], ...]] = Counter(
        {
            (("batch", 1), ("length", 16)): 9,
            (("batch", 4), ("length", 3)): 5,
            (("batch", 2), ("length", 16)): 1,
        }
    )
    found = version()
    assert suggested(seen, found) == (
        {"batch": DimRange(min=1, opt=1, max=8), "length": DimRange(min=3, opt=16, max=16)},
    )
    assert suggested({}, found) == ()
    assert suggested({(): 3}, found) == ()
    assert suggested({(("batch", 0),): 3}, found) == ({"batch": DimRange(min=0, opt=1, max=8)},)
