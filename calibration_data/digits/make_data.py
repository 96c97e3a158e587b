"""Split scikit-learn's handwritten digits into four disjoint sets, write them as .npz, and write
the manifest.

Run from the repository's root, after `make test` has installed scikit-learn:

    python calibration_data/digits/make_data.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import sklearn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

HERE = Path(__file__).parent
SIZES = {"calibration": 500, "selection": 300, "validation": 300}  # the rest trains
SEED = 0


def main() -> None:
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[
        :, None
    ]  # grey 0 to 16 -> [N, 1, 8, 8] in 0 to 1
    labels = digits.target.astype(np.int64)
    rest = np.arange(len(images))
    sets: dict[str, np.ndarray] = {}
    for name, size in SIZES.items():  # stratified: each digit as often as in the whole
        rest, taken = train_test_split(
            rest, test_size=size, stratify=labels[rest], random_state=SEED
        )
        sets[name] = np.sort(taken)
    sets["train"] = np.sort(rest)
    for name, indices in sets.items():
        np.savez_compressed(HERE / f"{name}.npz", image=images[indices], labels=labels[indices])
    manifest = {
        "source": (
            "Optical Recognition of Handwritten Digits, the 1,797 test images, as shipped with"
            " scikit-learn (sklearn.datasets.load_digits)"
        ),
        "origin": (
            "E. Alpaydin, C. Kaynak, UCI Machine Learning Repository,"
            " https://doi.org/10.24432/C50P49"
        ),
        "licence": "CC BY 4.0",
        "made": (
            f"make_data.py with scikit-learn {sklearn.__version__}: stratified split, seed {SEED};"
            " divided by 16; no image is in two sets"
        ),
        "inputs": {"image": "float32 [N, 1, 8, 8], 0 to 1", "labels": "int64 [N], the digit"},
        "files": {
            f"{name}.npz": {
                "samples": len(indices),
                "sha256": hashlib.sha256((HERE / f"{name}.npz").read_bytes()).hexdigest(),
            }
            for name, indices in sets.items()
        },
    }
    (HERE / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
