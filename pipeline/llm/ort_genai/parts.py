"""Where the time between two tokens goes in ONNX Runtime GenAI.

Times are those of answers without profiling. How operators share them is measured in a second pass,
with the profile that ONNX Runtime writes when its session ends.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UnsupportedError
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.ort_genai.opened import OpenModel
from pipeline.llm.reference import Ids
from pipeline.llm.scoring import log_softmax
from pipeline.llm.speed.roofline import StepParts, operator_shares
from pipeline.measurement.clock import monotonic

PROFILED_TOKENS = 8


def step_parts(engine: LanguageEngine, threads: int, prompt: Ids, tokens: int) -> StepParts:
    """Measure the parts for one request. UnsupportedError if the library writes no profile."""
    model = OpenModel(engine, threads)
    _answer(model, prompt, 2)
    reads, choices = _answer(model, prompt, tokens)
    del model
    with tempfile.TemporaryDirectory(prefix="crucible-profile-") as folder:
        model = OpenModel(engine, threads, profile=Path(folder) / "profile")
        profiled, _ = _answer(model, prompt, PROFILED_TOKENS)
        del model
        gc.collect()  # the session ends, and writes its profile
        files = sorted(Path(folder).glob("*.json"))
        events = json.loads(files[0].read_text(encoding="utf-8")) if files else []
    operator_s = operators_of(events, PROFILED_TOKENS - 1)
    if not operator_s:
        raise UnsupportedError(
            "ONNX Runtime GenAI wrote no profile of its operators", "use a newer release"
        )
    read_s, sampling_s = statistics.median(reads), statistics.median(choices)
    in_operators = sum(operator_s.values()) / sum(profiled)
    operators_s = read_s * min(1.0, in_operators)
    shares = operator_shares(operator_s)
    return StepParts(
        products_s=operators_s * shares["products"],
        attention_s=operators_s * shares["attention"],
        other_operators_s=operators_s * shares["other"],
        sampling_s=sampling_s,
        scheduling_s=read_s - operators_s,
    )


def _answer(model: OpenModel, prompt: Ids, tokens: int) -> tuple[list[float], list[float]]:
    """Answer greedily. Return the times of reading each token after the prompt, and of choosing
    the next one, in seconds.
    """
    text = model.text(prompt.size + tokens)
    token = _chosen(text.read(prompt))
    reads, choices = list[float](), list[float]()
    for _ in range(tokens - 1):
        begin = monotonic()
        logits = text.read(np.array([token]))
        middle = monotonic()
        token = _chosen(logits)
        reads.append(middle - begin)
        choices.append(monotonic() - middle)
    return reads, choices


def _chosen(logits: Any) -> int:
    """Choose as `Served` does, with the log-probability."""
    token = int(logits.argmax())
    log_softmax(logits)[token]
    return token


def operators_of(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Return the time of each type of operator in the last `steps` runs of a profile, in
    seconds.
    """
    runs = [event for event in events if event.get("name") == "model_run"]
    if len(runs) < steps:
        return {}
    begin = sorted(int(run["ts"]) for run in runs)[-steps]
    found = defaultdict[str, float](float)
    for event in events:
        is_kernel = event.get("cat") == "Node" and str(event.get("name")).endswith("_kernel_time")
        if is_kernel and int(event["ts"]) >= begin:
            found[str(event["args"]["op_name"])] += int(event["dur"]) / 1e6
    return found
