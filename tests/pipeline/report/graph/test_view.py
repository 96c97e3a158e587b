"""The data of the graph: what the script in a page reads."""

import json
import re

import pytest

from pipeline.report.graph.view import graph_json, graph_script
from pipeline.report.html import page
from pipeline.report.layer_sections import layers_of_engines, limit_text
from pipeline.results.candidates import NodeHarm, NodeRanking
from tests.builders.report import EVIL, chain, proven_report, sample_report, worked_report


def test_layers_name_their_nodes_by_index_in_the_order_of_the_rows() -> None:
    report = proven_report()
    harm = NodeHarm(node="/fc/Gemm", operator="Gemm", largest=1.0, error=0.25)
    rescue = report.rescues[0].model_copy(update={"ranking": NodeRanking(nodes=(harm,))})
    report = report.model_copy(update={"rescues": (rescue,)})
    data = json.loads(graph_json(report))
    names = [name for name, _, _ in data["nodes"]]
    assert data["nodes"][1] == [report.graph[1].name, report.graph[1].operator, [0]]
    for engine, expected in zip(data["engines"], layers_of_engines(report), strict=True):
        assert engine["table"] == expected.key
        assert engine["label"] == expected.label
        for layer, source in zip(engine["layers"], expected.layers, strict=True):
            assert [names[index] for index in layer["nodes"]] == [
                node for node in source.nodes if node in names
            ]
            assert layer["seconds"] == source.seconds
    assert data["engines"][1]["errors"] == [[names.index("/fc/Gemm"), 0.25]]
    assert data["engines"][0]["errors"] == []


def test_nodes_and_layers_have_their_work() -> None:
    report = worked_report()
    data = json.loads(graph_json(report))
    assert data["works"][0] is None
    assert data["works"][1] == [1e6, 200_000]
    assert len(data["works"]) == len(data["nodes"])
    for layer, work in zip(
        data["engines"][0]["layers"], layers_of_engines(report)[0].works, strict=True
    ):
        assert (layer["flops"], layer["bytes"]) == (work.flops, work.moved_bytes)
        assert (layer["least"], layer["roofline"]) == (work.least_s, work.share)
        assert layer["limit"] == limit_text(work)
    without = json.loads(graph_json(proven_report()))
    assert set(without["works"]) == {None}


def test_the_winner_is_first_though_another_is_faster() -> None:
    report = proven_report()
    slower = report.model_copy(update={"winner": report.candidates[1].label})
    engines = json.loads(graph_json(slower))["engines"]
    assert [engine["table"] for engine in engines] == ["layers-2", "layers-1", "layers-3"]


def test_an_input_is_no_node_of_a_layer_though_it_has_its_name() -> None:
    report = proven_report()
    layers = report.candidates[0].layers
    assert layers is not None
    first = layers.layers[0].model_copy(update={"nodes": ("image",)})
    table = layers.model_copy(update={"layers": (first,)})
    winner = report.candidates[0].model_copy(update={"layers": table})
    data = json.loads(graph_json(report.model_copy(update={"candidates": (winner,)})))
    assert data["engines"][0]["layers"][0]["nodes"] == []


@pytest.mark.parametrize("name", [EVIL, "</script><script>alert(1)</script>", "<!--<script>"])
def test_no_name_ends_the_data_or_starts_a_script(name: str) -> None:
    report = sample_report().model_copy(update={"graph": chain([(name, name)])})
    text = graph_json(report)
    assert not re.search("[<>&]", text)
    assert json.loads(text)["nodes"][1] == [name, name, [0]]
    assert page(report).count("<script") == 2


def test_the_script_cannot_end_early() -> None:
    # Else the page or its hash would break.
    assert not re.search("</script|<!--|\r", graph_script())


def test_without_a_graph_the_page_says_why() -> None:
    report = proven_report().model_copy(update={"graph": ()})
    assert "This report holds no graph of the model" in page(report)
    assert "This report holds no graph of the model" not in page(proven_report())
