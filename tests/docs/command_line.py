"""The page of the command line, from the application that `crucible` runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from service.cli.main import app
from tests.docs.markdown import page, table

ABOUT = """Every command has `--help`. `crucible --version` prints the version. Commands that answer
with data print one JSON document as the last line, or only that with `--json`.

| exit code | meaning |
| --- | --- |
| 0 | the command succeeded; of a compile: accepted, keep or unproven |
| 1 | the request or this host is at fault; the message says what to do |
| 2 | of a compile: rejected |
| 3 | a bug in Crucible |
| 130 | Ctrl-C; finished work is kept |"""


def cli_page() -> str:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    return page(
        "Command line",
        "the application of `service/cli/main.py`",
        ABOUT,
        *(part for each in _commands(root, "crucible") for part in each),
    )


def _commands(group: TyperGroup, prefix: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        path = f"{prefix} {name}"
        if isinstance(command, TyperGroup):
            yield from _commands(command, path)
        elif isinstance(command, TyperCommand) and not command.hidden:
            yield _section(command, path)


def _section(command: TyperCommand, path: str) -> tuple[str, ...]:
    rows = [
        (_names(each), _default(each), each.help or "")
        for each in command.params
        if isinstance(each, TyperArgument | TyperOption) and each.name != "help"
    ]
    return (
        f"## `{path}` {{ #{path.removeprefix('crucible ').replace(' ', '-')} }}",
        inspect.cleandoc(command.help or ""),
        table(("argument or option", "default", "meaning"), rows),
    )


def _names(parameter: TyperArgument | TyperOption) -> str:
    metavar = parameter.metavar or (parameter.name or "").upper()
    if isinstance(parameter, TyperArgument):
        return f"`{metavar}`"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} `{metavar}`"


def _default(parameter: TyperArgument | TyperOption) -> str:
    if parameter.required:
        return "required"
    variable = f"`${parameter.envvar}`" if parameter.envvar else ""
    default = parameter.default
    if isinstance(default, bool) or not isinstance(default, str | int | float) or default == "":
        return variable
    return f"`{default}`"
