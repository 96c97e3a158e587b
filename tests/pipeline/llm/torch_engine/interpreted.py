"""Compare the fused step with the eager one on a CPU, in Triton's interpreter, and print the
largest difference of scores as JSON. `python -m tests.pipeline.llm.torch_engine.interpreted FOLDER`
reads a model in the form of Hugging Face. TRITON_INTERPRET must be 1 before Triton is imported.
"""

from __future__ import annotations

import json
import sys
from typing import get_args

import numpy as np
import torch
import transformers

from pipeline.llm.torch_engine import fused
from pipeline.llm.torch_engine.decoder import Decoder
from pipeline.llm.torch_engine.network import Network
from pipeline.llm.torch_engine.quantise import Form, quantised
from pipeline.llm.torch_engine.weights import network_of

PROMPT = np.arange(5, 70)
FOLLOWING = (20, 30)


def scores_of(network: Network, way: str) -> torch.Tensor:
    assert way in ("eager", "fused")
    batch = Decoder(network, 128, "eager" if way == "eager" else "fused").batch(1)
    batch.start([PROMPT])
    return torch.stack([batch.read_next([token]) for token in FOLLOWING])


def main(folder: str) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    network = network_of(module.eval())
    found = {}
    networks = {"fp32": (network, False)}
    for form in get_args(Form):
        narrow = quantised(network, form, 32)
        networks[f"{form} in words"] = narrow, True
        if not form.startswith("int4"):
            networks[form] = narrow, False
    for name, (each, in_words) in networks.items():
        fused.UNTUNED = fused.UNTUNED._replace(in_words=in_words)
        wanted, got = scores_of(each, "eager"), scores_of(each, "fused")
        found[name] = float((wanted - got).abs().max())
        answers = [Decoder(each, 128, "eager").generate_together([PROMPT], 2)]
        answers.append(Decoder(each, 128, "fused").generate_together([PROMPT], 2))
        (one,), (other,) = answers
        found[f"{name} tokens"] = bool((one.tokens == other.tokens).all())
        found[f"{name} log_probs"] = float(np.abs(one.log_probs - other.log_probs).max())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
