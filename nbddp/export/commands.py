"""A shell's command as plain Python, expanded as IPython would expand it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection
from contextlib import suppress

from IPython.utils.text import DollarFormatter

_QUOTED = frozenset("'\"\\{}")  # what no field of an f-string may hold before Python 3.12

Field = tuple[str, str, str | None]  # text, the expression behind it, and its conversion


def command(method: str, line: str, names: Collection[str] | None) -> str:
    """The call that stands for ``!line``, or with ``getoutput`` for what it prints.

    >>> command("system", "ls {folder}", {"folder"})
    "subprocess.run(f'ls {folder}', shell=True, check=False)"
    """
    text = expanded(line, names)
    if method == "system":
        return f"subprocess.run({text}, shell=True, check=False)"
    options = "shell=True, check=False, capture_output=True, text=True"
    return f"subprocess.run({text}, {options}).stdout.splitlines()"


def expanded(line: str, names: Collection[str] | None) -> str:
    """The expression for a line in which ``{names}`` and ``$names`` stand.

    IPython leaves a line as it is if it cannot expand all of it, as where the shell has a name.

    Args:
        line: as it was typed.
        names: that there are; None if all may be.

    >>> expanded("echo $name", {"name"}), expanded("echo $name $HOME", {"name"})
    ("f'echo {name}'", "'echo $name $HOME'")
    >>> expanded("echo {d['k']!r}", {"d"})
    "'echo ' + repr(d['k'])"
    """
    with suppress(ValueError, SyntaxError):
        fields = list(_fields(line))
        used = {name for _, field, _ in fields for name in _names(field)}
        if names is None or used <= {*names, *vars(builtins)}:
            return _joined(fields)
    return repr(line)


def _fields(line: str) -> list[Field]:
    found: list[Field] = []
    for text, field, form, conversion in DollarFormatter().parse(line):
        whole = f"{field}:{form}" if form else field or ""
        found.append((text, whole, conversion))
    return found


def _names(field: str) -> set[str]:
    tree = ast.parse(field.strip(), mode="eval") if field else None
    nodes = ast.walk(tree) if tree is not None else ()
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _joined(fields: list[Field]) -> str:
    is_plain = not any(conversion or set(field) & _QUOTED for _, field, conversion in fields)
    if not any(field for _, field, _ in fields):
        return repr("".join(text for text, _, _ in fields))
    if is_plain:
        whole = "".join(
            _braced(text) + (f"{{{field}}}" if field else "") for text, field, _ in fields
        )
        return f"f{whole!r}"
    parts = []
    for text, field, conversion in fields:
        parts += [repr(text)] if text else []
        made = {"r": "repr", "a": "ascii"}.get(conversion or "", "str")
        parts += [f"{made}({field.strip()})"] if field else []
    return " + ".join(parts)


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def script(body: str) -> str:
    """The call that stands for a cell of the shell.

    >>> script("echo a")
    "subprocess.run(['bash'], input='echo a', text=True, check=True)"
    """
    return f"subprocess.run(['bash'], input={_lines(body)}, text=True, check=True)"


def writing(line: str, body: str, names: Collection[str] | None) -> str | None:
    """What stands for ``%%writefile line``; None for what it does not understand.

    >>> writing("a.txt", "text", None)
    "pathlib.Path('a.txt').write_text('text', encoding='utf-8')"
    """
    words = line.split()
    appends = "-a" in words or "--append" in words
    files = [each for each in words if each not in ("-a", "--append")]
    if len(files) != 1 or files[0][0] in "-'\"":
        return None
    path = f"pathlib.Path({expanded(files[0], names)})"
    path += ".expanduser()" if files[0].startswith("~") else ""
    if appends:
        return f"print({_lines(body)}, end='', file={path}.open('a', encoding='utf-8'))"
    return f"{path}.write_text({_lines(body)}, encoding='utf-8')"


def _lines(text: str) -> str:
    """A text as Python has it, in a line for each of its own."""
    lines = text.splitlines(keepends=True)
    if len(lines) < 2:
        return repr(text)
    return "(\n" + "\n".join(f"    {each!r}" for each in lines) + "\n)"
