"""The graph and the layer tables in Chromium: no error, no violation of the page's policy."""

import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.report.html import page
from pipeline.results.graph_node import GraphNode
from pipeline.results.report import Report
from tests.builders.report import EVIL, proven_report, worked_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WINNER = "#layers-1"
POLICY = "Content Security Policy"  # in messages on violations, which are counted by themselves
# Runs before the page's own script.
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not on PATH")


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def show(browser: "Browser", tmp_path: Path) -> "Iterator[Callable[..., Page]]":
    """Opens the page of a report. At the end, no page may have met an error."""
    errors: list[str] = []
    pages: list[Page] = []

    def show(report: Report, width: int = 1280, javascript: bool = True) -> "Page":
        file = tmp_path / "report.html"
        file.write_text(page(report, lambda plot: "<svg></svg>"))
        opened = browser.new_page(
            viewport={"width": width, "height": 800}, java_script_enabled=javascript
        )
        opened.on("console", lambda message: errors.append(message.text))
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on("dialog", lambda dialog: errors.append(f"a dialog: {dialog.message}"))
        opened.add_init_script(WATCH)
        opened.goto(file.as_uri())
        if javascript:
            pages.append(opened)
        return opened

    yield show
    assert [error for error in errors if POLICY not in error] == []
    assert [opened.evaluate("violations") for opened in pages] == [[] for _ in pages]


def large_report(nodes: int, scope: Callable[[int], str]) -> Report:
    """A graph with branches. `scope` gives the prefix of each node's name."""
    graph = [GraphNode(name="x", operator="input")]
    for index in range(1, nodes):
        reads = (index - 1,) if index % 5 or index < 6 else (index - 5, index - 1)
        graph.append(GraphNode(name=f"{scope(index)}node_{index}", operator="Add", reads=reads))
    return proven_report().model_copy(update={"graph": tuple(graph)})


def nodes_of(shown: "Page") -> "Locator":
    return shown.locator(".model-graph g.node")


def node_of(shown: "Page", name: str) -> "Locator":
    title = shown.locator("title", has_text=re.compile(f"^{re.escape(name)}$"))
    return nodes_of(shown).filter(has=title)


def test_a_row_marks_its_nodes_and_a_node_marks_its_row(show: "Callable[..., Page]") -> None:
    report = proven_report()
    layers = report.candidates[0].layers
    assert layers is not None
    layer = next(layer for layer in layers.layers if len(layer.nodes) == 3)
    shown = show(report)
    assert nodes_of(shown).count() == len(report.graph)
    shown.locator(WINNER).get_by_role("cell", name=layer.name, exact=True).click()
    marked = shown.locator(".model-graph g.chosen title").all_text_contents()
    assert set(marked) == set(layer.nodes)
    node_of(shown, report.graph[1].name).click()
    assert shown.locator(".model-graph g.chosen").count() == 1
    chosen = shown.locator("table tr.chosen")
    assert chosen.count() == 1
    assert report.graph[1].name in str(chosen.text_content())
    assert " of the time" in str(shown.locator(".graph-detail").text_content())


def test_the_table_of_another_engine_colours_the_graph(show: "Callable[..., Page]") -> None:
    shown = show(proven_report())
    hottest = ".model-graph g.heat-6 title"
    before = shown.locator(hottest).all_text_contents()
    shown.get_by_label("Engine").select_option(label="tensorrt rescued fp16 flags")
    assert shown.locator(hottest).all_text_contents() != before
    assert shown.get_by_label("Colour").locator("option[value=error]").is_disabled()


def test_the_graph_shows_the_work_and_the_share_of_the_roofline(
    show: "Callable[..., Page]",
) -> None:
    report = worked_report()
    shown = show(report)
    layer = "/layer1/layer1.0/conv1/Conv"
    node_of(shown, layer).click()
    detail = str(shown.locator(".graph-detail").text_content())
    assert "7.17 us" in detail
    assert " of the time in a layer of 2 nodes" in detail
    assert "0.1 % of its roofline (memory)" in detail
    assert "by itself 1.00 MFLOP and 200 kB" in detail
    by_time = shown.locator(".model-graph g.heat-6").count()
    shown.get_by_label("Colour").select_option(label="share of roofline")
    assert "0 %" in str(shown.locator(".graph-legend").text_content())
    assert "100 %" in str(shown.locator(".graph-legend").text_content())
    assert by_time > 0
    assert shown.locator(".model-graph g.heat-6").count() == 0, "no layer is near its roofline"
    assert shown.locator(".model-graph g.heat-1").count() > 20
    shown.get_by_label("Engine").select_option(label="tensorrt rescued fp16 flags")
    assert shown.locator(".model-graph g.heat-1").count() > 20
    head = shown.locator(f"{WINNER} th", has_text="of roofline")
    head.get_by_role("button").click()
    cells = shown.locator(f"{WINNER} tbody td:nth-child(5)").all_text_contents()
    shares = [float(cell.removesuffix(" %")) for cell in cells if cell != "-"]
    assert len(shares) > 20
    assert shares == sorted(shares, reverse=True)
    assert cells[-1] == "-", "what is not known is last"


def test_the_graph_says_why_a_share_of_the_roofline_is_not_known(
    show: "Callable[..., Page]",
) -> None:
    shown = show(worked_report(peaks=None))
    node_of(shown, "/layer1/layer1.0/conv1/Conv").click()
    detail = str(shown.locator(".graph-detail").text_content())
    assert "share of its roofline not known (peaks not known)" in detail
    assert shown.get_by_label("Colour").locator("option[value=roofline]").is_disabled()


def test_a_report_without_work_has_no_colour_for_the_roofline(
    show: "Callable[..., Page]",
) -> None:
    shown = show(proven_report())
    assert shown.get_by_label("Colour").locator("option[value=roofline]").is_disabled()
    node_of(shown, "/layer1/layer1.0/conv1/Conv").click()
    detail = str(shown.locator(".graph-detail").text_content())
    assert "share of its roofline not known (no work in this report)" in detail
    assert "by itself" not in detail


def test_rows_are_marked_without_a_graph_too(show: "Callable[..., Page]") -> None:
    shown = show(proven_report().model_copy(update={"graph": ()}))
    shown.locator(f"{WINNER} tbody tr").nth(2).click()
    assert shown.locator("table tr.chosen").count() == 1
    assert "holds no graph" in str(shown.locator(".model-graph").text_content())


def test_a_click_on_a_heading_sorts_by_value(show: "Callable[..., Page]") -> None:
    shown = show(proven_report())
    times = shown.locator(f"{WINNER} tbody td:nth-child(3)")
    slowest_first = times.all_text_contents()
    head = shown.locator(f"{WINNER} th").nth(2)
    head.get_by_role("button").click()
    assert (head.get_attribute("aria-sort"), times.all_text_contents()) == (
        "descending",
        slowest_first,
    )
    head.get_by_role("button").click()
    assert times.all_text_contents()[0] == slowest_first[-1]


def test_a_large_graph_is_folded_by_the_names_of_its_nodes(show: "Callable[..., Page]") -> None:
    shown = show(large_report(2000, lambda index: f"/encoder/layer.{index // 100}/"))
    assert nodes_of(shown).count() == 21  # the input, and the layers
    shown.locator(".model-graph g.node").nth(3).click()
    assert nodes_of(shown).count() == 120
    shown.keyboard.press("Backspace")
    assert nodes_of(shown).count() == 21
    shown.get_by_role("searchbox").fill("node_1234")
    assert "1 of 2000 nodes" in str(shown.locator(".graph-detail").text_content())
    shown.keyboard.press("Enter")
    assert shown.locator(".model-graph g.chosen title").all_text_contents() == [
        "/encoder/layer.12/node_1234"
    ]
    shown.get_by_role("button", name="Fold encoder/layer.12").click()
    assert nodes_of(shown).count() == 21


def test_a_large_graph_without_scopes_is_folded_too(show: "Callable[..., Page]") -> None:
    shown = show(large_report(2000, lambda index: ""))
    assert 20 < nodes_of(shown).count() <= 300


def positions_of(shown: "Page") -> dict[str, tuple[float, float]]:
    """The centre of each node by its name."""
    transforms = nodes_of(shown).evaluate_all(
        "all => all.map(node => [node.querySelector('title').textContent,"
        " node.getAttribute('transform')])"
    )
    centres = {}
    for name, transform in transforms:
        x, y = re.findall(r"[-\d.]+", transform)
        centres[name] = (float(x), float(y))
    return centres


def unfolded(shown: "Page") -> dict[str, tuple[float, float]]:
    shown.get_by_role("button", name="Unfold all").click()
    return positions_of(shown)


@pytest.mark.parametrize("reads_all", [False, True])
def test_two_thousand_nodes_unfold_without_overlap(
    show: "Callable[..., Page]", reads_all: bool
) -> None:
    # A chain is as deep as a graph can be; an output that reads all needs the most lines.
    report = large_report(2000, lambda index: f"/layer.{index // 100}/")
    if reads_all:
        last = report.graph[-1].model_copy(update={"reads": tuple(range(1999))})
        report = report.model_copy(update={"graph": (*report.graph[:-1], last)})
    centres = unfolded(show(report))
    assert set(centres) == {node.name for node in report.graph}
    for node in report.graph:
        for read in node.reads:
            assert centres[report.graph[read].name][1] < centres[node.name][1]
    rows: dict[float, list[float]] = {}
    for x, y in centres.values():
        rows.setdefault(y, []).append(x)
    for row in rows.values():
        ordered = sorted(row)
        gaps = [right - left for left, right in pairwise(ordered)]
        assert min(gaps, default=100) > 60


def test_names_of_any_depth_are_drawn(show: "Callable[..., Page]") -> None:
    scopes = "/".join(f"s{number}" for number in range(20_000))
    shown = show(large_report(400, lambda index: f"/{scopes}/" if index > 397 else "/a/"))
    assert len(unfolded(shown)) == 400


def test_groups_that_read_each_other_are_laid_out(show: "Callable[..., Page]") -> None:
    shown = show(large_report(2000, lambda index: f"/part.{index % 3}/"))
    centres = positions_of(shown)
    assert len(centres) > 3
    assert len(set(centres.values())) == len(centres)


def test_lines_of_a_chain_are_straight(show: "Callable[..., Page]") -> None:
    graph = [GraphNode(name="x", operator="input")]
    graph += [GraphNode(name=f"n{i}" * (1 + i % 4), operator="Add", reads=(i,)) for i in range(20)]
    shown = show(proven_report().model_copy(update={"graph": tuple(graph)}))
    assert len({x for x, _ in positions_of(shown).values()}) == 1
    paths = shown.locator(".model-graph path").evaluate_all(
        "all => all.map(path => path.getAttribute('d'))"
    )
    assert len(paths) == 20
    assert not [path for path in paths if "C" in path]


def test_two_fingers_zoom_about_their_middle(show: "Callable[..., Page]") -> None:
    shown = show(proven_report())
    shown.locator(".graph-box svg").scroll_into_view_if_needed()
    box = shown.locator(".graph-box svg").bounding_box()
    assert box is not None
    stage = shown.locator(".graph-box svg > g")

    def view() -> list[float]:
        return [float(n) for n in re.findall(r"[-\d.]+", str(stage.get_attribute("transform")))]

    def touch(kind: str, **fingers: float) -> None:
        touches = [
            {"x": box["x"] + x, "y": box["y"] + 100, "id": ord(finger)}
            for finger, x in fingers.items()
        ]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})

    session = shown.context.new_cdp_session(shown)
    x, y, scale = view()
    touch("touchStart", a=300)
    touch("touchStart", a=300, b=400)
    touch("touchMove", a=250, b=450)
    new_x, new_y, new_scale = view()
    assert new_scale == pytest.approx(2 * scale)
    # The point under the middle of both fingers, (350, 100), stays there.
    assert (350 - new_x) / new_scale == pytest.approx((350 - x) / scale)
    assert (100 - new_y) / new_scale == pytest.approx((100 - y) / scale)
    touch("touchEnd", a=250)  # lifts one finger; the other drags
    touch("touchMove", b=480)
    touch("touchEnd")
    assert view() == pytest.approx([new_x + 30, new_y, new_scale])
    assert shown.locator(".model-graph g.chosen").count() == 0


def test_arrow_keys_follow_the_edges(show: "Callable[..., Page]") -> None:
    report = proven_report()
    shown = show(report)
    nodes_of(shown).first.focus()
    for node in report.graph[1:3]:
        shown.keyboard.press("ArrowDown")
        assert node.name in str(shown.locator("g.node:focus").get_attribute("aria-label"))
    shown.keyboard.press("Enter")
    assert shown.locator(".model-graph g.chosen title").all_text_contents() == [node.name]
    shown.keyboard.press("ArrowUp")
    label = shown.locator("g.node:focus").get_attribute("aria-label")
    assert report.graph[1].name in str(label)


def test_names_are_text_and_no_other_script_runs(show: "Callable[..., Page]") -> None:
    report = proven_report(evil=EVIL)
    shown = show(report)
    assert node_of(shown, EVIL).count() == 1
    shown.locator(f"{WINNER} tbody tr").first.click()  # its layer holds that node
    shown.evaluate(
        "const other = document.createElement('script'); other.textContent = 'window.ran = 1';"
        "document.body.append(other)"
    )
    assert shown.evaluate("[window.ran, violations.splice(0)]") == [None, ["script-src-elem"]]


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_makes_the_page_scroll_sideways(show: "Callable[..., Page]", width: int) -> None:
    shown = show(proven_report(), width=width)
    assert shown.evaluate("document.documentElement.scrollWidth") == width


def test_without_a_script_every_layer_is_there(show: "Callable[..., Page]") -> None:
    report = proven_report()
    layers = report.candidates[0].layers
    assert layers is not None
    shown = show(report, javascript=False)
    assert shown.locator(f"{WINNER} tbody tr").count() == len(layers.layers)
    assert "tables below say the same" in str(shown.locator(".model-graph").text_content())
