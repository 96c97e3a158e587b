"""The parts of docs/benchmarks.md and the README that come from results/gpu_models.json. Without
that file they are empty.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.gpu.choice import choice_from_heading
from benchmarks.gpu.rows import SURGERY, Row, row_named, setting_of
from pipeline.benchmark.roofline import ITEM_BYTES
from pipeline.core import Precision, TensorRTOptions

FILE = "gpu_models.json"
STATES = {True: "reached", False: "**missed**", None: "**not measured**"}
NAMED = 3  # slowest layers
CURVE = "async_curve"
ENGINES = (
    "ours",
    "bare",
    "torch",
)  # first words of what is drawn; a loop on our own engine is the same bar again
FLEXIBILITY, AT = (
    "flexibility_",
    " at ",
)  # begins such a row's name; stands between engine and shape in its entries

RECORDED = "recorded with the row"
PACKAGES = ("torch", "onnxruntime", "nvidia-modelopt")
TIMINGS, EXPORTER = "tensorrt.timing_iterations=", "export.exporter="
USUAL_TIMINGS = TensorRTOptions().timing_iterations
DEFAULTS = (f"{TIMINGS}{USUAL_TIMINGS}", "simplify.plain_attention=true")
"""Overrides of results that say what is the default anyway."""

Entry = Mapping[str, Any]


def document(folder: Path = RESULTS) -> Mapping[str, Any]:
    """The results; empty where there are none."""
    file = folder / FILE
    found: Mapping[str, Any] = (
        json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    )
    return found


def models_section(found: Mapping[str, Any]) -> list[str]:
    """Every row with its engines, targets and what holds ours back, as lines."""
    if not found:
        return []
    lines = [
        f"## Compared with plain TensorRT and with PyTorch ({_devices(found)})",
        (
            "Each row is one model at one shape. All its engines ran in one interleaved run, each"
            " in processes of its own."
        ),
        "The command under a heading repeats the row; it takes the heading too, as it stands.",
        "",
        (
            "`ours` is Crucible's engine in Crucible's session. `bare` is the same graph, built and"
            " run by TensorRT's plain API"
        ),
        (
            "with the timing cache that ours left. `loop` is our engine file in a bare loop."
            " `torch` is PyTorch."
        ),
        "",
        (
            "End to end goes from numpy arrays to numpy arrays. GPU time is the median of CUDA"
            " events around the GPU's work alone,"
        ),
        (
            "with a CUDA graph. TFLOP/s and GB/s are those of the unfused graph over whole runs,"
            " with their share of the GPU's"
        ),
        "peak in that precision. A figure with ~ still moved between blocks.",
        "",
        (
            "`surgery` is the graph with plain attention, which is Crucible's default; of models"
            " with attention, ways without it"
        ),
        (
            "have `simplify.plain_attention: false`. `folded` is `surgery` with `simplify.surgery:"
            " pipeline.folding:fold_strides`."
        ),
        (
            "Weights are random: the cosine compares an answer with that of the first engine, and"
            " says nothing about accuracy."
        ),
        "",
        "### All rows beside PyTorch's best",
        "",
        *comparison_lines(found),
        "",
        *(
            f"![End-to-end and GPU time of every engine of {', '.join(rows)}]({picture})"
            for picture, rows in times_by_picture(found).items()
        ),
    ]
    at_once = rows_at_once(found)
    for name, row in found["rows"].items():
        if name != CURVE:  # docs/measurement.md has it
            made = next(
                (made for beginning, made in TABLES.items() if name.startswith(beginning)), _row
            )
            body = [f"**failed**: {_cell(row['failed'])}"] if "failed" in row else made(row)
            lines += [
                "",
                f"### `{name}`",
                "",
                *_command(name, row),
                *body,
                *_about(row, at_once.get(name, ())),
            ]
    return [*lines, ""]


def _command(name: str, row: Mapping[str, Any]) -> list[str]:
    """What is measured, and how again."""
    named = row_named(choice_from_heading(name).name)
    title = [f"{named.title}.", ""] if named else []
    return [*title, "```console", f"$ {row['command']}", "```", ""] if "command" in row else title


def rows_at_once(found: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Of each row the others that were measured during its time: where they share a host, they
    share its CPU.
    """
    spans = {name: _span(row) for name, row in found.get("rows", {}).items() if "seconds" in row}
    return {
        name: tuple(
            other
            for other, (first, last) in spans.items()
            if other != name and first < end and begin < last
        )
        for name, (begin, end) in spans.items()
    }


def _span(row: Mapping[str, Any]) -> tuple[dt.datetime, dt.datetime]:
    """When the row began and ended. Older results of a whole row are dated by their end, and all
    else by its beginning.
    """
    lasted, created = (
        dt.timedelta(seconds=row["seconds"]),
        dt.datetime.fromisoformat(row["created"]),
    )
    if "began" in row:
        created = dt.datetime.fromisoformat(row["began"])
    elif "measured_s" in row:
        created -= lasted
    return created, created + lasted


def times_by_picture(found: Mapping[str, Any]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Milliseconds end to end and of the GPU by the model's picture, row and engine, the fastest
    first; variants of flexibility as built.
    """
    models: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, row in found.get("rows", {}).items():
        entries = row.get("entries", {}) if name != CURVE and "inputs" in row else {}
        times = {
            engine: _both(entry)
            for engine, entry in entries.items()
            if "device_median_ms" in entry and engine.split()[0] in ENGINES
        }
        if times:
            models.setdefault(f"gpu_{name.partition('_')[0]}.svg", {})[name] = dict(
                sorted(times.items(), key=lambda item: item[1])
            )
    for name, row in found.get("rows", {}).items():
        for shape, engines in _by_shape(row).items() if name.startswith(FLEXIBILITY) else ():
            if len(engines) > 1:
                of = f"{name.removeprefix(FLEXIBILITY)}{AT}{shape}"
                models.setdefault("gpu_flexibility.svg", {})[of] = {
                    engine: _both(entry) for engine, entry in engines.items()
                }
    return models


def _both(entry: Entry) -> list[float]:
    return [entry["wall_median_ms"], entry["device_median_ms"]]


# -- beside PyTorch's best ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timed:
    """One engine of a row: medians in ms."""

    way: str
    wall_ms: float
    gpu_ms: float
    mode: str = ""  # of torch.compile

    def __str__(self) -> str:
        return f"{_ms(self.wall_ms)} / {_ms(self.gpu_ms)}"

    @property
    def named(self) -> str:
        way = self.way.removesuffix(SURGERY)  # it is the default
        return f"{self} ({', '.join(filter(None, (way, self.mode)))})"

    def pace_of(self, other: Timed) -> str:
        """How many times as fast the other is, end to end and on the GPU."""
        return f"{self.wall_ms / other.wall_ms:.2f} / {self.gpu_ms / other.gpu_ms:.2f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """PyTorch's fastest engine of a row and ours, all by their end-to-end time."""

    heading: str
    row: Row
    torch: Timed
    usual: tuple[Timed, ...]  # ours by default settings, the fastest first
    special: tuple[Timed, ...]  # ours by other settings, the fastest first
    overrides: tuple[str, ...]
    modes: tuple[str, ...]  # of torch.compile that were measured
    cores: int | None

    @property
    def fp16(self) -> Timed | None:
        return next((each for each in self.usual if each.way.startswith("fp16")), None)

    @property
    def gain(self) -> Timed | None:
        """Ours by other settings, if that is faster than by default ones."""
        best = next(iter(self.special), None)
        return best if best and best.wall_ms < self.usual[0].wall_ms else None


def fastest_section(found: Mapping[str, Any]) -> list[str]:
    """For the README: PyTorch's fastest engine of every row beside ours."""
    lines = comparison_lines(found)
    return [*lines, "", "[Every engine, command and note](docs/benchmarks.md)."] if lines else []


def comparison_lines(found: Mapping[str, Any]) -> list[str]:
    """A line for each model and shape, then what other settings bring, then what the figures are;
    nothing without such rows.
    """
    rows = comparisons(found)
    if not rows:
        return []
    head = [
        "model and shape",
        "PyTorch's best",
        "ours in fp16",
        "times as fast",
        "our fastest",
        "times as fast",
        "each kernel timed",
        "cores",
    ]
    lines = ["Median ms, end to end / on the GPU alone:", "", _line(head), "|" + "---|" * len(head)]
    for each in rows:
        half, best = each.fp16, each.usual[0]
        cells = [
            each.row.title,
            each.torch.named,
            str(half or "-"),
            each.torch.pace_of(half) if half else "-",
        ]
        lines.append(
            _line(
                [
                    *cells,
                    best.named,
                    each.torch.pace_of(best),
                    timings_text(each.overrides),
                    str(each.cores or "not recorded"),
                ]
            )
        )
    return [*lines, *_special_lines(rows), "", *_remarks(found, rows)]


def _special_lines(rows: Sequence[Comparison]) -> list[str]:
    """What is faster end to end by a setting that is not the default."""
    lines = [
        _line(
            [
                each.row.title,
                each.gain.named,
                each.torch.pace_of(each.gain),
                setting_of(each.gain.way, _ways(each)),
            ]
        )
        for each in rows
        if each.gain
    ]
    if not lines:
        return []
    head = ["model and shape", "ours", "times as fast as PyTorch's best", "the setting"]
    return [
        "",
        "Faster end to end with a setting that is not the default:",
        "",
        _line(head),
        "|" + "---|" * len(head),
        *lines,
    ]


def _ways(comparison: Comparison) -> list[str]:
    return [each.way for each in (*comparison.usual, *comparison.special)]


def _remarks(found: Mapping[str, Any], rows: Sequence[Comparison]) -> list[str]:
    """What a reader must know of the figures."""
    slow = [each.row.title for each in rows if each.torch.wall_ms < each.usual[0].wall_ms]
    tuned = sum("max-autotune" in each.modes for each in rows)
    others = rows_at_once(found)
    at_once = sum(bool(others.get(each.heading)) for each in rows)
    lines = [
        (
            "End to end goes from numpy arrays to numpy arrays, and decides which engine counts as"
            " the fastest; the second"
        ),
        (
            "figure is that engine's GPU time. PyTorch's best is the fastest of eager, traced, CUDA"
            " graph, flash attention and"
        ),
        (
            "torch.compile, as far as the row has them, in fp16 or fp32. torch.compile ran in"
            f" `max-autotune` in {tuned} of these"
        ),
        (
            "rows; in the others that mode was not tried, or did not end in time, and"
            " `reduce-overhead` stands in."
        ),
        (
            "`flash` takes no mask, so where a row has one it does less than ours. Ours are built"
            " by default settings, but for"
        ),
        (
            f"how often TensorRT times each kernel before it chooses ({USUAL_TIMINGS} times by"
            " default). Images have 224 x 224"
        ),
        "pixels. Weights are random, so what int8 costs in accuracy is not shown.",
    ]
    if slow:
        lines += [
            (
                f"End to end, ours are slower for {_listed(slow)}, although the GPU works for less"
                " time:"
            ),
            (
                "Crucible copies the inputs by one thread, which takes longer than PyTorch's copy"
                " where they are large."
            ),
        ]
    if at_once:
        lines += [
            (
                f"{at_once} of these rows ran while another row was measured on another GPU, mostly"
                " of the same host,"
            ),
            "which can lengthen end-to-end times of both sides.",
        ]
    return [*lines, f"{_common_place(found)}."]


def comparisons(found: Mapping[str, Any]) -> list[Comparison]:
    """One for each model and shape: of several rows the one that is nearest to the default
    settings.
    """
    best: dict[str, Comparison] = {}
    for heading, row in found.get("rows", {}).items():
        made = _comparison(heading, row)
        if made and (
            made.row.name not in best or len(made.overrides) < len(best[made.row.name].overrides)
        ):
            best[made.row.name] = made
    return list(best.values())


def _comparison(heading: str, row: Mapping[str, Any]) -> Comparison | None:
    """None where PyTorch was not measured in fp16, or where ours was not: fp32 beside fp16 would
    flatter us.
    """
    named, torch, ours = (
        row_named(choice_from_heading(heading).name),
        _timed(row, "torch "),
        _timed(row, "ours "),
    )
    ways = [each.way for each in ours]
    usual = tuple(each for each in ours if not setting_of(each.way, ways))
    if named is None or not usual or not any("fp16" in each.way for each in torch):
        return None
    special = tuple(each for each in ours if setting_of(each.way, ways))
    overrides = tuple(each for each in row.get("overrides", ()) if each not in DEFAULTS)
    modes = tuple(entry["mode"] for entry in row["entries"].values() if "mode" in entry)
    cores = (row.get("environment") or {}).get("cores")
    return Comparison(heading, named, torch[0], usual, special, overrides, modes, cores)


def _timed(row: Mapping[str, Any], prefix: str) -> list[Timed]:
    """The measured engines whose names begin so, the fastest end to end first."""
    entries = row.get("entries", {})
    measured = {
        name.removeprefix(prefix): entry
        for name, entry in entries.items()
        if name.startswith(prefix) and "wall_median_ms" in entry
    }
    timed = [
        Timed(way, entry["wall_median_ms"], entry["device_median_ms"], entry.get("mode", ""))
        for way, entry in measured.items()
    ]
    return sorted(timed, key=lambda each: each.wall_ms)


def timings_text(overrides: Iterable[str]) -> str:
    """How often TensorRT timed each kernel."""
    times = next((each.removeprefix(TIMINGS) for each in overrides if each.startswith(TIMINGS)), "")
    return f"{times or USUAL_TIMINGS} times"


def settings_text(overrides: Iterable[str]) -> list[str]:
    """What of a row's plan is not the default, in words."""
    told = []
    for each in overrides:
        if each.startswith(TIMINGS) and each not in DEFAULTS:
            told.append(
                f"each kernel timed {each.removeprefix(TIMINGS)} times, not {USUAL_TIMINGS} as by"
                " default"
            )
        elif each.startswith(EXPORTER):
            told.append(f"exported by `{each.removeprefix(EXPORTER)}`, which is not the default")
        elif each not in DEFAULTS:
            told.append(f"`{each}`")
    return told


# -- a row -------------------------------------------------------------------


def curve_section(found: Mapping[str, Any]) -> list[str]:
    """Time per call without synchronisation beside the truth, as lines; none where there are no
    results.
    """
    row = found.get("rows", {}).get(CURVE, {})
    if "entries" not in row:
        return []
    at, waits = row["entries"]["curve"], row["entries"]["per_call_ms_ending_with"]
    least = min(at, key=lambda each: each["unsynchronised_ms"])
    ended = ", ".join(
        f"{text} {value:.3f} ms" for text, value in waits.items() if text != "nothing"
    )
    return [
        (
            "![Time per call with and without synchronisation against the number of"
            " calls](launch_queue.svg)"
        ),
        "",
        (
            f"{row['model']}, {row['shape']}, PyTorch eager fp32 (`python -m benchmarks gpu_models"
            f" {CURVE}`). By CUDA events one call takes"
        ),
        (
            f"{row['events_ms']:.2f} ms; a clock around {least['calls']} calls without"
            f" synchronisation says {least['unsynchronised_ms']:.2f} ms."
        ),
        (
            f"What waiting by accident costs: 50 calls take {waits['nothing']:.3f} ms each, and"
            f" where every call ends with {ended}."
        ),
        "",
        f"{row['created'][:10]}; {place_of(row)}.",
    ]


def _row(row: Mapping[str, Any]) -> list[str]:
    entries: Mapping[str, Entry] = row["entries"]
    over = {
        ratio["over"]: ratio for ratio in row.get("ratios", ()) if ratio["under"].startswith("bare")
    }
    head = [
        "engine",
        "end to end ms",
        "GPU ms (p99)",
        "rows/s",
        "TFLOP/s",
        "GB/s",
        "GPU time over bare (95 %)",
    ]
    head += ["cosine", "build s", "time by precision"]
    lines = [_line(head), "|" + "---|" * len(head)]
    lines += [_line([name, *_figures(entry, over.get(name))]) for name, entry in entries.items()]
    lines += ["", *(_target(goal) for goal in row["targets"])]
    lines += [line for name, entry in entries.items() for line in _held_back(name, entry)]
    return lines


def _flow(row: Mapping[str, Any]) -> list[str]:
    """Runs of several sessions at once: time per run, which is no end-to-end time, for the GPU
    waits for none of them.
    """
    head = ["engine", "ms per run", "rows/s", "TFLOP/s", "GB/s", "build s", "time by precision"]
    lines = [_line(head), "|" + "---|" * len(head)]
    for name, entry in row["entries"].items():
        run_ms, _, per_s, flops, moved, _, _, built, ran = _figures(entry, None)
        lines.append(_line([name, run_ms, per_s, flops, moved, built, ran]))
    lines += ["", *(_target(goal) for goal in row["targets"])]
    return lines + [
        line for name, entry in row["entries"].items() for line in _held_back(name, entry)
    ]


def _flexible(row: Mapping[str, Any]) -> list[str]:
    """What a range of shapes, a level of optimisation, a workspace costs: beside the engine of this
    one shape where that was built too.
    """
    head = [
        "shape",
        "engine",
        "end to end ms",
        "GPU ms (p99)",
        "GPU time over fixed",
        "build s",
        "engine MB",
        "activations MB",
    ]
    lines, built = [_line(head), "|" + "---|" * len(head)], row["entries"]
    for shape, engines in _by_shape(row).items():
        fixed = next(
            (
                entry["device_median_ms"]
                for name, entry in engines.items()
                if name.startswith("fixed") and "," not in name
            ),
            None,
        )
        for name, entry in engines.items():
            times = [
                _ms(entry.get("wall_median_ms")),
                _device(entry),
                _number(entry["device_median_ms"] / fixed if fixed else None, ".3f"),
            ]
            sizes = [
                _number(size / 1e6 if size else None, ".1f")
                for size in (built[name].get("engine_bytes"), entry.get("activation_bytes"))
            ]
            lines.append(
                _line([shape, name, *times, _number(built[name].get("build_s"), ".1f"), *sizes])
            )
    failed = [
        f"- **failed**: {name}: {_cell(entry['failed'])}"
        for name, entry in built.items()
        if "failed" in entry
    ]
    return [*lines, *(["", *failed] if failed else [])]


TABLES = {FLEXIBILITY: _flexible, "resnet50_throughput": _flow, "overlap": _flow}
"""How rows are shown whose names begin so; others are one model at one shape."""


def _by_shape(row: Mapping[str, Any]) -> dict[str, dict[str, Entry]]:
    """The measured engines of a row of flexibility, by shape."""
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in row.get("entries", {}).items():
        engine, at, label = name.partition(AT)
        if at and "device_median_ms" in entry:
            shapes = dict.fromkeys(
                shape.replace(", ", "x") for shape in re.findall(r"\[([^\]]*)\]", label)
            )
            found.setdefault(" and ".join(shapes), {})[engine] = entry
    return found


def _figures(entry: Entry, ratio: Mapping[str, Any] | None) -> list[str]:
    if "failed" in entry:
        return [_cell(f"failed: {entry['failed']}"), *["-"] * 8]
    shares = ", ".join(
        f"{name} {share:.0%}"
        for name, share in ((entry.get("layers") or {}).get("time_share") or {}).items()
    )
    return [
        _ms(entry.get("wall_median_ms")),
        _device(entry) if "device_median_ms" in entry else "-",
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
    """FLOP/s and bytes/s of whole runs, with the share of the GPU's peak in the engine's precision
    where that is known.
    """
    bound = entry.get("bound") or {}
    width = ITEM_BYTES[Precision(bound["precision"])] / ITEM_BYTES[Precision.FP32] if bound else 0.0
    bytes_per_s = entry.get("bytes_per_s")
    rates = (
        (entry.get("flops_per_s"), 1e12, bound.get("share_of_peak_flops")),
        (
            bytes_per_s * width if bytes_per_s and bound else None,
            1e9,
            bound.get("share_of_peak_bytes"),
        ),
    )
    return [
        "-" if rate is None else f"{rate / unit:,.1f}" + (f" ({share:.0%})" if share else "")
        for rate, unit, share in rates
    ]


def _target(goal: Mapping[str, Any]) -> str:
    value = (
        "-"
        if goal["value"] is None
        else f"{goal['value']:,.3f}"
        if goal["value"] < 1000
        else f"{goal['value']:,.0f}"
    )
    return (
        f"- {STATES[goal['reached']]}: {goal['text']}: {value}, {goal['direction']}"
        f" {goal['limit']:,.4g}"
    )


def _held_back(name: str, entry: Entry) -> list[str]:
    """One line per engine of ours: attention, what only moves data, the slowest layers; and what
    PyTorch's attention ran.
    """
    bound = entry.get("bound") or {}
    lines = (
        [f"- `{name}` is bound by {bound['kind']}: {_cell(bound['why'])}"]
        if name.startswith("ours") and bound
        else []
    )
    if layers := entry.get("layers"):
        slowest = ", ".join(
            f"{layer['nodes']} {layer['precision']} {layer['share']:.0%}"
            for layer in layers["slowest"][:NAMED]
        )
        fused = [text for text in layers["fusions"] if text.startswith("attention")]
        messages = [
            *fused,
            (
                f"{layers['moving_layers']} of {layers['count']} layers only move data"
                f" ({layers['moving_share']:.0%} of the time)"
            ),
        ]
        wrong = [f"**{layers['mislabelled']}**"] if layers["mislabelled"] else []
        lines.append(f"- `{name}`: {'; '.join([*wrong, *messages])}; slowest: {_cell(slowest)}")
    if entry.get("sdpa_operators"):
        lines.append(
            f"- `{name}`: attention by `{', '.join(entry['sdpa_operators'])}`, kernels:"
            f" {_cell(', '.join(entry['attention_kernels']))}"
        )
    if "recompilations" in entry:
        before = (
            f" ({_cell(entry['mode_before'])} in max-autotune)" if "mode_before" in entry else ""
        )
        lines.append(
            f"- `{name}`: {entry['mode']}{before}, {entry['compile_s']:.0f} s,"
            f" {entry['recompilations']} recompilations"
        )
    return lines


def _about(row: Mapping[str, Any], at_once: Sequence[str]) -> Iterable[str]:
    """Settings, when and where it ran, the GPU's state, and beside what."""
    gpu = row.get("gpu") or {}
    states = [f"{name.replace('_', ' ')} {values['median']:g}" for name, values in gpu.items()]
    note = ["", f"**Note**: {row['note']}"] if row.get("note") else []
    messages = [
        *settings_text(row.get("overrides") or ()),
        *states,
        f"{row['seconds']:.0f} s" if "seconds" in row else "",
    ]
    beside = (
        [f"at the same time as {_listed([f'`{name}`' for name in at_once])}"] if at_once else []
    )
    return [
        *note,
        "",
        f"{'; '.join(filter(None, [row['created'][:10], *messages, *beside]))}. {place_of(row)}.",
    ]


def place_of(row: Mapping[str, Any]) -> str:
    """GPU, driver, library, CPU and packages of one row, as far as they were recorded."""
    host = row.get("environment") or {}
    cores = f"{host['cores']} cores" if host.get("cores") else "cores not recorded"
    if "cpu" not in host:
        return f"{_gpu_text(row)}; {cores}, CPU and packages not recorded"
    source = row.get("environment_source", RECORDED)
    how = "" if source == RECORDED else f" ({source})"
    return f"{_gpu_text(row)}; {host['cpu']}, {cores}, {_software_text(host)}{how}"


def _gpu_text(row: Mapping[str, Any]) -> str:
    target = row["target"]
    return f"{target['device']}, driver {target['driver']}, TensorRT {target['version']}"


def _software_text(host: Mapping[str, Any]) -> str:
    packages = [f"{name} {host['packages'][name]}" for name in PACKAGES if name in host["packages"]]
    return ", ".join([f"Python {host['python']}", *packages])


def _common_place(found: Mapping[str, Any]) -> str:
    """The environments of all rows without their cores, which stand in the table."""
    rows = [row for row in found["rows"].values() if "cpu" in (row.get("environment") or {})]
    places = (
        f"{_gpu_text(row)}; {row['environment']['cpu']}, {_software_text(row['environment'])}"
        for row in rows
    )
    return " or ".join(dict.fromkeys(places))


def _devices(found: Mapping[str, Any]) -> str:
    names = dict.fromkeys(
        str(row["target"]["device"]).removeprefix("NVIDIA ") for row in found["rows"].values()
    )
    return " and ".join(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
