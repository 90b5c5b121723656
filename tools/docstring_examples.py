"""Extension of Griffe: prepare nbddp's docstrings for Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^>>> .*\n?(?:^[^\n]+\n?)*")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?(?:nbddp\.)?([^`]+)`")


class DocstringExamples(griffe.Extension):
    """Fences the doctest examples, and replaces Sphinx's roles by code."""

    def on_object(self, *, obj: griffe.Object, **_more: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = prepare(obj.docstring.value)


def prepare(docstring: str) -> str:
    """Return a docstring with fenced examples and without roles.

    >>> prepare("See :func:`~nbddp.log`.")
    'See `log`.'
    """
    fenced = EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", docstring)
    return ROLE.sub(r"`\1`", fenced)
