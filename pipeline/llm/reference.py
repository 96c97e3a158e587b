"""What the model in fp32 says of the user's texts: the reference of the gate.

Of each token it keeps the log-probability of the real successor, and those of the likeliest
successors. All others are one class: with 256 of them kept, that lowers a divergence by little, and
saves 99 % of the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.artifacts import Artifact
from pipeline.core.progress import Progress, silent
from pipeline.llm.hf import load_model, load_tokenizer, token_ids, use_cores
from pipeline.llm.plan import GREEDY_PROMPT_TOKENS, GREEDY_TOKENS, Device
from pipeline.llm.source import Source
from pipeline.llm.texts import Documents

FILE = "reference.npz"
LIKELIEST = 256
GREEDY_PROMPTS = 4

RESERVE = 1.5
"""Free memory of a GPU, in times of the weights, from which the model runs there: scores of a text
and what the kernels need come on top of the weights.
"""

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class Reference(Artifact):
    """The reference of one set of texts."""

    name: str
    device: Device  # on which it was computed
    documents: int
    tokens: int  # that have a predecessor
    perplexity: float


@dataclass(frozen=True, slots=True)
class ReferenceDocument:
    """One text of n tokens; [n - 1] values belong to the tokens after the first."""

    ids: Ids  # [n]
    log_probs: Floats  # [n - 1], of the real successors
    likeliest: Ids  # [n - 1, k]
    likeliest_log_probs: Floats  # [n - 1, k], highest first


@dataclass(frozen=True, slots=True)
class Greedy:
    """A prompt and the greedy answer of the reference."""

    prompt: Ids
    answer: Ids


def refer(
    source: Source,
    documents: Documents,
    max_tokens: int,
    device: Device,
    out: Path,
    progress: Progress = silent,
) -> Reference:
    """Run the model in fp32 on each text. A GPU whose memory is too small for it leaves it to the
    CPU.
    """
    import torch

    progress(None, "loading the model in fp32")
    use_cores()
    tokenizer, model = load_tokenizer(source), load_model(source)
    place = _placed(model, device)
    rows: list[ReferenceDocument] = []
    with torch.inference_mode():
        for number, text in enumerate(documents.texts):
            progress(number / len(documents), f"text {number + 1} of {len(documents)}")
            ids = token_ids(tokenizer, text, max_tokens)
            logits = model(torch.tensor([ids], device=place)).logits[0, :-1].float()
            rows.append(_document(np.asarray(ids), torch.log_softmax(logits, -1)))
        answers = list[Greedy]()
        for number, row in enumerate(rows[:GREEDY_PROMPTS], 1):
            progress(None, f"greedy answer {number} of {min(len(rows), GREEDY_PROMPTS)}")
            answers.append(_greedy(model, row.ids))
    _write(out / FILE, rows, answers)
    total = sum(row.log_probs.size for row in rows)
    nll = -sum(float(row.log_probs.sum(dtype=np.float64)) for row in rows)
    return Reference(
        root=out,
        file=FILE,
        name=documents.name,
        device="gpu" if place == "cuda" else "cpu",
        documents=len(rows),
        tokens=total,
        perplexity=float(np.exp(nll / total)),
    )


def _placed(model: Any, device: Device) -> str:
    """Move a model to the device, if it fits there; return what torch calls its device."""
    import torch

    if device == "cpu":
        return "cpu"
    torch.set_float32_matmul_precision("highest")  # the reference is in fp32, not in TF32
    torch.backends.cudnn.allow_tf32 = False
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    free, _ = torch.cuda.mem_get_info()
    if free < RESERVE * weights:
        return "cpu"
    model.to("cuda")
    return "cuda"


def _document(ids: Ids, log_probs: Any) -> ReferenceDocument:
    """`log_probs`: a tensor [n - 1, vocabulary]."""
    best = log_probs.topk(min(LIKELIEST, log_probs.shape[-1]), -1)
    own = log_probs.cpu().numpy()[np.arange(ids.size - 1), ids[1:]]
    return ReferenceDocument(ids, own, best.indices.cpu().numpy(), best.values.cpu().numpy())


def _greedy(model: Any, ids: Ids) -> Greedy:
    import torch

    prompt = ids[:GREEDY_PROMPT_TOKENS]
    # not `generate`, which applies the generation_config.json of the model's folder
    given, cache, answer = torch.tensor(prompt, device=model.device)[None], None, list[int]()
    for _ in range(GREEDY_TOKENS):
        out = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        given, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        answer.append(int(given))
    return Greedy(prompt, np.asarray(answer))


def _write(file: Path, rows: list[ReferenceDocument], answers: list[Greedy]) -> None:
    arrays = dict[str, NDArray[Any]]()
    for number, row in enumerate(rows):
        arrays[f"ids_{number}"] = row.ids.astype(np.int32)
        arrays[f"log_probs_{number}"] = row.log_probs
        arrays[f"likeliest_{number}"] = row.likeliest.astype(np.int32)
        arrays[f"likeliest_log_probs_{number}"] = row.likeliest_log_probs
    for number, greedy in enumerate(answers):
        arrays[f"prompt_{number}"] = greedy.prompt.astype(np.int32)
        arrays[f"answer_{number}"] = greedy.answer.astype(np.int32)
    np.savez(file, allow_pickle=False, **arrays)


def documents_of(reference: Reference) -> Iterator[ReferenceDocument]:
    """Yield the texts of a reference."""
    with np.load(reference.path) as stored:
        for number in range(reference.documents):
            yield ReferenceDocument(
                stored[f"ids_{number}"].astype(np.int64),
                stored[f"log_probs_{number}"],
                stored[f"likeliest_{number}"].astype(np.int64),
                stored[f"likeliest_log_probs_{number}"],
            )


def greedy_of(reference: Reference) -> list[Greedy]:
    """Return the greedy answers of a reference."""
    with np.load(reference.path) as stored:
        count = sum(name.startswith("prompt_") for name in stored.files)
        return [
            Greedy(stored[f"prompt_{n}"].astype(np.int64), stored[f"answer_{n}"].astype(np.int64))
            for n in range(count)
        ]
