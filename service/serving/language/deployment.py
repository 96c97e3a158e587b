"""One loaded version of a language model: its queue, its time-outs, its worker.

    deployment = await LanguageDeployment.start(spec, work, figures)
    async with deployment.generate(request) as answer:
        async for part in answer: ...
    await deployment.drain()            refuse new requests, finish the others
    await deployment.close()            end the worker; running answers get Unavailable

The worker runs `together` answers, and keeps further requests in their order. A request that has
not begun outlives its worker: the next one gets it.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from pipeline.llm.engine import LanguageEngine, read_settings
from service.errors import TimedOut, TooMany, Unavailable, Unprocessable
from service.inference import (
    InferAnswer,
    InferRequest,
    ModelState,
    Served,
    ServedDevice,
    Statistics,
)
from service.language.generation import GenerateRequest, ServedLanguage
from service.registry.models import LANGUAGE_BATCH, DeploymentOptions, Version, version_name
from service.sandbox.layers import Sandbox
from service.serving.deployment import LOADS, ended, served_version
from service.serving.language.answer import RunningAnswer
from service.serving.language.client import WORKER, LanguageOrder, LanguageWorker, Receiver
from service.serving.language.messages import MAX_PROMPT_BYTES, Generate
from service.serving.language.stats import LanguageFigures, LanguageTally
from service.serving.memory_check import Cache
from service.serving.replica import Supervised
from service.serving.stats import Traffic
from service.storage.layout import Work

STEP_COMPILE_S = 120.0  # on a GPU, at most, for each size of a batch
STUCK_S = 120.0  # a worker that is silent for so long hangs: it speaks after each step


@dataclass(frozen=True)
class LanguageSpec:
    """The version to load, and the options for serving it."""

    version: Version
    engine: LanguageEngine
    options: DeploymentOptions
    devices: tuple[str, ...]
    load_s: float  # time-out for the worker to become ready
    fitting_tokens: int | None = None  # of the cache, at most, if no number was requested
    note: str = ""
    stuck_s: float = STUCK_S

    instances = all_instances = sessions = 1

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        assert self.version.language is not None
        return self.version.language.context

    @property
    def together(self) -> int:
        """Answers that are generated together."""
        wanted = self.options.max_batch or LANGUAGE_BATCH
        return min(wanted, self._room // self.context) if self._has_slots else wanted

    @property
    def cache_tokens(self) -> int:
        """Tokens for which there is a cache."""
        return self.together * self.context if self._has_slots else self._room

    @property
    def ready_s(self) -> float:
        """The time-out for the worker, with what it compiles while it loads."""
        if not (self._has_slots and self.engine.is_on_gpu):
            return self.load_s
        sizes = 1 + (self.together - 1).bit_length()  # 1, 2, 4 ... and all answers
        return self.load_s + sizes * STEP_COMPILE_S

    @property
    def _has_slots(self) -> bool:
        """True if each answer has a whole context of the cache to itself."""
        return self.engine.library == "torch"

    @property
    def _room(self) -> int:
        """Tokens that the cache may have, at least the context."""
        wanted = self.options.cache_tokens
        if wanted is None:
            wanted = (self.options.max_batch or LANGUAGE_BATCH) * self.context
            wanted = wanted if self.fitting_tokens is None else min(wanted, self.fitting_tokens)
        return max(self.context, wanted)

    @property
    def cache(self) -> Cache:
        """The cache when it is full."""
        assert self.version.language is not None
        token_bytes = self.version.language.cache_bytes_per_token
        if self._has_slots:
            return Cache("max_batch", self.together, self.context * token_bytes)
        return Cache("cache_tokens", self.cache_tokens, token_bytes, least=self.context)


class LanguageDeployment:
    """One loaded version. Belongs to one event loop."""

    def __init__(
        self,
        spec: LanguageSpec,
        work: Path,
        figures: LanguageFigures,
        command: Sequence[str],
        sandbox: Sandbox,
    ) -> None:
        self.spec, self._work = spec, work
        version, options = spec.version, spec.options
        assert version.language is not None
        self._settings = read_settings(spec.engine.root)
        self._vocabulary = version.language.vocabulary
        self._tally = LanguageTally(figures, version.model, version.version)
        self.traffic = Traffic()  # stays empty: there are no shapes
        self._answers: dict[RunningAnswer, None] = {}  # in the order in which they came
        self._draining = self._closed = False
        self._is_empty = asyncio.Event()
        device = spec.devices[0]
        order = LanguageOrder(
            name=f"{version.model}-{version.version}-{next(LOADS)}",
            engine_name=version_name(version.model, version.version),
            engine=spec.engine,
            context=spec.context,
            vocabulary=self._vocabulary,
            cache_tokens=spec.cache_tokens,
            together=spec.together,
            prefix_caching=options.prefix_caching,
            device=device,
            work=Work(work / "0"),
            load_s=spec.ready_s,
            stuck_s=spec.stuck_s,
            command=command,
            sandbox=sandbox,
        )
        self._instance = LanguageInstance(order, self._changed)

    @classmethod
    async def start(
        cls,
        spec: LanguageSpec,
        work: Path,
        figures: LanguageFigures,
        command: Sequence[str] = WORKER,
        sandbox: Sandbox | None = None,
    ) -> LanguageDeployment:
        """Load, with logs and temporary files below `work`.

        If the worker does not become ready, its error is raised and everything is cleaned up.
        """
        deployment = cls(spec, work, figures, command, sandbox or Sandbox(work))
        try:
            await deployment._instance.start()
        except BaseException:
            await deployment.close()
            raise
        answers, instance = deployment._answers, deployment._instance
        deployment._tally.show(
            lambda: sum(each.has_begun for each in tuple(answers)),
            lambda: sum(not each.has_begun for each in tuple(answers)),
            lambda: instance.cache_usage,
        )
        return deployment

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[RunningAnswer]:
        """Answer a request; see `Generating.generate`."""
        self._message(request)  # refuses what no worker needs to see
        self._admit()
        version, limit_s = self.spec.version, self.spec.options.answer_timeout_s
        if request.timeout_s is not None:
            limit_s = min(limit_s, request.timeout_s)
        answer = RunningAnswer(
            request, version.model, version.version, self._tally, self._answer_ended
        )
        self._answers[answer] = None
        timer = asyncio.get_running_loop().call_later(limit_s, self._time_out, answer, limit_s)
        try:
            self._send(answer)
            await answer.ready()
            yield answer
        finally:
            timer.cancel()
            answer.cancel()

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Refuse what is a request to a model with inputs and outputs."""
        raise not_for_tensors(self.model)

    def served(self) -> Served:
        """Describe the deployment to clients, as models with inputs are."""
        state, reason = self._state
        served = served_version(self.spec.version, self.spec.devices, state, reason)
        memory_bytes = self._instance.memory_bytes if self._instance.pid else 0
        devices = tuple(
            each.model_copy(update={"memory_bytes": memory_bytes}) for each in served.devices
        )
        return replace(served, devices=devices, max_batch=self.spec.together)

    def served_language(self) -> ServedLanguage:
        """Describe the deployment to clients of language models."""
        served, settings = self.served(), self._settings
        described = language_version(self.spec.version, served.devices, served.state, served.reason)
        return replace(
            described,
            chat_template=settings.chat_template,
            special_tokens=tuple(sorted(settings.special_tokens.items())),
        )

    def statistics(self) -> Statistics:
        """The statistics since the version was loaded."""
        return self._tally.statistics()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.spec.version.model

    @property
    def memory_bytes(self) -> int:
        """The memory that the worker held when it became ready, with its cache empty."""
        return self._instance.memory_bytes

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of the guardian of the worker."""
        return (self._instance.pid,) if self._instance.pid else ()

    async def drain(self) -> None:
        """Refuse new requests; return when all others are answered."""
        self._draining = True
        self._check_empty()
        await self._is_empty.wait()

    async def close(self) -> None:
        """End the worker and free its memory. It can be called again."""
        if self._closed:
            return
        self._closed = self._draining = True
        self._fail_all(ended(self.spec.version))
        await self._instance.close()
        self._tally.close()
        await asyncio.to_thread(shutil.rmtree, self._work, True)

    # -- requests ----------------------------------------------------------------

    @property
    def _state(self) -> tuple[ModelState, str]:
        """The state, and why it is not ready."""
        states: dict[str, ModelState] = {"ready": "ready", "starting": "loading"}
        state = "draining" if self._draining else states.get(self._instance.state, "failed")
        return state, "" if state == "ready" else self._instance.reason

    def _admit(self) -> None:
        """Unavailable unless the worker is ready, TooMany if the queue is full."""
        state, reason = self._state
        if state != "ready":
            raise self._not_ready(state, reason)
        limit, together = self.spec.options.queue_limit, self.spec.together
        if len(self._answers) >= together + limit:
            self._tally.ended("refused", 0.0, 0.0)
            seconds = self._tally.seconds_per_answer * limit / together
            raise TooMany(
                f"{limit} requests already wait for '{self.model}', its queue limit"
                " (`queue_limit`)",
                "send the request again later, or raise `queue_limit` of its deployment",
                max(1, math.ceil(seconds)),
            )

    def _not_ready(self, state: ModelState, reason: str) -> Unavailable:
        has_failed = state == "failed"
        return Unavailable(
            f"'{self.model}' is {state}{f': {reason}' if reason else ''}",
            "read the service's log, and deploy the model again"
            if has_failed
            else "send the request again",
            60 if has_failed else 1,
        )

    def _message(self, request: GenerateRequest) -> tuple[Generate, bytes]:
        """Return a request for the worker, and its prompt. Unprocessable if it cannot be sent."""
        is_text, sampling = isinstance(request.prompt, str), request.sampling
        try:
            "".join(sampling.stop).encode()
            if isinstance(request.prompt, str):
                prompt = request.prompt.encode()
            else:
                prompt = self._bytes_of(request.prompt)
        except UnicodeEncodeError as error:
            raise Unprocessable(
                "the prompt or a stop text has half of a surrogate pair, which is no character",
                "send valid Unicode",
            ) from error
        if len(prompt) > MAX_PROMPT_BYTES:
            raise Unprocessable(
                f"the prompt has {len(prompt)} bytes, expected at most {MAX_PROMPT_BYTES}",
                "send a shorter prompt",
            )
        message = Generate(
            number=0,
            is_text=is_text,
            sampling=sampling,
            special_tokens=request.special_tokens,
            log_probs=request.log_probs,
            echo=request.echo,
        )
        return message, prompt

    def _bytes_of(self, tokens: tuple[int, ...]) -> bytes:
        unknown = next((each for each in tokens if not 0 <= each < self._vocabulary), None)
        if unknown is not None:
            raise Unprocessable(
                f"the prompt has the token {unknown}, expected 0 to {self._vocabulary - 1}",
                "send tokens of this model, or text",
            )
        return array("i", tokens).tobytes()

    def _send(self, answer: RunningAnswer) -> None:
        message, prompt = self._message(answer.request)
        answer.number = self._instance.generate(message, prompt, answer)

    def _answer_ended(self, answer: RunningAnswer) -> None:
        """Free its place, whatever ended it."""
        if answer.number is not None:
            self._instance.cancel(answer.number)
        self._answers.pop(answer, None)
        self._check_empty()

    def _time_out(self, answer: RunningAnswer, limit_s: float) -> None:
        message = f"'{self.model}' did not finish its answer within {limit_s:g} s"
        error = TimedOut(message, "ask for fewer tokens, allow more time, or send fewer requests")
        answer.fail(error, "timed_out")

    def _fail_all(self, error: Unavailable) -> None:
        for answer in tuple(self._answers):
            answer.fail(error, "failed")

    def _changed(self) -> None:
        """React to a worker that became ready, was lost or was given up.

        Requests that had not begun go to the replacement of a lost worker.
        """
        if self._closed or self._instance.state == "starting":
            return
        if self._instance.state == "failed":
            self._fail_all(self._not_ready("failed", self._instance.reason))
            return
        for answer in tuple(self._answers):
            if answer.number is None:
                self._send(answer)

    def _check_empty(self) -> None:
        if self._draining and not self._answers:
            self._is_empty.set()


class LanguageInstance(Supervised[LanguageWorker]):
    """The worker of a language model, started again after a crash."""

    def __init__(self, order: LanguageOrder, changed: Callable[[], None]) -> None:
        start = partial(LanguageWorker.start, order)
        super().__init__(order.name, order.device, start, changed)

    @property
    def cache_usage(self) -> float:
        """Share of the cache that running answers use."""
        return self._worker.cache_usage if self._worker else 0.0

    def generate(self, message: Generate, prompt: bytes, into: Receiver) -> int | None:
        """Send a request; None while there is no worker."""
        if self._worker is None or self._worker.is_broken:
            return None
        return self._worker.generate(message, prompt, into)

    def cancel(self, number: int) -> None:
        """Forget a request."""
        if self._worker is not None:
            self._worker.cancel(number)


def not_for_tensors(model: str) -> Unprocessable:
    """The refusal of an inference of tensors."""
    return Unprocessable(
        f"'{model}' is a language model: it takes prompts, and has no inputs",
        "send POST /v1/completions or /v1/chat/completions",
    )


def language_version(
    version: Version, devices: tuple[ServedDevice, ...], state: ModelState, reason: str
) -> ServedLanguage:
    """Describe a version to clients of language models, without what only a loaded one knows."""
    assert version.language is not None
    return ServedLanguage(
        model=version.model,
        version=version.version,
        owner=version.owner,
        created_s=int(datetime.fromisoformat(version.created).timestamp()),
        label=version.label,
        context=version.language.context,
        vocabulary=version.language.vocabulary,
        devices=devices,
        state=state,
        reason=reason,
    )
