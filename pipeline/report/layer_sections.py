"""The section about what really ran: the time per precision, and the slowest layers."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core import Precision
from pipeline.formatting import shape_text, time_text
from pipeline.report.entries import Entry, entries, winner_row
from pipeline.report.tables import Section, Table, left, right
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.results.precision_audit import (
    forced_share,
    fusions,
    node_text,
    percent_text,
    reformats,
    slowest,
    time_by_precision,
)
from pipeline.results.report import Report

MAX_LAYERS = 15  # in the table of the slowest layers
MAX_NODE_NAMES = 4  # of one layer


def layer_section(report: Report) -> Section:
    """Return the precisions that really ran, for engines with evidence of it.

    The slowest layers are listed for the winner and for mislabelled engines.
    """
    audits = _layer_audits(report)
    fused: list[tuple[str, ...]] = []
    for entry, table in audits:
        if texts := fusions(table):
            fused.append((str(entry.number), _label_of(entry, table), "; ".join(texts)))
    slowest_layers = [
        _layer_table(entry, table)
        for entry, table in audits
        if entry.state in ("winner", "mislabelled")
    ]
    text = tuple(
        f"Share of the time per precision at {sizes}, each layer timed by itself. The precision of"
        " a layer follows from its kernel's name (tactic), or else from the types that it reads and"
        " writes. Reformats are all layers that only move or convert data."
        for sizes in dict.fromkeys(shape_text(table.sizes) for _, table in audits)
    )
    tables = (
        _precision_table(audits),
        Table(left("#", "engine", "fusions"), tuple(fused)),
        *slowest_layers,
    )
    return Section("layers", "What really ran", text, tables=tables)


def _layer_audits(report: Report) -> list[tuple[Entry, LayerTable]]:
    """Return every table of layers with its entry. There is one table per profile."""
    audits: list[tuple[Entry, LayerTable]] = []
    for entry in entries(report):
        if entry.candidate and entry.candidate.layers:
            tables = (entry.candidate.layers, *entry.candidate.other_layers)
            audits += [(entry, table) for table in tables]
    return audits


def _precision_table(audits: Sequence[tuple[Entry, LayerTable]]) -> Table:
    """Return the share of the time per precision, and of nodes left in fp32 if there are any."""
    times = [time_by_precision(table) for _, table in audits]
    names = [name for name in (*Precision, "integer") if any(name in time for time in times)]
    has_kept_nodes = any(entry.candidate.kept_fp32 for entry, _ in audits if entry.candidate)
    columns = (
        *left("#", "engine"),
        *right(*names),
        *right("reformats", "not known", "layers", "of them reformats"),
    )
    if has_kept_nodes:
        columns += right("nodes left in fp32")
    rows: list[tuple[str, ...]] = []
    for entry, table in audits:
        row = (str(entry.number), _label_of(entry, table), *_share_cells(table, names))
        rows.append((*row, _kept_cell(entry, table)) if has_kept_nodes else row)
    return Table(columns, tuple(rows), emphasised=winner_row(entry for entry, _ in audits))


def _label_of(entry: Entry, table: LayerTable) -> str:
    return f"{entry.label}, profile {table.profile + 1}" if table.profile else entry.label


def _share_cells(table: LayerTable, names: list[str]) -> tuple[str, ...]:
    shares = time_by_precision(table)
    cells = (
        percent_text(shares[name]) if name in shares else "-"
        for name in (*names, "none", "unknown")
    )
    return (*cells, str(len(table.layers)), str(reformats(table).count))


def _kept_cell(entry: Entry, table: LayerTable) -> str:
    """Return the number of nodes that the conversion left in fp32, and their share of the time."""
    nodes = entry.candidate.kept_fp32 if entry.candidate else ()
    return f"{len(nodes)}: {percent_text(forced_share(table, nodes))} of the time" if nodes else "-"


def _layer_table(entry: Entry, table: LayerTable) -> Table:
    total_s = sum(layer.seconds or 0.0 for layer in table.layers) or 1.0
    columns = (
        *right("time", "share"),
        *left("precision", "known by", "ONNX nodes", "kind", "kernel"),
    )
    rows = tuple(_layer_cells(layer, total_s) for layer in slowest(table.layers, MAX_LAYERS))
    title = f"The {len(rows)} slowest layers of {_label_of(entry, table)}"
    return Table(columns, rows, title, folded=True)


def _layer_cells(layer: Layer, total_s: float) -> tuple[str, ...]:
    seconds = layer.seconds or 0.0
    return (
        time_text(seconds),
        percent_text(seconds / total_s),
        str(layer.precision),
        layer.evidence if layer.evidence != "none" else "-",
        node_text(layer, MAX_NODE_NAMES),
        layer.kind,
        layer.tactic,
    )
