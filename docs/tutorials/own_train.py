"""Train the model of own_model.py for some seconds, and write what the plan names."""

from pathlib import Path

import numpy as np
import torch
from own_model import build
from safetensors.torch import save_file

OWN = Path(__file__).parent
DIRECTIONS = np.array([[1, 0], [0, 1], [1, 1], [1, -1]])  # of the stripes: x and y
SIZES = {"train": 600, "calibration": 500, "selection": 300, "validation": 300}


def images(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy stripes as float32 [count, 3, 32, 32], and their labels as int64 [count]."""
    labels = random.integers(0, 4, count)
    x, y = np.meshgrid(np.arange(32), np.arange(32))
    along = DIRECTIONS[labels] @ np.stack([x.ravel(), y.ravel()])  # [count, 1024]
    phase = random.uniform(0, 6, (count, 1))
    stripes = np.sin(0.8 * along + phase).reshape(count, 1, 32, 32)
    colours = random.uniform(0.3, 1, (count, 3, 1, 1))
    noise = random.normal(0, 0.5, (count, 3, 32, 32))
    return (stripes * colours + noise).astype(np.float32), labels


def main() -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    sets = {name: images(count, random) for name, count in SIZES.items()}

    model, (x, y) = build(), map(torch.from_numpy, sets.pop("train"))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(4):
        for rows in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    save_file(model.state_dict(), OWN / "weights.safetensors")

    for name, (x, y) in sets.items():
        np.savez(OWN / f"{name}.npz", image=x, labels=y)
        with torch.inference_mode():
            batches = torch.from_numpy(x).split(32)
            right = torch.cat([model(rows) for rows in batches]).argmax(1).numpy() == y
        print(f"{name}: {right.mean():.3f} of {len(y)} images are right")


if __name__ == "__main__":
    main()
