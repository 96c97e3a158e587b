"""The history of a model: its versions by library and device, and compiling it again."""

import json
import re
from pathlib import Path

from pipeline.host.environment import environment
from service.pages.history import LIBRARIES
from tests.service.builders.app import Desk, at_desk
from tests.service.integration.test_benchmark import ENDED, model

PAGE = "/ui/models/m/history"


def test_each_version_has_its_libraries_and_can_be_compiled_again(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        jobs = [await model(desk, tmp_path / str(number)) for number in (1, 2, 3)]
        file = desk.service.folders.report(jobs[0]) / "report.json"
        text = re.sub(r'"onnxruntime": ?"[^"]*"', '"onnxruntime": "1.2.3"', file.read_text())
        file.write_text(text)
        assert json.loads(text)["environment"]["packages"]["onnxruntime"] == "1.2.3"
        (desk.service.folders.report(jobs[1]) / "report.json").write_text("{")

        page = (await desk.client.get(PAGE)).text
        here = environment().packages
        for name in LIBRARIES:
            if name in here:
                assert f"{name} {here[name]}" in page
        assert "onnxruntime 1.2.3" in page
        assert "report.json" in page  # the second version's cannot be read
        assert f"a={jobs[1]}" not in page
        assert 'href="/ui/models/m/history"' in (await desk.client.get("/ui/models/m")).text

        answer = await desk.client.post("/ui/models/m/recompile", data={})
        assert answer.status_code == 303, answer.text
        job = answer.headers["Location"].removeprefix("/ui/jobs/")
        assert (await desk.until(job, *ENDED))["state"] == "succeeded"
        assert (await desk.client.get("/ui/models/none/history")).status_code == 404

    at_desk(tmp_path, story)
