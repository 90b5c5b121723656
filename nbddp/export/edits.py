"""Changes to a piece of source that leave everything else as it was typed, comments included."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Positioned = ast.stmt | ast.expr


@dataclass(frozen=True, slots=True)
class Edit:
    """Put this text in the place of bytes; a zero width inserts it."""

    begin: int
    end: int
    text: str


class Source:
    """Python source whose nodes are found by their places in it.

    Raises:
        SyntaxError: it is no Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._bytes = text.encode()
        self._lines = [0]  # where each begins, in bytes: ast counts columns so
        for line in self._bytes.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

    def begin(self, node: Positioned) -> int:
        """Where a node begins; of a decorated function or class, where its decorators do."""
        decorators = getattr(node, "decorator_list", [])
        row: int = min([node.lineno, *(each.lineno for each in decorators)])
        return self._lines[row - 1] + node.col_offset

    def end(self, node: Positioned) -> int:
        """Where it ends."""
        return self._lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def segment(self, node: Positioned) -> str:
        """What stands there."""
        return self._bytes[self.begin(node) : self.end(node)].decode()

    def commented(self, node: ast.stmt) -> int:
        """Where a statement begins, with the comments that stand right above it."""
        begin = self.begin(node)
        ends = [self.end(each) for each in self.tree.body]
        last = max((end for end in ends if end <= begin), default=0)  # a text may have such lines
        while begin > last:
            above = self._bytes.rfind(b"\n", 0, begin - 1) + 1
            if above < last or not self._bytes[above:begin].startswith(b"#"):
                break
            begin = above
        return begin

    def between(self, begin: int, end: int) -> str:
        """The text from one place to another."""
        return self._bytes[begin:end].decode()

    def replacing(self, node: Positioned, text: str) -> Edit:
        """The edit that puts a text in a node's place."""
        return Edit(self.begin(node), self.end(node), text)

    def commenting(self, node: ast.stmt, reason: str, *, shown: str = "") -> Edit:
        """The edit that turns a statement into a comment, with ``pass`` where one is needed.

        Args:
            node: the statement.
            reason: why.
            shown: how it was typed, if not as it stands here.
        """
        before = self._bytes[self._lines[node.lineno - 1] : self.begin(node)]
        if before.strip() or self.rest_of_line(node).strip().startswith(";"):  # others beside it
            return self.replacing(node, "pass")
        margin = " " * node.col_offset
        lines = (shown or self.segment(node)).split("\n")
        kept = [f"# {line[len(margin) :] if line.startswith(margin) else line}" for line in lines]
        kept[0] = f"{kept[0]}  # left out: {reason}"
        if margin:
            kept.append("pass")
        return self.replacing(node, f"\n{margin}".join(kept))

    def rest_of_line(self, node: Positioned) -> str:
        """What stands behind it."""
        end = self.end(node)
        found = self._bytes.find(b"\n", end)
        return self._bytes[end : found if found >= 0 else len(self._bytes)].decode()

    def apply(self, edits: Iterable[Edit]) -> str:
        """The text with all of them made; they do not overlap, but may be inserted around one."""
        data = self._bytes
        for edit in sorted(edits, key=lambda each: (each.begin, each.end), reverse=True):
            data = data[: edit.begin] + edit.text.encode() + data[edit.end :]
        return data.decode()

    def rows_in_strings(self) -> set[int]:
        """Lines, from 1, that begin within a string: what stands in front of them is part of it."""
        rows: set[int] = set()
        for node in ast.walk(self.tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
            if is_text or isinstance(node, ast.JoinedStr):
                rows.update(self._rows_within(node))  # type: ignore[arg-type]
        return rows

    def _rows_within(self, node: ast.expr) -> Iterator[int]:
        """Of a text in parentheses, made of several, only those with a line break of their own."""
        yield from range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)


def indented(text: str, margin: str = "    ") -> str:
    """The same source, further in; texts of several lines keep their own lines."""
    fixed = Source(text).rows_in_strings()
    return "\n".join(
        line if not line or row in fixed else margin + line
        for row, line in enumerate(text.split("\n"), start=1)
    )
