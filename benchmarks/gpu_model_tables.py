"""The part of docs/benchmarks.md that comes from results/gpu_models.json: a table per row of gpu_models.py. Without that file it is empty."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common import RESULTS

from pipeline.core import Precision
from pipeline.roofline import ITEM_BYTES

FILE = "gpu_models.json"
STATES = {True: "reached", False: "**missed**", None: "**not measured**"}
NAMED = 3  # slowest layers
CURVE = "async_curve"
ENGINES = ("ours", "bare", "torch")  # first words of what is drawn; a loop on our own engine is the same bar again
FLEXIBILITY, AT = "flexibility_", " at "  # begins such a row's name; stands between engine and shape in its entries

Entry = Mapping[str, Any]


def document(folder: Path = RESULTS) -> Mapping[str, Any]:
    """The results; empty where there are none."""
    file = folder / FILE
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def models_section(found: Mapping[str, Any]) -> list[str]:
    """Every row with its engines, targets and what holds ours back, as lines."""
    if not found:
        return []
    gpu = found["target"]["device"].removeprefix("NVIDIA ")
    lines = [
        f"## Against TensorRT used barely and against PyTorch, on one {gpu}",
        "`python benchmarks/gpu_models.py ROW` repeats a row; all engines of a row come from one interleaved run, each in processes of its own.",
        "`ours` is Crucible's engine in Crucible's session, `bare` the same graph built and run by TensorRT's plain API, with the timing cache that",
        "ours left, `loop` our engine file in a bare loop. GPU time is the median of CUDA events with a CUDA graph, wall time goes from binding",
        "numpy arrays to fetching them. TFLOP/s and GB/s are those of the unfused graph over whole runs, with their share of the GPU's peak in",
        "that precision. `surgery` is the graph with plain attention, as Crucible writes it unless told otherwise; others are as they were exported.",
        "Weights are random, so answers are compared with the first engine by their cosine and say nothing about accuracy.",
    ]
    lines += ["", *(f"![GPU time of every engine of {', '.join(rows)}]({picture})" for picture, rows in times_by_picture(found).items())]
    for name, row in found["rows"].items():
        if name != CURVE:  # docs/measurement.md has it
            lines += ["", f"### `{name}`", ""]
            made = _flexible if name.startswith(FLEXIBILITY) else _row
            lines += [f"**failed**: {_cell(row['failed'])}"] if "failed" in row else made(row)
    return [*lines, "", _host(found), ""]


def times_by_picture(found: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of the GPU by the model's picture, row and engine, the fastest first, but variants of flexibility as they were built."""
    models: dict[str, dict[str, dict[str, float]]] = {}
    for name, row in found.get("rows", {}).items():
        entries = row.get("entries", {}) if name != CURVE and "inputs" in row else {}
        times = {
            engine: entry["device_median_ms"] for engine, entry in entries.items() if "device_median_ms" in entry and engine.split()[0] in ENGINES
        }
        if times:
            models.setdefault(f"gpu_{name.partition('_')[0]}.svg", {})[name] = dict(sorted(times.items(), key=lambda item: item[1]))
    for name, row in found.get("rows", {}).items():
        for shape, engines in _by_shape(row).items() if name.startswith(FLEXIBILITY) else ():
            if len(engines) > 1:
                of = f"{name.removeprefix(FLEXIBILITY)}{AT}{shape}"
                models.setdefault("gpu_flexibility.svg", {})[of] = {engine: entry["device_median_ms"] for engine, entry in engines.items()}
    return models


def fastest_section(found: Mapping[str, Any]) -> list[str]:
    """For the README: of every row the fastest of PyTorch's and of ours in fp16, and of ours at all, by GPU time; a star where there is a note.

    PyTorch's eager runs are left out, and rows with no other: the GPU waits for Python there.
    """
    lines = []
    for name, row in found.get("rows", {}).items():
        entries = {name: entry for name, entry in row.get("entries", {}).items() if not name.startswith("torch eager")}
        torch, like, ours = (_fastest(entries, *words) for words in (("torch ", " fp16"), ("ours ", "", "fp16"), ("ours ", "")))
        if torch and like and ours:
            cells = [cell for each in (like, ours) for cell in (f"{_ms(each[1])} ({each[0]})", f"{torch[1] / each[1]:.2f}")]
            lines.append(_line([f"`{name}`{' *' if row.get('note') else ''}", f"{_ms(torch[1])} ({torch[0]})", *cells]))
    if not lines:
        return []
    head = ["row", "PyTorch's fastest in fp16", "ours in fp16", "times as fast", "our fastest", "times as fast"]
    said = [
        "GPU ms, each row from one interleaved run with CUDA graphs; [all engines, targets and notes](docs/benchmarks.md). Weights are random, so",
        f"what int8 costs in accuracy is not shown. `surgery`: with plain attention, as by default. Rows with * have a note there. {_host(found)}",
    ]
    return [_line(head), "|" + "---|" * len(head), *lines, "", *said]


def _fastest(entries: Mapping[str, Any], prefix: str, ending: str, beginning: str = "") -> tuple[str, float] | None:
    named = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix + beginning) and name.endswith(ending)}
    known = [(name, float(entry["device_median_ms"])) for name, entry in named.items() if "device_median_ms" in entry]
    return min(known, key=lambda each: each[1], default=None)


def curve_section(found: Mapping[str, Any]) -> list[str]:
    """Time per call without synchronisation beside the truth, as lines; none where there are no results."""
    row = found.get("rows", {}).get(CURVE, {})
    if "entries" not in row:
        return []
    at, waits = row["entries"]["curve"], row["entries"]["per_call_ms_ending_with"]
    least = min(at, key=lambda each: each["unsynchronised_ms"])
    ended = ", ".join(f"{text} {value:.3f} ms" for text, value in waits.items() if text != "nothing")
    return [
        "![Time per call with and without synchronisation against the number of calls](launch_queue.svg)",
        "",
        f"{row['model']}, {row['shape']}, PyTorch eager fp32 (`python benchmarks/gpu_models.py {CURVE}`). By CUDA events one call takes",
        f"{row['events_ms']:.2f} ms; a clock around {least['calls']} calls without synchronisation says {least['unsynchronised_ms']:.2f} ms.",
        f"What waiting by accident costs: 50 calls take {waits['nothing']:.3f} ms each, and where every call ends with {ended}.",
        "",
        _host(found),
    ]


def _row(row: Mapping[str, Any]) -> list[str]:
    entries: Mapping[str, Entry] = row["entries"]
    over = {ratio["over"]: ratio for ratio in row.get("ratios", ()) if ratio["under"].startswith("bare")}
    head = ["engine", "GPU ms (p99)", "wall ms", "rows/s", "TFLOP/s", "GB/s", "over bare (95 %)", "cosine", "build s", "time by precision"]
    lines = [_line(head), "|" + "---|" * len(head)]
    lines += [_line([name, *_figures(entry, over.get(name))]) for name, entry in entries.items()]
    lines += ["", *(_target(goal) for goal in row["targets"])]
    lines += [line for name, entry in entries.items() for line in _held_back(name, entry)]
    return [*lines, *_about(row)]


def _flexible(row: Mapping[str, Any]) -> list[str]:
    """What a range of shapes, a level of optimisation, a workspace costs: beside the engine of this one shape where that was built too."""
    head = ["shape", "engine", "GPU ms (p99)", "over fixed", "wall ms", "build s", "engine MB", "activations MB"]
    lines, built = [_line(head), "|" + "---|" * len(head)], row["entries"]
    for shape, engines in _by_shape(row).items():
        fixed = next((entry["device_median_ms"] for name, entry in engines.items() if name.startswith("fixed") and "," not in name), None)
        for name, entry in engines.items():
            times = [_device(entry), _number(entry["device_median_ms"] / fixed if fixed else None, ".3f"), _ms(entry.get("wall_median_ms"))]
            sizes = [_number(size / 1e6 if size else None, ".1f") for size in (built[name].get("engine_bytes"), entry.get("activation_bytes"))]
            lines.append(_line([shape, name, *times, _number(built[name].get("build_s"), ".1f"), *sizes]))
    failed = [f"- **failed**: {name}: {_cell(entry['failed'])}" for name, entry in built.items() if "failed" in entry]
    return [*lines, *(["", *failed] if failed else []), *_about(row)]


def _by_shape(row: Mapping[str, Any]) -> dict[str, dict[str, Entry]]:
    """The measured engines of a row of flexibility, by shape."""
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in row.get("entries", {}).items():
        engine, at, label = name.partition(AT)
        if at and "device_median_ms" in entry:
            shapes = dict.fromkeys(shape.replace(", ", "x") for shape in re.findall(r"\[([^\]]*)\]", label))
            found.setdefault(" and ".join(shapes), {})[engine] = entry
    return found


def _figures(entry: Entry, ratio: Mapping[str, Any] | None) -> list[str]:
    if "failed" in entry:
        return [_cell(f"failed: {entry['failed']}"), *["-"] * 8]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in ((entry.get("layers") or {}).get("time_share") or {}).items())
    return [
        _device(entry) if "device_median_ms" in entry else "-",
        _ms(entry.get("wall_median_ms")),
        _number(entry.get("throughput_per_s"), ",.0f"),
        *_rates(entry),
        "{:.3f} ({:.3f} to {:.3f})".format(*ratio["device"]) if ratio and ratio["device"] else "-",
        _number(entry.get("cosine"), ".4f"),
        _number(entry.get("build_s", entry.get("compile_s")), ".1f"),
        shares or entry.get("mode") or "-",
    ]


def _device(entry: Entry) -> str:
    p99 = f" ({_ms(entry['device_p99_ms'])})" if entry.get("device_p99_ms") else ""
    return f"{_ms(entry['device_median_ms'])}{p99}{'' if entry['stable'] else ' ~'}"


def _rates(entry: Entry) -> list[str]:
    """FLOP/s and bytes/s of whole runs, with the share of the GPU's peak in the engine's precision where that is known."""
    bound = entry.get("bound") or {}
    width = ITEM_BYTES[Precision(bound["precision"])] / ITEM_BYTES[Precision.FP32] if bound else 0.0
    bytes_per_s = entry.get("bytes_per_s")
    rates = (
        (entry.get("flops_per_s"), 1e12, bound.get("share_of_peak_flops")),
        (bytes_per_s * width if bytes_per_s and bound else None, 1e9, bound.get("share_of_peak_bytes")),
    )
    return ["-" if rate is None else f"{rate / unit:,.1f}" + (f" ({share:.0%})" if share else "") for rate, unit, share in rates]


def _target(goal: Mapping[str, Any]) -> str:
    value = "-" if goal["value"] is None else f"{goal['value']:,.3f}" if goal["value"] < 1000 else f"{goal['value']:,.0f}"
    return f"- {STATES[goal['reached']]}: {goal['text']}: {value}, {goal['direction']} {goal['limit']:,.4g}"


def _held_back(name: str, entry: Entry) -> list[str]:
    """One line per engine of ours: attention, what only moves data, the slowest layers; and what PyTorch's attention ran."""
    bound = entry.get("bound") or {}
    lines = [f"- `{name}` is bound by {bound['kind']}: {_cell(bound['why'])}"] if name.startswith("ours") and bound else []
    if layers := entry.get("layers"):
        slowest = ", ".join(f"{layer['nodes']} {layer['precision']} {layer['share']:.0%}" for layer in layers["slowest"][:NAMED])
        fused = [text for text in layers["fusions"] if text.startswith("attention")]
        said = [*fused, f"{layers['moving_layers']} of {layers['count']} layers only move data ({layers['moving_share']:.0%} of the time)"]
        wrong = [f"**{layers['mislabelled']}**"] if layers["mislabelled"] else []
        lines.append(f"- `{name}`: {'; '.join([*wrong, *said])}; slowest: {_cell(slowest)}")
    if entry.get("sdpa_operators"):
        lines.append(f"- `{name}`: attention by `{', '.join(entry['sdpa_operators'])}`, kernels: {_cell(', '.join(entry['attention_kernels']))}")
    if "recompilations" in entry:
        before = f" ({_cell(entry['mode_before'])} in max-autotune)" if "mode_before" in entry else ""
        lines.append(f"- `{name}`: {entry['mode']}{before}, {entry['compile_s']:.0f} s, {entry['recompilations']} recompilations")
    return lines


def _about(row: Mapping[str, Any]) -> Iterable[str]:
    gpu = row.get("gpu") or {}
    states = [f"{name.replace('_', ' ')} {values['median']:g}" for name, values in gpu.items()]
    changed = [f"overrides: {', '.join(row['overrides'])}"] if row.get("overrides") else []
    cores = [f"{row['cores']} cores"] if "cores" in row else []
    said = [row["created"][:10], *changed, *cores, *states]
    note = ["", f"**Note**: {row['note']}"] if row.get("note") else []
    return [*note, "", f"{'; '.join(said)}; {row['seconds']:.0f} s."]


def _host(found: Mapping[str, Any]) -> str:
    host, target = found["environment"], found["target"]
    packages = ", ".join(f"{name} {host['packages'][name]}" for name in ("torch", "onnxruntime", "nvidia-modelopt") if name in host["packages"])
    place = f"{target['device']}, driver {target['driver']}, TensorRT {target['version']}"
    return f"{place}; {host['cpu']}, Python {host['python']}, {packages}."


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
