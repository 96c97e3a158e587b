"""Commands on a compiled engine: validate and advise."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli import language, terminal
from pipeline.cli.inputs import delivered_engine
from pipeline.cli.options import JsonOption, ResultArgument, SetOption
from pipeline.cli.running import open_runner
from pipeline.plan import files as config
from pipeline.report import bundle as deliver


def validate(result: ResultArgument, overrides: SetOption, as_json: JsonOption = False) -> None:
    """Check the accuracy of a compiled engine again.

    Uses the validation set of the engine's plan, or another one: --set data.validation=NEW.npz

    Of a language model, it prints the perplexity and the divergence from the model in fp32, on the
    validation texts or on others: --set texts.validation=NEW.jsonl

    Exit codes: 0 passed; 2 failed; 1 error in the plan or on this host.

    Example: crucible validate crucible-out/resnet50
    """
    from pipeline.compiler.remeasure import validate_again
    from pipeline.report.files import load_report

    if deliver.holds_language_model(result):
        language.validate_language_model(result, overrides, as_json)
    engine, compiled = delivered_engine(result), load_report(result)
    with open_runner(as_json, compiled.plan.name) as runner:
        report = validate_again(
            compiled, config.override_plan(compiled.plan, overrides), engine, runner
        )
    if not as_json:
        terminal.print_text(terminal.console(), "\n".join(terminal.validation_lines(report)))
    print(report.model_dump_json())
    raise typer.Exit(0 if report.passed else 2)


def advise(
    result: ResultArgument,
    overrides: SetOption,
    rule: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="Try the changes of this rule only. Repeatable.",
            default_factory=list,
            show_default=False,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Find changes that make a compiled engine faster, and measure what each gains.

    Every change is built, checked for accuracy, and measured beside the engine in one run. Changes
    that certainly save more than 2 % end to end are advised, with the interval of their gain. All
    other attempts are listed with the reason.

    Exit codes: 0 all attempts are listed; 1 error in the plan or on this host.

    Example: crucible advise crucible-out/resnet50
    """
    from pipeline.cli.advise import advice_lines
    from pipeline.compiler.advice.again import advise_again
    from pipeline.compiler.advice.rules import check_rules
    from pipeline.report.files import load_report

    check_rules(rule)
    engine, compiled = delivered_engine(result), load_report(result)
    plan = config.override_plan(compiled.plan, overrides)
    with open_runner(as_json, plan.name) as runner:
        advice = advise_again(compiled, plan, engine, runner, rule)
    if not as_json:
        text = "\n".join(advice_lines(advice))
        terminal.print_text(terminal.console(), text, markup=False)
    print(advice.model_dump_json())
