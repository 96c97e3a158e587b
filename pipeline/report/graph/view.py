"""What a page needs to show the graph of a model, linked with its layer tables.

- The macro `model_graph` of templates/parts.html with `graph_json`, and the tables of the section
  `layers` by the macro `grid`. The tables hold everything that the graph shows.
- `graph_style` among its styles, and values for the variables --ink, --muted, --line, --paper,
  --soft and --link.
- `graph_script` after these, either inline, with `script_source` in the content security policy,
  or as a static file.

The names of nodes and layers are untrusted. The data escape them, and the script sets them as text
only.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from importlib import resources

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from pipeline.report.layer_sections import EngineLayers, layers_of_engines, limit_text
from pipeline.results.graph_node import GraphNode
from pipeline.results.report import Report


def graph_json(report: Report) -> Markup:
    """Return the nodes, and the layers of every engine, the winner first, as JSON for a script.

    A node is [name, operator, indices of the nodes that it reads], and its work [FLOPs, bytes] or
    null. The layers of an engine are in the order of the rows of its table; they name their nodes
    by index.
    """
    indices: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(report.graph):
        if not _is_end(node):
            indices[node.name].append(index)
    winner_first = sorted(
        layers_of_engines(report), key=lambda engine: engine.entry.state != "winner"
    )
    engines = [_engine(engine, indices) for engine in winner_first]
    nodes = [(node.name, node.operator, node.reads) for node in report.graph]
    works = [
        (node.work.flops, node.work.moved_bytes) if node.work and not _is_end(node) else None
        for node in report.graph
    ]
    return htmlsafe_json_dumps({"nodes": nodes, "works": works, "engines": engines})


def _is_end(node: GraphNode) -> bool:
    return node.operator in ("input", "output")


def _engine(engine: EngineLayers, indices: dict[str, list[int]]) -> dict[str, object]:
    layers = [
        {
            "name": layer.name,
            "nodes": _indices_of(layer.nodes, indices),
            "seconds": layer.seconds,
            "error": engine.error_of(layer),
            "flops": work.flops,
            "bytes": work.moved_bytes,
            "least": work.least_s,
            "roofline": work.share,
            "limit": limit_text(work),
        }
        for layer, work in zip(engine.layers, engine.works, strict=True)
    ]
    errors = [
        (index, error) for node, error in engine.errors.items() for index in indices.get(node, ())
    ]
    return {"label": engine.label, "table": engine.key, "layers": layers, "errors": errors}


def _indices_of(names: Sequence[str], indices: dict[str, list[int]]) -> list[int]:
    return [index for name in dict.fromkeys(names) for index in indices.get(name, ())]


@cache
def graph_script() -> str:
    """Return the script: what computes the layout, and what draws the graph."""
    return "\n".join(map(_text, ("layout.js", "graph.js")))


@cache
def graph_style() -> str:
    return _text("graph.css")


@cache
def script_source() -> str:
    """Return the source of a content security policy that allows this script only."""
    digest = hashlib.sha256(graph_script().encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _text(name: str) -> str:
    return resources.files("pipeline.report.graph").joinpath(name).read_text("utf-8")
