"""Train a CNN for handwritten digits, then train it further with fake quantisation. Writes
fp32.safetensors and int8.safetensors here.

Run it from the root of the checkout.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_model
from torch import nn

import pipeline

DIGITS = Path("calibration_data/digits")
HERE = Path(__file__).resolve().parent


class Digits(nn.Module):
    """Two convolutions, whose features are joined by the mean amount of ink in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.pool = nn.MaxPool2d(2)
        self.fc1, self.fc2 = nn.Linear(32 * 4 * 4 + 1, 32), nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(image)))
        x = torch.relu(self.bn2(self.conv2(x)))
        ink = 255 / 8 * image.flatten(1).sum(1, keepdim=True)  # far larger than the features
        x = torch.cat([self.pool(x).flatten(1), ink], 1)
        return self.fc2(torch.relu(self.fc1(x)))


def build() -> nn.Module:
    """Return the model with fake quantisers. Crucible calls this, and then loads the weights."""
    return pipeline.quantize_aware(Digits())


def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(DIGITS / f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["image"]), torch.from_numpy(arrays["labels"])


def train(model: nn.Module, epochs: int) -> None:
    images, labels = load("train")
    optimizer = torch.optim.Adam(model.train().parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()


def finish(model: nn.Module, name: str) -> None:
    save_model(model.eval(), str(HERE / f"{name}.safetensors"))
    images, labels = load("selection")
    with torch.inference_mode():
        right = (model(images).argmax(1) == labels).float().mean()
    print(f"{name}: {right:.3f} of {len(labels)} images are right")


def main() -> None:
    torch.manual_seed(0)
    model = Digits()
    train(model, 15)
    finish(model, "fp32")
    quantised = pipeline.quantize_aware(model)
    train(quantised, 15)
    finish(quantised, "int8")


if __name__ == "__main__":
    main()
