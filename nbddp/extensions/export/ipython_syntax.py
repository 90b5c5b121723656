"""Translate IPython syntax into plain Python, or into a comment if there is no equivalent."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace

from IPython.core.inputtransformer2 import TransformerManager

_CELL_MAGIC = re.compile(r"%%([\w!]+)([^\n]*)\n?")
_RUN_THEIR_CELL = frozenset({"time", "timeit", "capture", "prun", "memit"})
_SHELLS = frozenset({"bash", "sh", "!", "sx", "system"})
_WHY_LEFT_OUT = {
    "matplotlib": "a script cannot show figures: save them with plt.savefig()",
    "pip": "install it before you run the script",
    "conda": "install it before you run the script",
}


@dataclass(frozen=True, slots=True)
class PlainCell:
    """A cell without IPython syntax.

    Attributes:
        text: the cell in plain Python.
        remarks: notes for the user about lines that became comments or behave differently.
        is_silent: whether the last line has a value here that the notebook did not show.
    """

    text: str
    remarks: tuple[str, ...] = ()
    is_silent: bool = False


def translate_cell(cell: str) -> PlainCell:
    """Translate a cell as the user typed it."""
    magic = _CELL_MAGIC.match(cell.lstrip())
    if magic is None:
        return _SyntaxTranslator(TransformerManager().transform_cell(cell)).translate()
    head, body = magic[0].rstrip(), cell.lstrip()[magic.end() :]
    if magic[1] in _RUN_THEIR_CELL:
        inside = translate_cell(body)
        return replace(inside, text=f"# {head}\n{inside.text}")
    if magic[1] in _SHELLS and not magic[2].strip():
        run = f"subprocess.run(['bash'], input={_text_literal(body)}, text=True, check=True)"
        return PlainCell(f"import subprocess\n{run}\n", is_silent=True)
    if magic[1] in ("writefile", "file") and (text := _translate_writefile(magic[2].split(), body)):
        return PlainCell(f"import pathlib\n{text}\n", is_silent=True)
    commented = "\n".join(f"# {line}".rstrip() for line in cell.strip().split("\n"))
    return PlainCell(commented, (f"{head}: left out: it has no equivalent in a script",))


def _translate_writefile(words: list[str], body: str) -> str:
    """Translate ``%%writefile``; return an empty text for unknown options."""
    appends = bool({"-a", "--append"} & {*words})
    files = [each for each in words if each not in ("-a", "--append")]
    if len(files) != 1 or files[0][0] in "-'\"":
        return ""
    path = f"pathlib.Path({_interpolated(files[0])}).expanduser()"
    if appends:
        return f"print({_text_literal(body)}, end='', file={path}.open('a', encoding='utf-8'))"
    return f"{path}.write_text({_text_literal(body)}, encoding='utf-8')"


def _text_literal(text: str) -> str:
    """Return the Python literal of a text, with one line of code per line of text."""
    lines = text.splitlines(keepends=True)
    if len(lines) < 2:
        return repr(text)
    return "(\n" + "\n".join(f"    {each!r}" for each in lines) + "\n)"


def _interpolated(line: str) -> str:
    r"""Return the Python expression for a line that may contain ``{names}``.

    >>> _interpolated("ls {folder}"), _interpolated("awk '{print $1}'")
    ("f'ls {folder}'", '"awk \'{print $1}\'"')
    """
    text = f"f{line!r}" if "{" in line else repr(line)
    try:
        ast.parse(text)
    except SyntaxError:
        return repr(line)
    return text


Edit = tuple[int, int, str]  # first byte, end, and the text that replaces these bytes


def apply_edits(text: str, edits: list[Edit]) -> str:
    """Apply edits that do not overlap."""
    data = text.encode()
    for start, end, new in sorted(edits, reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return the start and the end of a node, in bytes."""
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    last = node.end_lineno or node.lineno
    return start, sum(map(len, lines[: last - 1])) + (node.end_col_offset or 0)


@dataclass(slots=True)
class _SyntaxTranslator:
    """Translates a cell in which IPython has already turned magics and commands into calls."""

    text: str
    modules: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)

    def translate(self) -> PlainCell:
        tree = ast.parse(self.text)
        edits = [edit for node in ast.walk(tree) for edit in self._edits_of(node)]
        imports = "".join(f"import {each}\n" for each in sorted(self.modules))
        last = tree.body[-1] if tree.body else None
        call = _ipython_call(last.value) if isinstance(last, ast.Expr) else None
        is_silent = call is not None and call[0] == "system"
        return PlainCell(imports + apply_edits(self.text, edits), tuple(self.remarks), is_silent)

    def _edits_of(self, node: ast.AST) -> list[Edit]:
        """Translate the IPython calls in a statement, or leave out the statement."""
        if not isinstance(node, ast.stmt) or hasattr(node, "body"):
            return []
        edits: list[Edit] = []
        for part in ast.walk(node):
            call = _ipython_call(part)
            if call is None:
                continue
            text = self._translate_call(*call)
            if not text:
                shown, why = _describe_call(*call)
                self.remarks.append(f"{shown}: left out: {why}")
                return [(*span(self.text, node), f"pass  # left out: {shown}")]
            assert isinstance(part, ast.Call)
            edits.append((*span(self.text, part), text))
        return edits

    def _translate_call(self, method: str, words: tuple[str, ...]) -> str:
        """Return the Python code for an IPython call; empty if there is none."""
        if method in ("system", "getoutput"):
            return self._translate_command(method, words[0])
        if method != "run_line_magic":
            return ""
        name, line = words[0], words[1].strip()
        if name == "time":
            inside = translate_cell(line)
            is_one = not inside.remarks and "\n" not in inside.text.strip()
            return inside.text.strip() if is_one else ""
        if name in ("env", "set_env") and (found := re.fullmatch(r"(\w+)\s*[= ]\s*(.+)", line)):
            self.modules.add("os")
            return f"os.environ[{found[1]!r}] = {_interpolated(found[2])}"
        if name == "cd" and (folder := line.removeprefix("-q ").strip()) and folder[0] != "-":
            self.modules.add("os")
            return f"os.chdir(os.path.expanduser({_interpolated(folder)}))"
        return ""

    def _translate_command(self, method: str, line: str) -> str:
        if found := re.findall(r"\$\w+", line):
            self.remarks.append(f"!{line}: {', '.join(found)}: expanded by the shell")
        self.modules.add("subprocess")
        if method == "system":
            return f"subprocess.run({_interpolated(line)}, shell=True, check=False)"
        return f"subprocess.getoutput({_interpolated(line)}).splitlines()"


def _ipython_call(node: ast.AST) -> tuple[str, tuple[str, ...]] | None:
    """Return the method and the text arguments of ``get_ipython().method(...)``, else None."""
    match node:
        case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"), []), method), args):
            words = tuple(str(each.value) for each in args if isinstance(each, ast.Constant))
            return method, words
    return None


def _describe_call(method: str, words: tuple[str, ...]) -> tuple[str, str]:
    """Return the line that the user typed, and why the script leaves it out."""
    if method == "run_line_magic" and len(words) == 2:
        why = _WHY_LEFT_OUT.get(words[0], "it has no equivalent in a script")
        return f"%{words[0]} {words[1]}".rstrip(), why
    return f"get_ipython().{method}()", "a script runs without IPython"
