"""Ask the compiled engine, and compare its answers with the labels."""

from pathlib import Path

import numpy as np

import pipeline

samples = np.load(Path(__file__).with_name("validation.npz"))
with pipeline.open_engine("crucible-out/own_model") as engine:
    outputs = engine.run({"image": samples["image"][:32]})
right = outputs["logits"].argmax(1) == samples["labels"][:32]
print(f"{right.sum()} of 32 answers are right")
