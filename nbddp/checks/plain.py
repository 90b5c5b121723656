"""A cell as Python alone, without IPython's own lines."""

from __future__ import annotations

import ast
import re

_CELL_MAGIC = re.compile(r"%%(\w+)")
_RUNS_PYTHON = ("capture", "ddp", "local", "prun", "time", "timeit")
_NO_PYTHON = re.compile(r"^(\s*)(?:[%!]|\?|\w[\w.]*\?+\s*$)")
_ASSIGNS_MAGIC = re.compile(r"^(\s*[\w, ]+=)\s*[%!].*$")


def plain_python(text: str) -> str:
    r"""A cell without IPython's own lines, as many lines as before.

    >>> plain_python("!ls\nx = %timeit -o f()\nfor i in x:\n    %time i")
    'pass\nx = None\nfor i in x:\n    pass'
    >>> plain_python("%%bash\nls")
    '\n'
    """
    magic = _CELL_MAGIC.match(text.lstrip())
    if magic and magic[1] not in _RUNS_PYTHON:
        return "\n" * text.count("\n")
    if not re.search(r"[%!?]", text):
        return text
    plain = "\n".join(map(_plain_line, text.split("\n")))
    if plain == text:  # a remainder, a format, a string
        return text
    try:
        ast.parse(text)
    except SyntaxError:
        return plain
    return text


def _plain_line(line: str) -> str:
    if found := _NO_PYTHON.match(line):
        return f"{found[1]}pass"
    return _ASSIGNS_MAGIC.sub(r"\1 None", line)
