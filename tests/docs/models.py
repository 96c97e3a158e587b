"""Pages of our pydantic models: the plan, the settings and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from pipeline.llm.plan import LanguagePlan
from pipeline.llm.results import LanguageReport
from pipeline.plan.files import models_in, old_names
from pipeline.plan.schema import Plan
from pipeline.results.report import Report
from service.settings import GIB, MIB, PREFIX, Settings
from service.submission.plan import ALLOWED, SubmittedPlan
from tests.docs.markdown import (
    Schema,
    default_text,
    key_table,
    linked,
    meaning_of,
    page,
    sections,
    table,
    titles_in,
    type_text,
)

KIB = 1024
WRITTEN_SHORTER = ("DimRange", "ValueRange")
TYPES = {"profiles": "[list of ranges](../howto/write-a-plan.md#profiles)"}
"""Of keys whose type has too many forms for one cell."""

ABOUT_PLAN = """The plan is one YAML file: what to compile, on which data, within which limits.
[Write a plan](../howto/write-a-plan.md) explains it with examples. Relative paths start at the
plan's own folder. Unknown keys are errors. `--set a.b=value` overrides any key from the command
line; list entries are numbered from 0. [plan.schema.json](plan.schema.json) is the JSON schema, for
editors."""
ABOUT_LANGUAGE_PLAN = """A plan whose key is `language_model` instead of `model`.
[Compile a language model](../howto/language-models.md) explains it."""
ABOUT_SETTINGS = f"""Each setting of `crucible serve` is an environment variable: `{PREFIX}` with
the name in capitals. Its value is YAML, such as `{PREFIX}ALLOWED_HOSTS='[models.example.org]'`. An
unknown variable is an error. `--host`, `--port`, `--home` and `--shared-memory` of `crucible serve`
override theirs. Sizes are in bytes, times in seconds."""
ABOUT_REPORT = """`report.json` holds everything that a compile found.
[Read the report](../howto/read-the-report.md) explains `report.md` and `report.html`, which show
the same. [report.schema.json](report.schema.json) is the JSON schema. `schema_version` rises when a
field is removed or changes its meaning; new fields do not raise it."""
ABOUT_LANGUAGE_REPORT = """`report.json` of a language model, which `kind` tells from
[that of engines](report.md). [language-report.schema.json](language-report.schema.json) is the JSON
schema. [Compile a language model](../howto/language-models.md) explains what is checked."""


def plan_page() -> str:
    schema = Plan.model_json_schema()
    titles = _titles_of_plan()
    links = linked(titles)
    keys = []
    for name, each in schema["properties"].items():
        anchor = "" if name in titles.values() else f"{{ #{name} }}"
        kind = TYPES.get(name) or type_text(each, schema["$defs"], links)
        default = default_text(each, name in schema["required"])
        keys.append((f"`{name}`{anchor}", kind, default, meaning_of(each, schema["$defs"])))
    return page(
        "Plan",
        "`pipeline/plan/schema.py`",
        ABOUT_PLAN,
        "## All keys",
        table(("key", "type", "default", "meaning"), keys),
        *sections(schema, titles, links),
        "## Old names",
        "These keys have had another name, which still works with a warning. `report.json` keeps"
        " the old names. To give both names of a key is an error.",
        table(("key", "old name"), _renamed(Plan)),
        "## Plans sent to the service",
        "A plan that is sent to [POST /compile](http.md) reaches nothing but the upload: no paths,"
        " no `module:function`, no plugins. It may have these keys, at most 12 levels, 10,000 items"
        " and 64 candidates. `architecture` names the model of `.safetensors` weights, and"
        " `classes` the size of its output.",
        table(("section", "keys"), _allowed(titles)),
    )


def language_plan_page() -> str:
    """The keys of a plan of a language model."""
    schema = LanguagePlan.model_json_schema()
    titles = titles_in(schema, by_path=True)
    links = linked(titles)
    return page(
        "Plan of a language model",
        "`pipeline/llm/plan.py`",
        ABOUT_LANGUAGE_PLAN,
        "## All keys",
        key_table(schema, schema, links),
        *sections(schema, titles, links),
    )


def _titles_of_plan() -> dict[str, str]:
    """Titles of the sections that a plan has. Its ranges are explained elsewhere."""
    titles = titles_in(Plan.model_json_schema(), by_path=True)
    return {name: title for name, title in titles.items() if name not in WRITTEN_SHORTER}


def _renamed(model: type[BaseModel], where: str = "") -> Iterator[tuple[str, str]]:
    for old, new in old_names(model).items():
        yield f"`{where}{new}`", f"`{where}{old}`"
    for name, field in model.model_fields.items():
        for annotation in models_in(field.annotation):
            yield from _renamed(annotation, f"{where}{name}.")


def _allowed(titles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for model, keys in ALLOWED.items():
        if model is SubmittedPlan or model.__name__ in titles:
            yield (
                titles.get(model.__name__, "(all keys)"),
                ", ".join(f"`{key}`" for key in keys.split()),
            )


def settings_page() -> str:
    schema = Settings.model_json_schema()
    rows = [
        (
            f"`{name}`{{ #{name} }}",
            type_text(each, schema.get("$defs", {}), {}),
            _setting_default(name, each),
            each["description"],
        )
        for name, each in schema["properties"].items()
    ]
    return page(
        "Settings of the service",
        "`service/settings.py`",
        ABOUT_SETTINGS,
        table(("setting", "type", "default", "meaning"), rows),
    )


def _setting_default(name: str, schema: Schema) -> str:
    value = schema.get("default")
    if "bytes" in name and isinstance(value, int):
        for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
            if value % size == 0:
                return f"{value // size} {unit}"
    return default_text(schema, required=False)


def report_page() -> str:
    of_plan = {"Plan": "[the plan](plan.md)"} | linked(_titles_of_plan(), "plan.md")
    return _page_of_report(Report, "Report", ABOUT_REPORT, "pipeline/results/report.py", of_plan)


def language_report_page() -> str:
    titles = titles_in(LanguagePlan.model_json_schema(), by_path=True)
    of_plan = {"LanguagePlan": "[the plan](language-plan.md)"}
    return _page_of_report(
        LanguageReport,
        "Report of a language model",
        ABOUT_LANGUAGE_REPORT,
        "pipeline/llm/results.py",
        of_plan | linked(titles, "language-plan.md"),
    )


def _page_of_report(
    report: type[BaseModel], title: str, about: str, source: str, of_plan: Mapping[str, str]
) -> str:
    schema = report.model_json_schema(mode="serialization")
    titles = {
        name: title
        for name, title in titles_in(schema, by_path=False).items()
        if name not in of_plan
    }
    links = {**linked(titles), **of_plan}
    return page(
        title,
        f"`{source}`",
        about,
        "## All keys",
        key_table(schema, schema, links),
        *sections(schema, titles, links),
    )
