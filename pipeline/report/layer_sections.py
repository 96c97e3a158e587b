"""The section about what really ran: the time per precision, and every layer with its roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.artifacts import KeptNode
from pipeline.core.recipe import Precision
from pipeline.formatting import bytes_text, flops_text, shape_text, time_text
from pipeline.host.gpu import Peaks
from pipeline.report.entries import Entry, entries, winner_row
from pipeline.report.layer_errors import (
    LAYER_ERRORS_TITLE,
    error_text,
    is_kept,
    ranked_rescues,
)
from pipeline.report.tables import Section, Table, left, right
from pipeline.results.candidates import Candidate
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.results.layer_work import LayerWork, Unknown, work_of_layers
from pipeline.results.precision_audit import (
    SILENT,
    forced_share,
    fusions,
    node_text,
    percent_text,
    reformats,
    time_by_precision,
)
from pipeline.results.report import Report
from pipeline.results.time_shares import (
    OperatorClass,
    Overhead,
    overhead,
    scaled,
    time_by_class,
)

MAX_LAYERS = 15  # of one engine in Markdown
MAX_NODE_NAMES = 4  # of one layer
GAPS_NAMED = 3  # layers with the most time above their roofline


@dataclass(frozen=True, slots=True)
class EngineLayers:
    """The layers of one engine in one profile: those with a time first, from slow to fast."""

    key: str  # of its table in HTML
    entry: Entry
    table: LayerTable
    layers: tuple[Layer, ...]
    works: tuple[LayerWork, ...]  # of each layer
    errors: Mapping[str, float]  # own errors of the nodes that are low, as far as they are known
    peaks: Peaks | None  # of the device on which it ran, if they are known
    overhead: Overhead | None  # None: it was not measured at the sizes of its layers

    @property
    def label(self) -> str:
        profile = self.table.profile
        return f"{self.entry.label}, profile {profile + 1}" if profile else self.entry.label

    @property
    def has_work(self) -> bool:
        """True if the FLOPs or bytes of a layer are known."""
        return any(work.moved_bytes is not None for work in self.works)

    def error_of(self, layer: Layer) -> float | None:
        """Return the largest own error of the nodes of a layer; None if it is not known."""
        return max((self.errors[node] for node in layer.nodes if node in self.errors), default=None)


def layers_of_engines(report: Report) -> tuple[EngineLayers, ...]:
    """Return the layers of every engine and profile that has them, in the order of `entries`."""
    found: list[EngineLayers] = []
    for entry in entries(report):
        candidate = entry.candidate
        if candidate is None or candidate.layers is None:
            continue
        errors = _own_errors(report, candidate)
        peaks = _peaks_of(report, candidate)
        rows_of_engine = candidate.benchmark.rows if candidate.benchmark else ()
        for timed in (candidate.layers, *candidate.other_layers):
            around = overhead(timed, rows_of_engine)
            table = scaled(timed, around.factor) if around else timed
            works = work_of_layers(report.graph, report.graph_sizes, table, candidate.recipe, peaks)
            rows = sorted(zip(table.layers, works, strict=True), key=lambda row: _slowness(row[0]))
            key = f"layers-{len(found) + 1}"
            found.append(
                EngineLayers(
                    key,
                    entry,
                    table,
                    tuple(layer for layer, _ in rows),
                    tuple(work for _, work in rows),
                    errors,
                    peaks,
                    around,
                )
            )
    return tuple(found)


def _slowness(layer: Layer) -> float:
    """Sort the slowest layer first, and those without a time last."""
    return 1.0 if layer.seconds is None else -layer.seconds


def _peaks_of(report: Report, candidate: Candidate) -> Peaks | None:
    """Return the peaks of the device on which a candidate ran; None if they are not known."""
    if candidate.engine is None:
        return None
    device = candidate.engine.target.device
    # The peaks of a CPU name the number of threads, too.
    return next((each for each in report.peaks if f"{each.device},".startswith(f"{device},")), None)


def _own_errors(report: Report, candidate: Candidate) -> dict[str, float]:
    """Return the own error of each node that a rescue of this candidate has ranked.

    Nodes that the candidate keeps in fp32 are left out: their errors are those of low precision.
    """
    kept = {node.node for node in candidate.kept_fp32}
    for rescue, ranking in ranked_rescues(report):
        if candidate.label in (rescue.label, *(step.label for step in rescue.steps)):
            return {
                harm.node: harm.error
                for harm in ranking.nodes
                if harm.node not in kept and not is_kept(harm, candidate.recipe.keep_fp32)
            }
    return {}


def layer_section(report: Report) -> Section:
    """Return the precisions that really ran, and every layer, for engines with evidence of them.

    Markdown has the slowest layers of the winner and of mislabelled engines only.
    """
    engines = layers_of_engines(report)
    fused = tuple(
        (str(engine.entry.number), engine.label, "; ".join(texts))
        for engine in engines
        if (texts := fusions(engine.table))
    )
    tables = (
        _precision_table(engines),
        _class_table(engines),
        Table(left("#", "engine", "fusions"), fused),
        *(_layer_table(engine) for engine in engines),
    )
    return Section("layers", "What really ran", _paragraphs(report, engines), tables=tables)


def _paragraphs(report: Report, engines: Sequence[EngineLayers]) -> tuple[str, ...]:
    if not engines and not report.graph:
        return ()
    text = [
        f"Share of the time per precision at {sizes}, each layer timed by itself. The precision of"
        " a layer follows from its kernel's name (tactic), or else from the types that it reads and"
        " writes. Reformats are all layers that only move or convert data."
        for sizes in dict.fromkeys(shape_text(engine.table.sizes) for engine in engines)
    ]
    if any(engine.overhead for engine in engines):
        text.append(
            "Wall, compute and kernels of the table by class of operator: the median end to end,"
            " that of the device (on a CPU: of the call), and the sum of all layers. The host's"
            " part is wall without compute, the gaps are compute without kernels. If timing made"
            ' the layers slower than the whole, their times are multiplied by "layers times".'
        )
    with_layers = {engine.entry.number for engine in engines}
    without = [
        entry.label
        for entry in entries(report)
        if entry.benchmark and entry.number not in with_layers
    ]
    if without:
        text.append(f"Layers were not timed for {', '.join(without)}.")
    if engines:
        text += _roofline_paragraphs(report, engines)
    if engines and any(engine.errors for engine in engines):
        text.append(
            "The own error of a layer is the largest of its nodes, as under"
            f' "{LAYER_ERRORS_TITLE}". "-" means not measured.'
        )
    elif engines:
        text.append(
            "Own errors of layers were not measured: only candidates that fail their accuracy have"
            " them."
        )
    return tuple(text)


def _roofline_paragraphs(report: Report, engines: Sequence[EngineLayers]) -> list[str]:
    """Return what the columns of the roofline mean, what the winner could gain, and what is
    missing.
    """
    if report.graph_sizes is None:
        reason = "its graph is without the work of its nodes" if report.graph else "it has no graph"
        return [f"FLOPs, bytes and rooflines of layers are not in this report: {reason}."]
    text = [
        "FLOPs and bytes of a layer are those of its nodes. What fused nodes pass to each other"
        ' does not count as moved. "Of roofline" is the share of the measured time that the layer'
        " needs at the device's peak of arithmetic, or of the level of memory that holds its"
        " bytes, whichever takes longer. Weights are held where all weights of the engine fit."
        ' "Limit" is that peak, or why the share is not known. A share above 100 % is an error of'
        " this model: the kernel saves multiplications, data stayed in caches whose speed is not"
        " known, or the peaks were measured on a busy host."
    ]
    text += [
        gaps for engine in engines if engine.entry.state == "winner" if (gaps := _gaps(engine))
    ]
    without = [
        engine for engine in engines if any(work.unknown is Unknown.PEAKS for work in engine.works)
    ]
    if without:
        labels = ", ".join(dict.fromkeys(engine.label for engine in without))
        of = "this device" if len(without) == len(engines) else f"the device of {labels}"
        text.append(
            f"The peaks of {of} are not known, and so neither are shares of the roofline."
            " The next compile on a quiet host measures those of a CPU; so does `crucible doctor"
            " --measure`."
        )
    return text


def _gaps(engine: EngineLayers) -> str:
    """Return how far an engine is from its roofline, and where the most time is above it."""
    known = [
        (layer, work.least_s, layer.seconds)
        for layer, work in zip(engine.layers, engine.works, strict=True)
        if work.least_s is not None and layer.seconds is not None and not work.is_above_peak
    ]
    if not known:
        return ""
    total_s = sum(seconds for _, _, seconds in known)
    least_s = sum(least_s for _, least_s, _ in known)
    by_gap = sorted(known, key=lambda each: each[1] - each[2])
    gaps = [
        f"{layer.name} ({time_text(seconds - least_s)})"
        for layer, least_s, seconds in by_gap[:GAPS_NAMED]
        if seconds > least_s
    ]
    text = (
        f"The layers of {engine.label} whose roofline is known take {time_text(total_s)}; at their"
        f" rooflines they would take {time_text(least_s)}."
    )
    if above := sum(work.is_above_peak for work in engine.works):
        layers = "1 layer is" if above == 1 else f"{above} layers are"
        text += f" {layers} left out: a share above 100 % is an error of the model."
    return f"{text} Furthest above it: {', '.join(gaps)}." if gaps else text


def _precision_table(engines: Sequence[EngineLayers]) -> Table:
    """Return the share of the time per precision, and of nodes left in fp32 if there are any."""
    times = [time_by_precision(engine.table) for engine in engines]
    names = [name for name in (*Precision, "integer") if any(name in time for time in times)]
    has_kept_nodes = any(_kept_nodes(engine) for engine in engines)
    columns = (
        *left("#", "engine"),
        *right(*names),
        *right("reformats", "not known", "layers", "of them reformats"),
    )
    if has_kept_nodes:
        columns += right("nodes left in fp32")
    rows: list[tuple[str, ...]] = []
    for engine in engines:
        row = (str(engine.entry.number), engine.label, *_share_cells(engine.table, names))
        rows.append((*row, _kept_cell(engine)) if has_kept_nodes else row)
    return Table(columns, tuple(rows), emphasised=winner_row(engine.entry for engine in engines))


def _class_table(engines: Sequence[EngineLayers]) -> Table:
    """Return the share of the time per class of operator, and the overhead of each engine."""
    columns = (
        *left("#", "engine"),
        *right(*OperatorClass, "wall", "compute", "kernels", "host", "gaps", "layers times"),
    )
    rows = tuple(
        (str(engine.entry.number), engine.label, *_class_cells(engine)) for engine in engines
    )
    return Table(columns, rows, emphasised=winner_row(engine.entry for engine in engines))


def _class_cells(engine: EngineLayers) -> tuple[str, ...]:
    shares = time_by_class(engine.table.layers)
    classes = tuple(percent_text(shares[each]) if each in shares else "-" for each in OperatorClass)
    if (around := engine.overhead) is None:
        return (*classes, *["-"] * 6)
    times = (around.wall_s, around.compute_s, around.kernels_s, around.host_s, around.gaps_s)
    return (*classes, *map(_signed_text, times), f"{around.factor:.3f}")


def _signed_text(seconds: float) -> str:
    return f"-{time_text(-seconds)}" if seconds < 0 else time_text(seconds)


def _share_cells(table: LayerTable, names: list[str]) -> tuple[str, ...]:
    shares = time_by_precision(table)
    cells = (
        percent_text(shares[name]) if name in shares else "-"
        for name in (*names, "none", "unknown")
    )
    return (*cells, str(len(table.layers)), str(reformats(table).count))


def _kept_nodes(engine: EngineLayers) -> tuple[KeptNode, ...]:
    return engine.entry.candidate.kept_fp32 if engine.entry.candidate else ()


def _kept_cell(engine: EngineLayers) -> str:
    """Return the number of nodes that the conversion left in fp32, and their share of the time."""
    nodes = _kept_nodes(engine)
    if not nodes:
        return "-"
    return f"{len(nodes)}: {percent_text(forced_share(engine.table, nodes))} of the time"


def _layer_table(engine: EngineLayers) -> Table:
    columns = (*left("layer", "operator"), *right("time", "share"))
    if engine.has_work:
        columns += (
            *right("of roofline", "above it"),
            *left("limit"),
            *right("FLOPs", "bytes moved"),
        )
    columns += left("precision", "known by")
    if engine.errors:
        columns += right("own error")
    columns += left("ONNX nodes", "kernel")
    total_s = sum(layer.seconds or 0.0 for layer in engine.layers) or 1.0
    in_text = engine.entry.state in ("winner", "mislabelled")
    return Table(
        columns,
        tuple(
            _layer_cells(engine, layer, work, total_s)
            for layer, work in zip(engine.layers, engine.works, strict=True)
        ),
        f"The layers of {engine.label}, slowest first",
        folded=engine.entry.state != "winner",
        text_rows=MAX_LAYERS if in_text else 0,
        key=engine.key,
    )


def _layer_cells(
    engine: EngineLayers, layer: Layer, work: LayerWork, total_s: float
) -> tuple[str, ...]:
    error = engine.error_of(layer)
    own_error = ("-" if error is None else error_text(error),) if engine.errors else ()
    return (
        layer.name,
        operator_text(layer),
        "-" if layer.seconds is None else time_text(layer.seconds),
        "-" if layer.seconds is None else percent_text(layer.seconds / total_s),
        *(_work_cells(layer, work) if engine.has_work else ()),
        str(layer.precision),
        layer.evidence if layer.evidence != "none" else "-",
        *own_error,
        node_text(layer, MAX_NODE_NAMES) if layer.nodes else "-",
        layer.tactic or layer.kind,
    )


def _work_cells(layer: Layer, work: LayerWork) -> tuple[str, ...]:
    gap_s = None
    if work.share is not None and work.least_s is not None and layer.seconds is not None:
        gap_s = layer.seconds - work.least_s
    return (
        "-" if work.share is None else percent_text(work.share),
        "-" if gap_s is None else _signed_text(gap_s),
        limit_text(work),
        "-" if work.flops is None else flops_text(work.flops),
        "-" if work.moved_bytes is None else bytes_text(round(work.moved_bytes)),
    )


def limit_text(work: LayerWork) -> str:
    """Return which peak limits a layer, or why that is not known."""
    if work.unknown or work.limit is None:
        return str(work.unknown)
    limit = work.level or str(work.limit)
    return f"{limit}, error of the model" if work.is_above_peak else limit


def operator_text(layer: Layer) -> str:
    """Return the operators of a layer, as `Conv + Relu`, or the library's own word for it."""
    operators = list(dict.fromkeys(name for name in layer.operators if name not in SILENT))
    return " + ".join(operators or dict.fromkeys(filter(None, layer.operators)) or [layer.kind])
