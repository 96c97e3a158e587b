"""The report of a language model for people: tables, Markdown, HTML and files."""

from __future__ import annotations

from pathlib import Path

from pipeline.formatting import bytes_text
from pipeline.llm.gate import percent_text
from pipeline.llm.race import AnswerTimes
from pipeline.llm.results import AnyReport, LanguageReport
from pipeline.report.bundle import deliver_engine, withdraw_engine
from pipeline.report.figures import Plot, Point, plot_of_losses
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
    winner = _winners_row(report, [row[1:] for row in rows])
    return Table(columns, tuple(rows), emphasised=winner, row_key="entry")


def speed_table(report: LanguageReport) -> Table:
    """Return how fast the engines answer that are within the limits, and the baseline."""
    columns = (
        *left("candidate"),
        *right("first token, ms", "next token, ms", "p99", "answer, ms", "memory"),
        *right("times as fast"),
    )
    rows = list[tuple[str, ...]]()
    for times in timed(report):
        ratio = times.ratio
        cells = (
            f"{1e3 * times.first_token_s:.0f}",
            f"{1e3 * times.next_token_s:.1f}",
            number_cell(times.next_token_p99_s and 1e3 * times.next_token_p99_s, ".1f"),
            f"{1e3 * times.median_s:.0f}",
            bytes_text(times.memory_bytes),
            f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-",
        )
        rows.append((times.label, *cells))
    return Table(columns, tuple(rows), emphasised=_winners_row(report, rows))


def timed(report: LanguageReport) -> list[AnswerTimes]:
    """Return the times of the baseline, then of the candidates that have some."""
    found = [report.baseline, *(each.times for each in report.candidates)]
    return [times for times in found if times is not None and times.answer is not None]


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


def _winners_row(report: LanguageReport, rows: list[tuple[str, ...]]) -> int | None:
    labels = [row[0] for row in rows]
    return labels.index(report.winner) if report.winner in labels else None


def failures(report: LanguageReport) -> tuple[str, ...]:
    """Return why candidates are not in the race, or have no ratio."""
    texts = []
    for each in report.candidates:
        judged, times = each.judged, each.times
        reasons = [each.failure, *(judged.failures if judged else ())]
        if times is not None and times.ratio is None:
            reasons += [times.failure, times.stopped]
        texts += [f"{each.label}: {reason}" for reason in reasons if reason]
    return tuple(texts)


def sections(report: LanguageReport) -> tuple[Section, ...]:
    """Return the sections of the report."""
    model, plan = report.model, report.plan
    benchmark = plan.benchmark
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
    speed = Section(
        "speed",
        "Speed",
        paragraphs=(
            f"An answer is {benchmark.output_tokens} tokens after a prompt of"
            f" {benchmark.prompt_tokens}. Medians, with 95 % intervals of the ratio.",
        ),
        tables=(speed_table(report),),
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
            "Properties that OpenVINO reports for the graph that was scored, opened as the pipeline"
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
    return (accuracy, speed, *proof, arithmetic, about, again)


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
