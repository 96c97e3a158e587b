"""Markdown of generated pages: tables, and JSON schemas as tables of keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]


def page(title: str, source: str, *parts: str) -> str:
    """A page with its title and, below it, what it is generated from."""
    note = f"This page is generated from {source}. `make reference` writes it again."
    return "\n\n".join([f"# {title}", note, *(part.strip() for part in parts if part)]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; empty if there is no row."""
    lines = [_row(cells) for cells in rows]
    return "\n".join([_row(head), _row(["---"] * len(head)), *lines]) if lines else ""


def _row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(' '.join(cell.split()) for cell in escaped)} |"


def code(text: str) -> str:
    return f"`{text}`"


def reference_of(schema: Schema) -> str:
    """The name of the definition that a schema refers to; empty if it refers to none."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def alternatives(schema: Schema) -> Sequence[Schema]:
    """The schemas of which one must fit, without null."""
    either: Sequence[Schema] = schema.get("anyOf") or schema.get("oneOf") or (schema,)
    return [each for each in either if each.get("type") != "null"]


def type_text(schema: Schema, definitions: Mapping[str, Schema], links: Mapping[str, str]) -> str:
    """A schema's type in words. `links` holds the link to each definition that has a section."""
    words = [_type_text(each, definitions, links) for each in alternatives(schema)]
    return " or ".join(dict.fromkeys(words))


def _type_text(schema: Schema, definitions: Mapping[str, Schema], links: Mapping[str, str]) -> str:
    if name := reference_of(schema):
        definition = definitions[name]
        if name in links:
            return links[name]
        return _type_text(definition, definitions, links)
    if "const" in schema:
        return code(json.dumps(schema["const"]).strip('"'))
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return _array_text(schema, definitions, links)
        case "object" if isinstance(values := schema.get("additionalProperties"), Mapping):
            return f"mapping of name: {type_text(values, definitions, links)}"
        case "string" if schema.get("format") in ("path", "binary"):
            return {"path": "path", "binary": "bytes"}[schema["format"]]
        case None:
            return "any"
        case kind:
            return f"{kind}{_bounds(schema)}"


def _array_text(schema: Schema, definitions: Mapping[str, Schema], links: Mapping[str, str]) -> str:
    if points := schema.get("prefixItems"):
        return f"[{', '.join(type_text(each, definitions, links) for each in points)}]"
    return f"list of {type_text(schema.get('items', {}), definitions, links)}"


def _bounds(schema: Schema) -> str:
    """The limits of a number, as in ` (1 to 64)`."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    if low is not None and high is not None:
        return f" ({low:g} to {high:g})"
    if above is not None:
        return f" (above {above:g}{f', at most {high:g}' if high is not None else ''})"
    return f" (at least {low:g})" if low is not None else ""


def default_text(schema: Schema, required: bool) -> str:
    """The default of a key; empty if it is a section, or if the description says it."""
    if required:
        return "required"
    default = schema.get("default")
    if default is None or default in ("", ".") or isinstance(default, Mapping):
        return ""
    if isinstance(default, list):
        if len(default) == 1:
            return default_text({"default": default[0]}, required)
        return code(json.dumps(default)) if default else "none"
    if isinstance(default, float):
        return code(f"{default:g}")
    return code(default if isinstance(default, str) else json.dumps(default))


def meaning_of(schema: Schema, definitions: Mapping[str, Schema]) -> str:
    """The description of a key. Pydantic omits it where it equals that of the definition."""
    definition = definitions.get(reference_of(schema), {})
    return str(schema.get("description") or definition.get("description", ""))


def linked(titles: Mapping[str, str], file: str = "") -> dict[str, str]:
    """A link to the section of each definition, by name."""
    return {name: f"[{title}]({file}#{title})" for name, title in titles.items()}


def titles_in(schema: Schema, by_path: bool) -> dict[str, str]:
    """The title of the section of every definition with keys, in the order of first use.

    `by_path`: the key that holds it, as in `accuracy.thresholds`, unless that takes other things
    too. Otherwise, and then, its own name.
    """
    definitions, titles = schema.get("$defs", {}), dict[str, str]()

    def visit(part: Schema, path: str) -> None:
        choices = alternatives(part)
        for each in choices:
            name = reference_of(each)
            if name not in titles and "properties" in definitions.get(name, {}):
                titles[name] = path if by_path and len(choices) == 1 else name
                visit(definitions[name], path)
            for key in ("items", "additionalProperties"):
                if isinstance(each.get(key), Mapping):
                    visit(each[key], path)
            for key, below in each.get("properties", {}).items():
                visit(below, f"{path}.{key}".lstrip("."))
            for below in each.get("prefixItems", ()):
                visit(below, path)

    visit(schema, "")
    return titles


def sections(schema: Schema, titles: Mapping[str, str], links: Mapping[str, str]) -> Iterator[str]:
    """A heading, the description and the keys of each of these definitions."""
    for name, title in titles.items():
        definition = schema["$defs"][name]
        yield f"## `{title}` {{ #{title} }}"
        yield definition.get("description", "")
        yield key_table(definition, schema, links)


def key_table(schema: Schema, root: Schema, links: Mapping[str, str]) -> str:
    """The keys of one object: type, default, and meaning where one is known."""
    definitions = root.get("$defs", {})
    required = schema.get("required", ())
    rows = [
        (
            f"`{name}`",
            type_text(each, definitions, links),
            default_text(each, name in required),
            meaning_of(each, definitions),
        )
        for name, each in schema["properties"].items()
    ]
    if not any(meaning for *_, meaning in rows):
        return table(("key", "type", "default"), [row[:3] for row in rows])
    return table(("key", "type", "default", "meaning"), rows)
