"""The report of a language model for people: tables, Markdown, HTML and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.formatting import bytes_text
from pipeline.llm.gate import percent_text
from pipeline.llm.plan import LanguageObjective
from pipeline.llm.results import AnyReport, LanguageReport
from pipeline.llm.speed.times import AnswerTimes
from pipeline.report.bundle import deliver_engine, withdraw_engine
from pipeline.report.figures.drawing import Plot
from pipeline.report.figures.speed import Point, plot_of_losses
from pipeline.report.files import HTML_NAME, JSON_NAME, MARKDOWN_NAME, write_file
from pipeline.report.html import language_page
from pipeline.report.markdown import escape, section_lines
from pipeline.report.markdown import markdown as markdown_of_engines
from pipeline.report.tables import Section, Table, left, number_cell, right
from pipeline.results.report import ReportFiles

ENGINE_FOLDER = "engine"


def accuracy_table(report: LanguageReport) -> Table:
    """Return what each candidate costs in accuracy, numbered as in the figure."""
    columns = (
        *right("#"),
        *left("candidate"),
        *right("weights", "perplexity", "one by one", "KL, nats", "likeliest agree"),
        *left("outcome"),
    )
    rows = list[tuple[str, ...]]()
    if report.baseline is not None:
        rows.append(("0", report.baseline.label, *["-"] * 5, "the baseline"))
    for number, each in enumerate(report.candidates, start=1):
        judged = each.judged
        if judged is None:
            rows.append((str(number), each.label, *["-"] * 5, "failed"))
            continue
        cells = (
            bytes_text(each.weight_bytes),
            percent_text(judged.perplexity_increase),
            percent_text(judged.cached_perplexity_increase),
            f"{judged.divergence.value:.4f}",
            f"{judged.agreement.value:.1%}",
        )
        outcome = "within the limits" if judged.passed else "beyond the limits"
        rows.append((str(number), each.label, *cells, outcome))
    winner = _winners_row(report.winner, [row[1:] for row in rows])
    return Table(columns, tuple(rows), emphasised=winner, row_key="entry")


def ways_table(report: LanguageReport) -> Table:
    """Return how much answers depend on how they are served."""
    columns = (
        *left("candidate", "served"),
        *right("mean difference, nats", "largest", "answers that change"),
    )
    rows = [
        (
            each.label,
            way.way,
            f"{way.difference:.4f}",
            f"{way.largest_difference:.4f}",
            f"{way.changed} of {way.answers} ({way.changed_share:.0%})",
        )
        for each in report.candidates
        if each.judged
        for way in each.judged.ways
    ]
    return Table(columns, tuple(rows))


def speed_table(report: LanguageReport) -> Table:
    """Return how fast the engines answer that are within the limits, and the baseline."""
    return times_table(timed(report), report.plan.objective, report.winner)


def times_table(
    engines: Sequence[AnswerTimes], objective: LanguageObjective, winner: str = ""
) -> Table:
    """Return how fast timed engines answer, a row for each number of requests at once."""
    has_limits = not isinstance(objective, str)
    columns = (
        *left("candidate"),
        *right("at once", "first token, ms", "next token, ms", "p95", "p99"),
        *right("tokens/s", "per user", *(["good", "good/s"] if has_limits else [])),
        *right("times as fast"),
    )
    rows = list[tuple[str, ...]]()
    for times in engines:
        for level in times.levels:
            ratio = level.ratio
            good = (number_cell(level.good_share, ".0%"), number_cell(level.goodput_per_s, ".2f"))
            cells = (
                str(level.concurrency),
                f"{1e3 * level.first_token_s:.0f}",
                f"{1e3 * level.next_token_s:.1f}",
                _ms(level.next_token_p95_s),
                _ms(level.next_token_p99_s),
                f"{level.tokens_per_s:.1f}",
                f"{level.user_tokens_per_s:.1f}",
                *(good if has_limits else ()),
                f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-",
            )
            rows.append((times.label, *cells))
    return Table(columns, tuple(rows), emphasised=_winners_row(winner, rows))


def roofline_table(engines: Sequence[AnswerTimes], winner: str = "") -> Table:
    """Return what one token reads, how near the engines come to that, and where the rest goes."""
    columns = (
        *left("candidate"),
        *right("weights read", "keys and values", "floor, ms", "share", "in caches", "memory"),
        *right("products, ms", "attention", "other", "sampling", "scheduling"),
    )
    rows = list[tuple[str, ...]]()
    for times in engines:
        roof, parts = times.roofline, times.parts
        if roof is None:
            continue
        rest = (
            parts.products_s if parts else None,
            parts.attention_s if parts else None,
            parts.other_operators_s if parts else None,
            parts.sampling_s if parts else None,
            parts.scheduling_s if parts else None,
        )
        cells = (
            bytes_text(roof.weight_bytes),
            bytes_text(roof.cache_bytes),
            f"{1e3 * roof.floor_s:.2f}",
            f"{roof.share:.0%}",
            f"{roof.resident_share:.0%}",
            bytes_text(times.memory_bytes),
            *map(_ms2, rest),
        )
        rows.append((times.label, *cells))
    return Table(columns, tuple(rows), emphasised=_winners_row(winner, rows))


def timed(report: LanguageReport) -> list[AnswerTimes]:
    """Return the times of the baseline, then of the candidates that have some."""
    found = [report.baseline, *(each.times for each in report.candidates)]
    return [times for times in found if times is not None and times.levels]


def figures(report: LanguageReport) -> tuple[Plot, ...]:
    """Return the figure of accuracy against speed, if two engines or more were timed."""
    numbers = {each.label: number for number, each in enumerate(report.candidates, start=1)}
    points = []
    for times in timed(report):
        assert times.answer is not None
        result = report.result(times.label)
        judged = result.judged if result else None
        kind = "winner" if times.label == report.winner else "candidate"
        increase = judged.worst_increase if judged else None
        points.append(
            Point(
                1e3 * times.answer.median_s,
                100 * increase.value if increase else 0.0,
                numbers.get(times.label, 0),
                kind if judged else "baseline",
                (100 * increase.low, 100 * increase.high) if increase else None,
            )
        )
    if len(points) < 2:
        return ()
    benchmark, limit = report.plan.benchmark, 100 * report.plan.accuracy.max_perplexity_increase
    shape = f"{benchmark.prompt_tokens} tokens in, {benchmark.output_tokens} out"
    return (
        plot_of_losses(
            "accuracy",
            tuple(points),
            (limit, f"the limit: {limit:g} %"),
            f"median answer, {shape}, ms (lower is better)",
            "increase of perplexity, % (lower is better)",
        ),
    )


def _ms(seconds: float | None) -> str:
    return number_cell(None if seconds is None else 1e3 * seconds, ".1f")


def _ms2(seconds: float | None) -> str:
    return number_cell(None if seconds is None else 1e3 * seconds, ".2f")


def _winners_row(winner: str, rows: list[tuple[str, ...]]) -> int | None:
    labels = [row[0] for row in rows]
    return labels.index(winner) if winner in labels else None


def failures(report: LanguageReport) -> tuple[str, ...]:
    """Return why candidates are not in the race, or have no ratio."""
    texts = []
    for each in report.candidates:
        reasons = [each.failure, *(each.judged.failures if each.judged else ())]
        texts += [f"{each.label}: {reason}" for reason in reasons if reason]
        if each.times is not None:
            texts += missing_times(each.times)
    return tuple(texts)


def missing_times(times: AnswerTimes) -> list[str]:
    """Return what could not be measured of an engine, and why."""
    reasons = [times.parts_missing]
    if times.ratio is None:
        reasons = [times.failure, times.stopped or times.ratio_missing, *reasons]
    return [f"{times.label}: {reason}" for reason in reasons if reason]


def speed_text(report: LanguageReport) -> str:
    """Return what was timed, and what decides."""
    benchmark, objective = report.plan.benchmark, report.plan.objective
    text = (
        f"An answer is {benchmark.output_tokens} tokens after a prompt of"
        f" {benchmark.prompt_tokens}. `at once` is the number of requests that are sent together;"
        " a round ends with the last token of all. Medians, with 95 % intervals of the ratio of"
        " rounds."
    )
    if isinstance(objective, str):
        return f"{text} Rounds of {benchmark.concurrency[0]} decide."
    return (
        f"{text} An answer is good if its first token comes within {objective.max_first_token_s:g}"
        f" s, and the others {objective.max_next_token_s:g} s apart or less in the mean. Most good"
        " answers per second decide, of each engine at its best level."
    )


def roofline_text(report: LanguageReport) -> str:
    """Return what the roof is, and where its figures come from."""
    roofs = [times.roofline for times in timed(report) if times.roofline]
    if not roofs:
        return ""
    per_token = max(times.cache_bytes_per_token for times in timed(report))
    return (
        "For each token all weights are read, with their scales, and all keys and values (at most"
        f" {per_token:,.0f} bytes per token of the text). The floor is that at"
        f" {roofs[0].memory_bytes_per_s / 1e9:.1f} GB/s, the fastest read in this run of a buffer"
        " that no cache holds, by the threads of an engine. `in caches`: the share by the rate of"
        " a buffer as large as the weights. How operators share their time was measured on the"
        " graph that was scored; the rest is of the pipeline that serves, with one request."
    )


def sections(report: LanguageReport) -> tuple[Section, ...]:
    """Return the sections of the report."""
    model, plan = report.model, report.plan
    scored = [each.judged for each in report.candidates if each.judged]
    tokens = f" on {scored[0].tokens:,} tokens of the selection set" if scored else ""
    accuracy = Section(
        "accuracy",
        "Accuracy",
        paragraphs=(
            f"Against the model in fp32{tokens} (perplexity {report.reference_perplexity:.2f}),"
            " with 95 % intervals over texts.",
        ),
        tables=(accuracy_table(report),),
        items=failures(report),
    )
    table = ways_table(report)
    ways = Section(
        "ways",
        "Served in other ways",
        paragraphs=(
            "Greedy answers beside those to the same prompts alone. Log-probabilities are compared"
            " up to the first token that differs; the mean may be at most"
            f" {plan.accuracy.max_serving_difference:g} nats.",
        )
        if table.rows
        else (),
        tables=(table,),
    )
    speed = Section(
        "speed",
        "Speed",
        paragraphs=(speed_text(report),) if timed(report) else (),
        tables=(speed_table(report),),
    )
    roof = Section(
        "roofline",
        "Roofline",
        paragraphs=tuple(filter(None, [roofline_text(report)])),
        tables=(roofline_table(timed(report), report.winner),),
    )
    facts = [
        (each.label, *(f"{name}={value}" for name, value in each.facts.items()))
        for each in report.candidates
        if each.facts
    ]
    arithmetic = Section(
        "arithmetic",
        "What really ran",
        paragraphs=(
            "What the library reports of the graph that was scored, opened as the pipeline"
            " that serves. They change answers.",
        ),
        items=tuple(f"{label}: {', '.join(values)}" for label, *values in facts),
    )
    about = Section(
        "model",
        "Model and host",
        items=(
            f"{model.architecture}, {model.parameters:,} parameters, {model.layers} layers,"
            f" stored as {model.stored_as}",
            f"context {plan.context:,} of {model.context:,} tokens; keys and values take"
            f" {model.cache_values_per_token:,} numbers per token",
            f"{report.environment.cpu}, {report.environment.cores} cores"
            f" ({', '.join(report.environment.cpu_flags)}), load {report.load_1min:.1f}",
            *report.notes,
        ),
    )
    proof: tuple[Section, ...] = ()
    if report.validation:
        judged = report.validation
        proof = (
            Section(
                "proof",
                "Proof on the validation set",
                items=(
                    f"perplexity {percent_text(judged.perplexity_increase)}; read one by one"
                    f" {percent_text(judged.cached_perplexity_increase)}, on {judged.tokens:,}"
                    " tokens",
                    f"{judged.greedy_equal:.0%} of greedy tokens before the first that differs"
                    " from the model in fp32",
                    "log-probabilities as served and as scored differ by"
                    f" {judged.path_difference:.4f} nats in the mean",
                ),
            ),
        )
    again = Section("again", "Again", code=report.command)
    return (accuracy, ways, speed, roof, *proof, arithmetic, about, again)


def markdown(report: LanguageReport) -> str:
    lines = [
        f"# {escape(report.name or 'Report')}: {report.verdict}",
        "",
        f"**{escape(report.headline)}**",
        "",
    ]
    lines += [f"- {escape(text)}" for text in (*report.reasons, *report.next_steps)]
    for section in sections(report):
        if not section.is_empty:
            lines += ["", *section_lines(section)]
    return "\n".join(lines).rstrip() + "\n"


def any_markdown(report: AnyReport) -> str:
    """Return a report of either kind as Markdown."""
    if isinstance(report, LanguageReport):
        return markdown(report)
    return markdown_of_engines(report)


def publish(report: LanguageReport, folder: Path) -> ReportFiles:
    """Write the report, and the engine beside it. What an earlier compile left is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    if report.delivered is not None:
        deliver_engine(report.delivered, folder / ENGINE_FOLDER)
    else:
        withdraw_engine(folder / ENGINE_FOLDER)
    return write_language_report(report, folder)


def write_language_report(report: LanguageReport, folder: Path) -> ReportFiles:
    """Write the three forms of a report, report.json last."""
    files = ReportFiles(
        folder=folder,
        json_file=folder / JSON_NAME,
        markdown_file=folder / MARKDOWN_NAME,
        html_file=folder / HTML_NAME,
    )
    write_file(files.html_file, language_page(report, sections(report), figures(report)))
    write_file(files.markdown_file, markdown(report))
    write_file(files.json_file, report.model_dump_json(indent=1))
    return files
