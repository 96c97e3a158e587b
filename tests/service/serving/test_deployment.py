"""One deployed version: what goes in, what comes out, and when."""

import asyncio
from pathlib import Path

import numpy as np

from tests.service.serving.fixtures_engines import deployed, direct, linear, marked, play


def test_an_answer_is_that_of_a_direct_session_on_the_same_batch(tmp_path: Path) -> None:
    engine = linear(tmp_path, layers=3)

    async def story() -> None:
        async with deployed(tmp_path, engine) as bench:
            answer = await bench.ask(marked(3), id="7")
            assert np.array_equal(answer.outputs["y"], direct(engine, {"x": marked(3)})["y"])
            assert (answer.model, answer.version, answer.device, answer.id) == ("m", 1, "cpu", "7")
            assert answer.timing.batch_size == 1
            together = await asyncio.gather(*(bench.ask(marked(n)) for n in range(5)))
            assert [each.timing.batch_size for each in together] == [5] * 5
            expected = direct(engine, {"x": np.concatenate([marked(n) for n in range(5)])})["y"]
            assert np.array_equal(np.concatenate([each.outputs["y"] for each in together]), expected)

    play(story)
