"""A model without a batch axis in front: torch.nn.LSTM, time-major, its states as inputs and
outputs.
"""

import torch

FEATURES, HIDDEN, LAYERS, CLASSES = 6, 16, 2, 5


class Tagger(torch.nn.Module):
    """x [time, batch, 6], h0 and c0 [2, batch, 16] -> logits [time, batch, 5], h and c as h0."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(FEATURES, HIDDEN, num_layers=LAYERS)
        self.head = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(
        self, x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, (h, c) = self.lstm(x, (h0, c0))
        return self.head(y), h, c


def build() -> Tagger:
    """Random weights, large enough for answers that differ."""
    torch.manual_seed(0)
    tagger = Tagger().eval()
    with torch.no_grad():
        for weight in tagger.parameters():
            weight.mul_(3)
    return tagger  # type: ignore[no-any-return]
