"""A CNN for handwritten digits trained with torch.ao's fake quantisers in a few seconds, and Q/DQ
graphs made by hand.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

EPOCHS = 4


def digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """1,797 images [n, 1, 8, 8], shuffled once, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order].reshape(-1, 1, 8, 8) / 16).astype(np.float32), labels[order].astype(
        np.int64
    )


def prepared() -> Any:
    """The CNN with fake quantisers that have not seen anything: what `trained` trains, and the
    entrypoint of a plan that has its weights.

    Activations symmetric int8 per tensor, weights per channel; a residual Add; the answer of the
    last layer is not quantised.
    """
    import torch
    from torch.ao import quantization as ao

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.add = (
                ao.QuantStub(),
                ao.DeQuantStub(),
                torch.ao.nn.quantized.FloatFunctional(),
            )
            self.conv1, self.bn1, self.relu1 = (
                torch.nn.Conv2d(1, 8, 3, padding=1),
                torch.nn.BatchNorm2d(8),
                torch.nn.ReLU(),
            )
            self.conv2, self.bn2, self.relu2 = (
                torch.nn.Conv2d(8, 8, 3, padding=1),
                torch.nn.BatchNorm2d(8),
                torch.nn.ReLU(),
            )
            self.pool, self.fc = torch.nn.MaxPool2d(2), torch.nn.Linear(8 * 4 * 4, 10)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            x = self.relu1(self.bn1(self.conv1(self.quant(image))))
            x = self.add.add(x, self.relu2(self.bn2(self.conv2(x))))
            return self.dequant(self.fc(self.pool(x).flatten(1)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is to leave torch one day
        activation = ao.FakeQuantize.with_args(
            observer=ao.MovingAverageMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_tensor_symmetric,
        )
        net = Net().train()
        net.qconfig = ao.QConfig(
            activation=activation, weight=ao.default_per_channel_weight_fake_quant
        )
        net.fc.qconfig = ao.QConfig(
            activation=torch.nn.Identity, weight=ao.default_per_channel_weight_fake_quant
        )
        ao.fuse_modules_qat(
            net, [["conv1", "bn1", "relu1"], ["conv2", "bn2", "relu2"]], inplace=True
        )
        ao.prepare_qat(net, inplace=True)
    return net


def trained(folder: Path) -> Path:
    """Train for a few seconds; returns the weights file."""
    import torch
    from safetensors.torch import save_model

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small, more only wait for each other
    net, (images, labels) = prepared(), digits()
    x, y = torch.from_numpy(images[:1000]), torch.from_numpy(labels[:1000])
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(1000).split(100):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    torch.set_num_threads(threads)
    save_model(net.eval(), str(folder / "qat.safetensors"))
    return folder / "qat.safetensors"


CONSTANTS = """float s = {0.02}, float t = {0.03},
  int8 z = {0}, uint8 u = {128}, uint8 u0 = {0}, float one = {0.004}, int8[4] wz = {0, 0, 0, 0},
 float[4] ws = {0.01, 0.02, 0.01, 0.02}, float[4, 4, 3, 3] w, float[4, 4, 3, 3] v, float[4, 5] f,
   float[4] b,
 int32[4] bi = {100, -200, 300, 0}, int32[4] bz = {0, 0, 0, 0},
   float[4] bs = {0.0002, 0.0004, 0.0002, 0.0004}"""

WEIGHTS = """[wq] wi = QuantizeLinear<axis = 0>(w, ws, wz)
  [wdq] wd = DequantizeLinear<axis = 0>(wi, ws, wz)
 [vq] vi = QuantizeLinear<axis = 0>(v, ws, wz)  [vdq] vd = DequantizeLinear<axis = 0>(vi, ws, wz)"""

INPUT = "[q] xq = QuantizeLinear(x, s, z)  [dq] xd = DequantizeLinear(xq, s, z)"


def quantised(body: str, output: str = "float[N, 4, 8, 8] y", constants: str = CONSTANTS) -> Any:
    """A graph of x [N, 4, 8, 8] with Q/DQ: s and t are scales of activations, wd and vd the
    quantised weights of two convolutions.
    """
    from tests.builders.convert import proto_from_text

    return proto_from_text(
        '<ir_version: 9, opset_import: ["" : 20]>\nnet (float[N, 4, 8, 8] x) =>'
        f" ({output})\n<{constants}>\n{{ {body} }}"
    )


SAME = "pads = [1, 1, 1, 1]"
PLAIN = f"{INPUT} {WEIGHTS} [conv] c = Conv<{SAME}>(xd, wd) [relu] y = Relu(c)"
"""A convolution as TensorRT likes it."""

NORMED = f"""{INPUT} {WEIGHTS} [conv] c = Conv<{SAME}>(xd, wd) [undo] d = Div(c, gain)
  [bias] e = Add(d, shift)
 [norm] n = BatchNormalization<epsilon = 0.0>(e, gamma, beta, mean, variance) [relu] y = Relu(n)"""
GAINS = """, float[1, 4, 1, 1] gain = {1.5, 2.0, 0.5, 4.0},
  float[1, 4, 1, 1] shift = {1.0, 2.0, 3.0, 4.0}, float[4] gamma = {3.0, 2.0, 1.0, 4.0},
 float[4] beta = {0.5, 0.25, 0.0, 1.0}, float[4] mean = {0.5, 1.0, 1.5, 2.0},
   float[4] variance = {4.0, 1.0, 4.0, 1.0}"""
"""What torch.ao's ConvBn leaves: the weights were multiplied with gamma / sqrt(variance), so the
result is divided by it, and normalised.
"""
