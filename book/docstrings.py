"""Turn the public names and their docstrings into Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import nbddp

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
ENTRY = re.compile(r"(\*{0,2}[\w.]+): (.*)", re.DOTALL)
ROLE = re.compile(r":\w+:`~?(nbddp\.)?([\w.]+)`")
FENCE = "```"


class _UnquotedAnnotation:
    """An annotation that is written as in the source, without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def reference() -> str:
    """Return all public names in order, each with its signature and docstring."""
    names = [name for name in nbddp.__all__ if not name.endswith("_ipython_extension")]
    sections = "\n\n".join(part for name in names for part in _entry(name, getattr(nbddp, name)))
    return f"# The names of nbddp\n\n{as_markdown(inspect.getdoc(nbddp) or '')}\n\n{sections}\n"


def as_markdown(docstring: str) -> str:
    """Return one of nbddp's docstrings as Markdown, with its sections, examples and references."""
    return "\n\n".join(_block(each) for each in _blocks(docstring.splitlines()))


def _entry(name: str, value: Any) -> Iterator[str]:
    yield _section(2, f"nbddp.{name}", value)
    if inspect.ismodule(value):
        members = {each: getattr(value, each) for each in dir(value)}
    elif inspect.isclass(value) and not issubclass(value, Exception):
        members = dict(vars(value))
    else:
        return
    for member, attribute in sorted(members.items()):
        found = getattr(attribute, "__func__", attribute)  # of a class method
        if member[0] != "_" and inspect.getdoc(found) and _has_section(found):
            yield _section(3, f"{name}.{member}", found)


def _has_section(value: Any) -> bool:
    return isinstance(value, property) or inspect.isroutine(value) or inspect.isclass(value)


def _section(level: int, title: str, value: Any) -> str:
    parts = [f"{'#' * level} {title}"]
    if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
        parts.append(f"{FENCE}python\n{title}{_signature(value)}\n{FENCE}")
    return "\n\n".join([*parts, as_markdown(inspect.getdoc(value) or "")])


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    given = [
        each.replace(annotation=_unquote(each.annotation))
        for each in signature.parameters.values()
        if each.name not in ("self", "cls") and not each.name.startswith("_")
    ]
    returned = _unquote(signature.return_annotation)
    lines = str(signature.replace(parameters=given, return_annotation=returned))
    return lines if len(lines) < 90 else re.sub(r", (?=\*|/|\w+[:=,)])", ",\n    ", lines)


def _unquote(annotation: Any) -> Any:
    return _UnquotedAnnotation(annotation) if isinstance(annotation, str) else annotation


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Yield paragraphs, sections and examples; an indented line belongs to the block before it."""
    block: list[str] = []
    for line in lines:
        begins = bool(line) and not line[0].isspace()
        is_inside = bool(block) and block[-1] != "" and not SECTION.fullmatch(line)
        if begins and block and not is_inside:
            yield block
            block = []
        if line or block:
            block.append(line.rstrip())
    if block:
        yield block


def _block(lines: list[str]) -> str:
    first, *rest = lines
    body = dedent("\n".join(rest)).strip("\n")
    if SECTION.fullmatch(first):
        return f"**{first[:-1]}**\n\n{_entries(body)}"
    if first.startswith(">>>"):
        return f"{FENCE}pycon\n" + "\n".join(lines).rstrip() + f"\n{FENCE}"
    if any(line.endswith("::") for line in lines):
        return _literal(lines)
    return _inline_markdown("\n".join(lines).strip())


def _literal(lines: list[str]) -> str:
    """Return a paragraph that ends in two colons, with the indented code below it."""
    at = next(number for number, line in enumerate(lines) if line.endswith("::"))
    before = "\n".join([*lines[:at], lines[at][:-1]])
    code = dedent("\n".join(lines[at + 1 :])).strip("\n")
    shown = f"{FENCE}python\n{code}\n{FENCE}"
    return shown if before == ":" else f"{_inline_markdown(before)}\n\n{shown}"


def _entries(body: str) -> str:
    """Return entries like ``name: text`` as a list; return other text unchanged."""
    entries = re.split(r"\n(?=\S)", body)
    found = [ENTRY.fullmatch(each) for each in entries]
    if not all(found):
        return _inline_markdown(body)
    sections = [(each[1], " ".join(each[2].split())) for each in found if each]
    return "\n".join(f"* `{name}`: {_inline_markdown(text)}" for name, text in sections)


def _inline_markdown(text: str) -> str:
    return ROLE.sub(_link_to_name, text).replace("``", "`")


def _link_to_name(found: re.Match[str]) -> str:
    name = found[2]
    return f"[`nbddp.{name}`](#nbddp.{name})" if name in nbddp.__all__ else f"`{name}`"
