"""Only an accepted report becomes a version; an unproven one by an override that is logged, a
rejected one never.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.core.artifacts import Engine
from pipeline.errors import DamagedError
from pipeline.results.report import Verdict
from pipeline.serving_inputs import InputRecipe, Padding, ServingConfig
from pipeline.text_inputs import TextConfig
from service.auth import LOCAL
from service.errors import Conflict, NotFound
from service.registry.models import PromoteRequest
from service.registry.promotion import prove
from service.sandbox.layers import Sandbox
from tests.service.serving.engines import linear, play
from tests.service.serving.models import Shelf, shelf


async def refused(of: type[Exception], here: Shelf, request: PromoteRequest) -> str:
    with pytest.raises(of) as error:
        await here.deployments.promote(LOCAL, "m", request)
    assert (await here.deployments.views(LOCAL)).models == ()
    return str(error.value)


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
            version = view.current
            assert (
                version.version,
                version.job,
                version.verdict,
                version.override,
                version.before,
                version.owner,
            ) == (1, job, "accepted", False, None, "local")
            assert (version.image, version.labels, version.batch) == (
                serving.image,
                serving.labels,
                here.host.batch,
            )
            engine = here.repository.engine(version)
            assert isinstance(engine, Engine)
            assert (version.backend, version.label) == ("onnxruntime", engine.recipe.label)
            assert here.host.proofs == [(serving.padding, "cpu")]
            again = await here.deployments.promote(LOCAL, "m", PromoteRequest(report=job))
            assert again == view  # nothing is made twice
            assert here.leases.devices.held == ()

    play(story)


def test_an_encoder_without_its_tokenizer_is_not_promoted(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            job = here.report(serving=ServingConfig(text=TextConfig()))
            with pytest.raises(DamagedError, match=r"no 'tokenizer\.json'"):
                await here.deployments.promote(LOCAL, "m", PromoteRequest(report=job))
            with pytest.raises(NotFound):
                await here.deployments.view(LOCAL, "m")

    play(story)


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("verdict", ["rejected", "unproven"])
def test_what_was_not_accepted(tmp_path: Path, verdict: Verdict, override: bool) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            request = PromoteRequest(report=here.report(verdict), override=override)
            if verdict == "unproven" and override:
                with capture_logs() as logged:
                    view = await here.deployments.promote(LOCAL, "m", request)
                assert view.current.override
                assert [
                    (event["log_level"], event["verdict"])
                    for event in logged
                    if event["event"] == "model.override"
                ] == [("warning", "unproven")]
                return
            message = await refused(Conflict, here, request)
            assert f"verdict is {verdict}" in message
            assert "because" in message
            assert ("`--override`" in message) == (verdict == "unproven")

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
        engine, sandbox = linear(tmp_path), Sandbox(tmp_path)
        sandbox.find()
        proof = await prove(engine, (), "cpu", sandbox)
        assert (proof.proved, proof.maximum, proof.axes) == (True, 16, {"x": 0, "y": 0})
        engine.path.write_bytes(b"torn")
        with pytest.raises(Conflict, match="the engine does not run here"):
            await prove(engine, (), "cpu", sandbox)

    play(story)
