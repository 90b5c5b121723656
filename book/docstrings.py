"""The public names and what their docstrings say, as Markdown."""

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


class _Bare:
    """An annotation that is written as it stands in the source, without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def reference() -> str:
    """All public names in their order, each with its signature and what is said of it."""
    names = [name for name in nbddp.__all__ if not name.endswith("_ipython_extension")]
    told = "\n\n".join(part for name in names for part in _entry(name, getattr(nbddp, name)))
    return f"# The names of nbddp\n\n{as_markdown(inspect.getdoc(nbddp) or '')}\n\n{told}\n"


def as_markdown(docstring: str) -> str:
    """A docstring of ours, with its sections, examples and references, as Markdown."""
    return "\n\n".join(_block(each) for each in _blocks(docstring.splitlines()))


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield _told(2, f"nbddp.{name}", thing)
    if inspect.ismodule(thing):
        members = {each: getattr(thing, each) for each in dir(thing)}
    elif inspect.isclass(thing) and not issubclass(thing, Exception):
        members = dict(vars(thing))
    else:
        return
    for member, value in sorted(members.items()):
        found = getattr(value, "__func__", value)  # of a class method
        if member[0] != "_" and inspect.getdoc(found) and _is_told(found):
            yield _told(3, f"{name}.{member}", found)


def _is_told(thing: Any) -> bool:
    return isinstance(thing, property) or inspect.isroutine(thing) or inspect.isclass(thing)


def _told(level: int, title: str, thing: Any) -> str:
    parts = [f"{'#' * level} {title}"]
    if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, Exception)):
        parts.append(f"{FENCE}python\n{title}{_signature(thing)}\n{FENCE}")
    return "\n\n".join([*parts, as_markdown(inspect.getdoc(thing) or "")])


def _signature(thing: Any) -> str:
    signature = inspect.signature(thing)
    given = [
        each.replace(annotation=_bare(each.annotation))
        for each in signature.parameters.values()
        if each.name not in ("self", "cls") and not each.name.startswith("_")
    ]
    returned = _bare(signature.return_annotation)
    lines = str(signature.replace(parameters=given, return_annotation=returned))
    return lines if len(lines) < 90 else re.sub(r", (?=\*|/|\w+[:=,)])", ",\n    ", lines)


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Paragraphs, sections and examples; what is indented belongs to what stands before it."""
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
    return _words("\n".join(lines).strip())


def _literal(lines: list[str]) -> str:
    """A paragraph that ends in two colons, and the code that is indented under it."""
    at = next(number for number, line in enumerate(lines) if line.endswith("::"))
    said = "\n".join([*lines[:at], lines[at][:-1]])
    code = dedent("\n".join(lines[at + 1 :])).strip("\n")
    shown = f"{FENCE}python\n{code}\n{FENCE}"
    return shown if said == ":" else f"{_words(said)}\n\n{shown}"


def _entries(body: str) -> str:
    """``name: text`` as a list, where that is how it is written; else as it is."""
    entries = re.split(r"\n(?=\S)", body)
    found = [ENTRY.fullmatch(each) for each in entries]
    if not all(found):
        return _words(body)
    told = [(each[1], " ".join(each[2].split())) for each in found if each]
    return "\n".join(f"* `{name}`: {_words(text)}" for name, text in told)


def _words(text: str) -> str:
    return ROLE.sub(_reference, text).replace("``", "`")


def _reference(found: re.Match[str]) -> str:
    name = found[2]
    return f"[`nbddp.{name}`](#nbddp.{name})" if name in nbddp.__all__ else f"`{name}`"
