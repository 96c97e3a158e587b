"""From texts to vectors: the tokens by a helper, the engine by its deployment, and the pooling."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.text_inputs import (
    TOKENIZER_FILE,
    inputs_from_tokens,
    length_for,
    vector_from_output,
)
from service.context import Service
from service.errors import ServiceError, Unprocessable
from service.http.openai.errors import BadParameter
from service.http.openai.requests import Prompt
from service.inference import InferRequest, Served, ServedText
from service.jobs.publish import ENGINE

MAX_TOKENS = 2**20  # of one text, where the engine has no limit

Tokens = NDArray[np.int32]
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Encoder:
    """A deployed encoder of texts, for one request."""

    service: Service
    served: Served
    text: ServedText
    request: InferRequest  # without inputs

    @property
    def size(self) -> int | str:
        """The size of its vectors."""
        outputs = self.served.outputs
        return next(spec.shape[-1] for spec in outputs if spec.name == self.text.recipe.output)

    async def tokens(self, texts: Sequence[Prompt]) -> list[Tokens]:
        """Return the tokens of each text. BadParameter if one has none, too many, or wrong ones."""
        for number, each in enumerate(texts):
            if not each:
                raise BadParameter(
                    f"expected text or tokens, got none in input {number}",
                    "leave empty texts out",
                    "input",
                )
        served, folders = self.served, self.service.folders
        file = folders.version(served.model, served.version) / ENGINE / TOKENIZER_FILE
        most = max((high for _, high in served.lengths), default=MAX_TOKENS)
        try:
            return await self.service.text_tokens.tokens(
                file, self.text.tokenizer_sha256, texts, most
            )
        except Unprocessable as error:
            raise BadParameter(error.message, error.next_step, "input") from error

    async def vectors(self, texts: Sequence[Tokens]) -> NDArray[np.float32]:
        """Return the vectors: [texts, size].

        Each text is a request of its own, of which the deployment makes batches. As many wait at
        once as keep the engine busy, so that other requests find room in the queue.
        """
        vectors = dict[int, Vector]()
        numbers = iter(range(len(texts)))

        async def work() -> None:
            for number in numbers:
                vectors[number] = await self._vector(number, texts[number])

        served = self.served
        together = 2 * served.max_batch * served.instances * len(served.devices)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(together, len(texts))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:  # the first one ended the others
            raise errors.exceptions[0] from None
        return np.stack([vectors[number] for number in range(len(texts))])

    async def _vector(self, number: int, tokens: Tokens) -> Vector:
        served, recipe = self.served, self.text.recipe
        length = length_for(len(tokens), served.lengths)
        assert length is not None  # `tokens` has checked it
        if length > len(tokens) and recipe.mask not in {spec.name for spec in served.inputs}:
            raise BadParameter(
                f"input {number} has {len(tokens)} tokens, this model takes {length} or more: it"
                " has no mask to tell padding",
                "send a longer text, or compile the model for shorter ones",
                "input",
            )
        padding = next((p.value for p in served.batch.padding if p.input == recipe.input), 0)
        inputs = inputs_from_tokens(tokens, served.inputs, recipe, length, int(padding))
        request = replace(self.request, inputs=inputs, outputs=(recipe.output,))
        answer = await self.service.serving.infer(request)
        vector = vector_from_output(answer.outputs[recipe.output], len(tokens), recipe)
        if not np.isfinite(vector).all():
            raise ServiceError(
                f"the engine of '{served.model}' gave no finite vector for input {number}",
                "compile the model in a higher precision",
            )
        return vector
