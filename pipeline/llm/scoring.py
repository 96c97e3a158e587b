"""How right an engine is on the user's texts.

Each text is scored twice. `Served` gives the log-probabilities of all its tokens as it serves, read
at once. The graph below it, opened with the same properties, gives whole distributions; it reads
the last tokens of a text one by one, through the cache in its format. The served pipeline then
writes greedy answers, whose log-probabilities must be those that the graph gives.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.errors import InternalError, UnsupportedError
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.export import last_line
from pipeline.llm.libraries.registry import library_of
from pipeline.llm.reference import (
    Ids,
    Reference,
    ReferenceDocument,
    documents_of,
    greedy_of,
)
from pipeline.llm.served import Generation, Room
from pipeline.llm.ways import WayScore

FACTS = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")

NEGLIGIBLE = 1e-6
"""Probability that the rounding of fp32 leaves over."""

Logs = NDArray[np.float64]


class DocumentScore(Frozen):
    """Sums over the tokens of one text. A loss is the negative log-probability, in nats."""

    tokens: int
    reference_loss: float
    loss: float  # read at once, as served
    cached_tokens: int  # the last ones
    cached_reference_loss: float
    cached_loss: float  # read one by one
    divergence: float  # Kullback-Leibler, from the reference
    agreeing: int  # tokens whose likeliest successor is that of the reference


class GreedyScore(Frozen):
    """One greedy answer beside that of the reference."""

    tokens: int
    equal: int  # before the first difference


class Scores(Frozen):
    """An engine on one set of texts."""

    documents: tuple[DocumentScore, ...]
    greedy: tuple[GreedyScore, ...]
    # of the log-probabilities of greedy tokens: as served, against the graph that is scored
    path_difference: float  # mean of the absolute differences, nats
    largest_path_difference: float
    facts: dict[str, str]  # what the library reports that it runs, which changes answers
    ways: tuple[WayScore, ...] = ()  # greedy answers served otherwise than alone


def score(
    engine: LanguageEngine,
    reference: Reference,
    cached_tokens: int,
    room: Room,
    progress: Progress = silent,
) -> Scores:
    """Score an engine on the texts of a reference."""
    progress(None, "opening the engine")
    if engine.recipe is None:
        raise InternalError("the baseline is the reference: it has no scores")
    library = library_of(engine.recipe.library)
    served = library.open_served(engine, room)
    graph = library.open_graph(engine, room, served)
    scores = []
    for number, document in enumerate(documents_of(reference)):
        progress(number / reference.documents, f"text {number + 1} of {reference.documents}")
        log_probs = served.log_probs(document.ids)
        logits = graph.log_probs(document.ids[:-1], cached_tokens)
        scores.append(score_document(document, log_probs, logits, cached_tokens))
    progress(None, "greedy answers")
    greedy, differences, alone = list[GreedyScore](), list[Logs](), list[Generation]()
    references = greedy_of(reference)
    for wanted in references:
        answer = served.generate(wanted.prompt, wanted.answer.size)
        alone.append(answer)
        differing = np.flatnonzero(answer.tokens != wanted.answer)
        equal = int(differing[0]) if differing.size else wanted.answer.size
        greedy.append(GreedyScore(tokens=wanted.answer.size, equal=equal))
        whole = np.concatenate([wanted.prompt, answer.tokens])
        logits = graph.log_probs(whole[:-1], answer.tokens.size)
        own = logits[np.arange(whole.size - 1), whole[1:]][-answer.tokens.size :]
        differences.append(np.abs(own - answer.log_probs))
    all_differences = np.concatenate(differences)
    progress(None, "answers in a batch, in chunks and from the cache")
    prompts = [wanted.prompt for wanted in references]
    return Scores(
        documents=tuple(scores),
        greedy=tuple(greedy),
        path_difference=float(all_differences.mean()),
        largest_path_difference=float(all_differences.max()),
        facts=graph.facts,
        ways=library.compare_ways(engine, room, served, prompts, alone),
    )


def score_document(
    document: ReferenceDocument, served: Logs, graph: Logs, cached_tokens: int
) -> DocumentScore:
    """Score one text. `served` [n - 1]: of the real successors. `graph` [n - 1, vocabulary]."""
    rows = np.arange(document.ids.size - 1)
    own = graph[rows, document.ids[1:]]
    divergences = divergence(document.likeliest_log_probs, graph[rows[:, None], document.likeliest])
    return DocumentScore(
        tokens=rows.size,
        reference_loss=-float(document.log_probs.sum(dtype=np.float64)),
        loss=-float(served.sum()),
        cached_tokens=cached_tokens,
        cached_reference_loss=-float(document.log_probs[-cached_tokens:].sum(dtype=np.float64)),
        cached_loss=-float(own[-cached_tokens:].sum()),
        divergence=float(divergences.sum()),
        agreeing=int((graph.argmax(-1) == document.likeliest[:, 0]).sum()),
    )


def divergence(wanted: NDArray[Any], got: NDArray[Any]) -> Logs:
    """Return the Kullback-Leibler divergence of each row, [rows], in nats.

    Both hold log-probabilities of the same tokens, [rows, k]. The rest of each row is one class.
    """
    wanted, got = wanted.astype(np.float64), got.astype(np.float64)
    kept = (np.exp(wanted) * (wanted - got)).sum(-1)
    rest = np.clip(1 - np.exp(wanted).sum(-1), NEGLIGIBLE, 1)
    got_rest = np.clip(1 - np.exp(got).sum(-1), NEGLIGIBLE, 1)
    other = np.where(rest > NEGLIGIBLE, rest * np.log(rest / got_rest), 0.0)
    summed: Logs = np.maximum(kept + other, 0.0)
    return summed


class Graph:
    """The graph of an engine, without GenAI, with the properties that serve.

    With `profile`, it sums the time of each type of operator over tokens that are read alone.
    """

    def __init__(self, engine: LanguageEngine, threads: int = 0, profile: bool = False) -> None:
        import openvino as ov

        properties = engine.properties(threads) | ({"PERF_COUNT": "YES"} if profile else {})
        try:
            compiled = ov.Core().compile_model(engine.path, "CPU", properties)
        except RuntimeError as error:
            raise UnsupportedError(
                f"OpenVINO cannot open {engine.label}: {last_line(error)}", "leave it out"
            ) from error
        self._request = compiled.create_infer_request()
        self._profile, self.operator_s = profile, Counter[str]()
        self.facts = {name: _text(compiled.get_property(name)) for name in FACTS}

    def log_probs(self, ids: Ids, one_by_one: int) -> Logs:
        """Return the log-probabilities of all successors, [n, vocabulary]. The last `one_by_one`
        tokens are read one by one, as they are generated.
        """
        self._request.reset_state()
        first = ids.size - one_by_one
        parts = [self._read(ids[:first], 0)]
        parts += [self._read(ids[at : at + 1], at) for at in range(first, ids.size)]
        return log_softmax(np.concatenate(parts))

    def _read(self, ids: Ids, position: int) -> NDArray[np.float32]:
        total = position + ids.size
        out = self._request.infer(
            {
                "input_ids": ids[None],
                "attention_mask": np.ones((1, total), dtype=np.int64),
                "position_ids": np.arange(position, total)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        if self._profile and ids.size == 1:
            for operator in self._request.profiling_info:
                self.operator_s[operator.node_type] += operator.real_time.total_seconds()
        return np.array(next(iter(out.values()))[0], dtype=np.float32)


def log_softmax(logits: NDArray[np.float32]) -> Logs:
    """Return the logarithm of the softmax over the last axis, in double precision."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _text(value: Any) -> str:
    return value.get_type_name() if hasattr(value, "get_type_name") else str(value)
