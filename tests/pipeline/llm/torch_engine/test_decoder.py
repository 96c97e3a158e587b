"""Our decoder beside transformers, on small random models in fp32."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers

from pipeline.errors import InternalError, UnsupportedError
from pipeline.llm.torch_engine.decoder import Batch, Decoder, recorded, recording_stream
from pipeline.llm.torch_engine.quantise import Form, quantised
from pipeline.llm.torch_engine.weights import network_of
from tests.pipeline.llm.models import write_model

KINDS = ("llama", "mistral", "qwen2", "qwen3")
PROMPTS = [np.arange(5, 25), np.arange(40, 110)]
TOKENS = 20


def module_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(module: Any, prompt: Any) -> Any:
    out = module.generate(
        torch.tensor(prompt)[None], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    return out[0, prompt.size :].numpy()


def scores_at_once(module: Any, ids: Any) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = module(torch.tensor(ids)[None]).logits[0].float()
    return scores


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_prompts_of_several_lengths_are_those_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    module = module_of(write_model(tmp_path, kind))
    wanted = [greedy(module, prompt) for prompt in PROMPTS]
    decoder = Decoder(network_of(module), 128, "eager")
    answers = decoder.generate_together(PROMPTS, TOKENS)
    for prompt, tokens, answer in zip(PROMPTS, wanted, answers, strict=True):
        assert answer.tokens.tolist() == tokens.tolist()
        assert len(answer.times_s) == TOKENS
        assert list(answer.times_s) == sorted(answer.times_s)
        whole = np.concatenate([prompt, tokens])
        logs = scores_at_once(module, whole[:-1]).log_softmax(-1)[-TOKENS:]
        own = logs[torch.arange(TOKENS), torch.tensor(tokens)]
        assert answer.log_probs == pytest.approx(own.double().numpy(), abs=1e-4)
    again = decoder.generate_together(PROMPTS, TOKENS)
    assert again[0].tokens.tolist() == answers[0].tokens.tolist(), "old keys must not be seen"


def test_the_joined_weights_are_those_of_the_module(tmp_path: Path) -> None:
    module = module_of(write_model(tmp_path))
    before = scores_at_once(module, PROMPTS[1])
    network = network_of(module)
    assert torch.equal(scores_at_once(module, PROMPTS[1]), before)
    joined = network.layers[0].qkv.weight
    assert module.model.layers[0].self_attn.q_proj.weight.data_ptr() == joined.data_ptr()
    read = sum(each.numel() for each in module.parameters() if each.dim() > 1)
    assert network.weight_bytes == 4 * (read - module.model.embed_tokens.weight.numel())


def test_tokens_that_are_given_are_read_through_the_cache(tmp_path: Path) -> None:
    module = module_of(write_model(tmp_path, "qwen3"))
    prompt, following = PROMPTS[0], [7, 300, 12]
    batch = Decoder(network_of(module), 64, "eager").batch(1)
    batch.start([prompt])
    found = [batch.scores[0], *(batch.read_next([token])[0] for token in following)]
    wanted = scores_at_once(module, np.concatenate([prompt, following]))[prompt.size - 1 :]
    assert torch.allclose(torch.stack(found[1:]), wanted[1:], atol=1e-4)


def test_int8_is_near_and_reads_about_a_quarter(tmp_path: Path) -> None:
    network = network_of(module_of(write_model(tmp_path, "qwen2")))
    small = quantised(network, "int8")
    assert 0.25 < small.weight_bytes / network.weight_bytes < 0.30
    matrix, of = small.layers[1].down, network.layers[1].down.weight
    assert matrix.scale is not None
    error = (matrix.weight * matrix.scale[:, None] - of).abs()
    assert bool((error <= 0.51 * matrix.scale[:, None]).all())
    assert matrix.weight.abs().amax(1).eq(127).all()
    (exact,) = Decoder(network, 64, "eager").generate_together(PROMPTS[:1], 2)
    (near,) = Decoder(small, 64, "eager").generate_together(PROMPTS[:1], 2)
    assert near.log_probs[0] == pytest.approx(exact.log_probs[0], abs=0.1)
    assert near.log_probs[0] != exact.log_probs[0]


def test_a_row_of_zeros_stays_zero_in_int8(tmp_path: Path) -> None:
    module = module_of(write_model(tmp_path))
    module.lm_head.weight.data[3] = 0
    matrix = quantised(network_of(module), "int8").logits
    assert matrix.scale is not None
    assert not matrix.weight[3].any()
    assert bool(torch.isfinite(matrix.scale).all())


@pytest.mark.slow
def test_the_compiled_step_gives_the_same_answers(tmp_path: Path) -> None:
    network = network_of(module_of(write_model(tmp_path)))
    wanted = Decoder(network, 128, "eager").generate_together(PROMPTS, TOKENS)
    got = Decoder(network, 128, "compiled").generate_together(PROMPTS, TOKENS)
    for one, other in zip(wanted, got, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])  # with biases; with norms of heads
def test_the_fused_kernels_give_the_same_scores(kind: str, tmp_path: Path) -> None:
    # 160 is no multiple of the rows and columns that a program takes
    write_model(tmp_path, kind, intermediate_size=160)
    found = interpreted("interpreted", str(tmp_path))
    in_words = [f"{form} in words" for form in get_args(Form)]
    for name in ("fp32", "int8", "fp8", *in_words):
        assert found.pop(f"{name} tokens"), name
    assert max(found.values()) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_products_of_few_rows_are_those_of_torch() -> None:
    found = interpreted("interpreted_products")
    assert len(found) == 10
    assert max(found.values()) < 1e-5


def interpreted(module: str, *words: str) -> dict[str, Any]:
    """Run a module of this folder in Triton's interpreter. Return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.pipeline.llm.torch_engine.{module}", *words],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    module = module_of(write_model(tmp_path))
    network = network_of(module)
    with pytest.raises(InternalError, match="room for 64"):
        Decoder(network, 64, "eager").generate_together(PROMPTS[:1], 60)
    module.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(UnsupportedError, match="dynamic"):
        network_of(module)
    module.config.model_type = "gpt2"
    with pytest.raises(UnsupportedError, match="got gpt2"):
        network_of(module)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_fused_kernels_refuse_several_requests(tmp_path: Path) -> None:
    network = network_of(module_of(write_model(tmp_path)))
    with pytest.raises(UnsupportedError, match="one request at a time, not 2"):
        Batch(network, 2, 64, "fused")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """A double of torch.cuda."""
    double = MagicMock()
    monkeypatch.setattr(torch, "cuda", double)
    recording_stream.cache_clear()
    yield double
    recording_stream.cache_clear()


def test_a_recording_keeps_the_work_whose_buffers_it_uses(cuda: MagicMock) -> None:
    """Without it, scratch of a fused step became the scales of an int8 network, and was written."""
    work = MagicMock()
    dying = weakref.WeakSet([work])
    replay = cuda.CUDAGraph().replay
    again = recorded(work, torch.device("cuda"))
    assert work.call_count == 3  # twice to warm up
    del work
    gc.collect()
    again()
    (kept,) = dying
    assert kept.call_count == 3
    replay.assert_called_once_with()


def test_works_are_warmed_up_where_they_are_recorded(cuda: MagicMock) -> None:
    """On other streams cuBLAS made a workspace for each work, and one more for the recording."""
    for _ in range(2):
        recorded(MagicMock(), torch.device("cuda"), "pool")
    (stream,) = {cuda.Stream()}
    cuda.graph.assert_called_with(cuda.CUDAGraph(), pool="pool", stream=stream)
    cuda.stream.assert_called_with(stream)
    assert cuda.Stream.call_count == 2, "once here, and once for both works"
