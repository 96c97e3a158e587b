"""Train the CNN of model.py on train.npz and write digits_cnn.safetensors: about a minute on two
cores.

Run from the repository's root:  python calibration_data/digits/train.py
Only train.npz is learnt from. The accuracy on the other sets is printed once, at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from digits.model import build  # noqa: E402  (found only with the line above)

EPOCHS = 40
BATCH = 32


def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(HERE / f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["image"]), torch.from_numpy(arrays["labels"])


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Move the batch by up to one pixel in each direction: the only augmentation."""
    down, right = torch.randint(0, 3, (2,)).tolist()
    return torch.nn.functional.pad(images, (1, 1, 1, 1))[:, :, down : down + 8, right : right + 8]


def main() -> None:
    torch.manual_seed(0)
    images, labels = load("train")
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    steps = EPOCHS * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(BATCH):
            loss = torch.nn.functional.cross_entropy(
                model(shifted(images[rows])), labels[rows], label_smoothing=0.05
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1:2}  loss of the last batch {loss.item():.4f}")
    model.eval()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, HERE / "digits_cnn.safetensors")
    for name in ("calibration", "selection", "validation"):
        images, labels = load(name)
        with torch.inference_mode():
            print(
                f"{name}: top-1 {(model(images).argmax(1) == labels).float().mean().item():.4f} of"
                f" {len(labels)}"
            )


if __name__ == "__main__":
    main()
