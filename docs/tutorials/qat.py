"""Train a CNN for handwritten digits with fake quantisation, and write qat.safetensors here.

Run it from the root of the checkout.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_model
from torch import nn
from torch.ao import quantization as ao

DIGITS = Path("calibration_data/digits")


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.conv1, self.bn1, self.relu1 = (
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.conv2, self.bn2, self.relu2 = (
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(32 * 4 * 4, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.relu1(self.bn1(self.conv1(self.quant(image))))
        x = self.relu2(self.bn2(self.conv2(x)))
        return self.dequant(self.fc(self.pool(x).flatten(1)))


def build() -> nn.Module:
    """Return the model with fake quantisers. Crucible calls this, and then loads the weights.

    Activations are int8 per tensor, symmetric; weights int8 per channel; the answer stays in fp32.
    """
    activation = ao.FakeQuantize.with_args(
        observer=ao.MovingAverageMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
    )
    weight = ao.default_per_channel_weight_fake_quant
    model = Digits().train()
    model.qconfig = ao.QConfig(activation=activation, weight=weight)
    model.fc.qconfig = ao.QConfig(activation=nn.Identity, weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao will leave torch
        ao.fuse_modules_qat(
            model, [["conv1", "bn1", "relu1"], ["conv2", "bn2", "relu2"]], inplace=True
        )
        ao.prepare_qat(model, inplace=True)
    return model


def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(DIGITS / f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["image"]), torch.from_numpy(arrays["labels"])


def main() -> None:
    torch.manual_seed(0)
    model, (images, labels) = build(), load("train")
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(20):
        for rows in torch.randperm(len(images)).split(50):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    save_model(model.eval(), str(Path(__file__).with_name("qat.safetensors")))
    images, labels = load("selection")
    with torch.inference_mode():
        right = (model(images).argmax(1) == labels).float().mean()
    print(f"selection: {right:.3f} of {len(labels)} images are right")


if __name__ == "__main__":
    main()
