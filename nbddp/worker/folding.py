"""A traceback as people read it: their own frames, and a word on those of libraries between."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from nbddp.formatting import plural

_ROOTS = (
    Path(torch.__file__).parent.parent,
    Path(__file__).parents[2],
    *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")),
)
_OWN = ("torch", "nbddp")  # of the first two, which may lie in a folder of the user's
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CELL = re.compile(r'File "<ipython-input-(\d+)-[0-9a-f]+>"')
# a frame as IPython has it, which ends with an empty line, and as Python has it
_IPYTHONS = re.compile(r"()File (\S.*?):\d+(?:, in .*)?")
_PYTHONS = re.compile(r'([ |+]*)File "(.+?)", line \d+(?:, in .*)?')
_CPP = re.compile(
    r"(?:Exception raised from |C\+\+ CapturedTraceback|frame #\d+: |#\d+ .* from ).*"
)


class _Piece(NamedTuple):
    """A frame, or a line that is in none: whose it is, if not the user's."""

    lines: list[str]
    library: str = ""
    margin: str = ""
    is_frame: bool = False

    @property
    def run(self) -> tuple[bool, str]:
        """What neighbours have in common that are folded together."""
        return bool(self.library), self.margin


def folded(text: str) -> str:
    """A traceback without the frames of libraries; one that has no others stays as it is."""
    pieces = list(_pieces(_CELL.sub(r"Cell In[\1]", text).split("\n")))
    has_users = any(each.is_frame and not each.library for each in pieces)
    lines: list[str] = []
    for (is_librarys, margin), run in groupby(pieces, lambda each: each.run):
        group = list(run)
        frames = [each for each in group if each.is_frame]
        if is_librarys and (has_users or not frames):
            lines.append(f"{margin}{_say(group)}")
            if not group[-1].lines[-1]:  # IPython's frames end so
                lines.append("")
        else:
            lines += [line for each in group for line in each.lines]
    return "\n".join(lines)


def _say(group: list[_Piece]) -> str:
    names = list(dict.fromkeys(each.library for each in group))
    return f"... {plural(len(group), 'frame')} in {', '.join(names)}"


def _pieces(lines: list[str]) -> Iterator[_Piece]:
    at = 0
    while at < len(lines):
        piece = _piece(lines, at)
        yield piece
        at += len(piece.lines)


def _piece(lines: list[str], at: int) -> _Piece:
    plain = _ANSI.sub("", lines[at])
    if _CPP.fullmatch(plain):
        return _Piece(lines[at : at + 1], "C++", "    ")
    if found := _IPYTHONS.fullmatch(plain):
        return _Piece(_until_empty(lines, at), library_of(found[2]), "    ", is_frame=True)
    if found := _PYTHONS.fullmatch(plain):
        block = _while_deeper(lines, at, f"{found[1]}  ")
        return _Piece(block, library_of(found[2]), found[1], is_frame=True)
    is_cell = plain.lstrip(" |+").startswith("Cell In")
    return _Piece(lines[at : at + 1], is_frame=is_cell)


def _until_empty(lines: list[str], at: int) -> list[str]:
    end = next((row for row in range(at, len(lines)) if not lines[row]), len(lines) - 1)
    return lines[at : end + 1]


def _while_deeper(lines: list[str], at: int, margin: str) -> list[str]:
    end = at + 1
    while end < len(lines) and lines[end].startswith(margin):
        end += 1
    return lines[at:end]


def library_of(filename: str) -> str:
    """The library that a file belongs to; empty if it is the user's own.

    >>> library_of(torch.nn.__file__), library_of(os.__file__), library_of("train.py")
    ('torch', 'os', '')
    """
    if filename.startswith("<frozen "):
        return filename.removeprefix("<frozen ").partition(".")[0].rstrip(">")
    path = Path(os.path.expanduser(filename))  # noqa: PTH111 - a name that cannot be expanded stays
    for root, own in zip(_ROOTS, (*_OWN, "", "", ""), strict=True):
        if path.is_relative_to(root / own):
            parts = path.relative_to(root).parts
            return Path(parts[0] if parts[0] != "site-packages" else parts[1]).stem
    return ""
