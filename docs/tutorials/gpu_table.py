"""Print the recorded results of configs/resnet50.yaml on a GPU, as the table of resnet-on-gpu.md.

python docs/tutorials/gpu_table.py
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tensorrt_resnet50.json"
HEADER = (
    "candidate | batch 1: ms, on the GPU | speed-up (95 %) | batch 8: ms, on the GPU"
    " | cosine | build, s | MB | really ran"
)


def main() -> None:
    recorded = json.loads(RESULTS.read_text())
    part = recorded["parts"]["choice"]
    target = part["target"]
    print(
        f"Recorded on {part['created'][:10]} with TensorRT {target['version']} on one"
        f" {target['device']}, driver {target['driver']}; not executed here.\n"
    )
    print(f"| {HEADER} |\n|{'---|' * len(HEADER.split(' | '))}")
    for row in recorded["rows"]:
        one, eight = row["latency"]
        cells = [row["candidate"], times(one), "", times(eight)]
        if row["state"] == "baseline":
            cells += [""] * 4
        else:
            cells[2] = f"{one['ratio']:.2f} ({one['ratio_low']:.2f} to {one['ratio_high']:.2f})"
            shares = [f"{name} {share:.0%}" for name, share in row["time_share"].items()]
            cells += [f"{row['cosine']:.5f}", f"{row['build_s']:.0f}"]
            cells += [f"{row['engine_bytes'] / 1e6:.0f}", ", ".join(shares)]
        print(f"| {' | '.join(cells)} |")
    print(f"\nVerdict: {part['verdict']}, winner: {part['winner']}; {'; '.join(part['reasons'])}.")


def times(latency: dict[str, float]) -> str:
    return f"{latency['end_to_end_ms']:.3f}, {latency['compute_ms']:.3f}"


if __name__ == "__main__":
    main()
