"""What is said of an error in one line: the user's own words, and the user's own line."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nbddp.errors import say_ranks
from nbddp.worker.tracebacks import walk

MAX_LEAVES = 3  # of a group that are named
MAX_WORDS = 120  # characters of an error that stands beside another
# torch.distributed.checkpoint adds the rank whose traceback it is
_WRAPPED = re.compile(r"Traceback \(most recent call last\):(?: \(RANK (\d+)\))?\n")
# what torch says of the process, or the thread, in which the error was
_WHERE = re.compile(r"(?:Caught \S+ in |-- )(.+?)(?:\.| terminated with .*)$", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)', re.MULTILINE)
_LAST = re.compile(r"^([\w.]+)(?:: (.*))?$", re.DOTALL)

IsCellFile = Callable[[str], bool]
NameOf = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Headline:
    """What the line is made of.

    Attributes:
        name: the exception's.
        text: what it says.
        line: the cell's, 0 if it is in none; or the script's whose ``file`` is named.
        because: what else belongs to it: the error that it came from, the process that it was in.
    """

    name: str
    text: str
    line: int = 0
    because: str = ""
    file: str = ""


def headline_of(
    error: BaseException, is_cell_file: IsCellFile, name_of: NameOf = lambda _filename: ""
) -> Headline:
    """Find it: within what a library has wrapped around it, and with what it came from.

    Args:
        error: what ended the cell.
        is_cell_file: whether code of this file name is a cell's, or a script's.
        name_of: what a script's file is called, or another cell; empty for the cell that runs.
    """
    filename, line = _place(error, is_cell_file)
    name, text, file = type(error).__name__, text_of(error), name_of(filename)
    wrapped = _unwrapped(text, is_cell_file)
    if wrapped is not None:
        has_line = bool(wrapped.line)
        return replace(
            wrapped,
            line=wrapped.line if has_line else line,
            file=name_of(wrapped.file) if has_line else file,
        )
    leaves = list(_leaves(error))
    if leaves != [error]:
        said = str(getattr(error, "message", text))
        return Headline(name, f"{said}: {_say_leaves(leaves, is_cell_file)}", line, file=file)
    if not text and isinstance(error, AssertionError):
        text = _code_of(error, is_cell_file)
    return Headline(name, text, line, _cause(error, text), file)


def text_of(error: BaseException) -> str:
    """What an exception says, also of one that cannot even do that.

    >>> text_of(ValueError("too low"))
    'too low'
    """
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - whatever the user's own __str__ raises
        return f"its text cannot be had: __str__() raised {type(inner).__name__}"


def _place(error: BaseException, is_cell_file: IsCellFile) -> tuple[str, int]:
    """The innermost line of a cell that it came through, 0 for none."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk(error.__traceback__)]
    inside = [place for place in places if is_cell_file(place[0])]
    return inside[-1] if inside else ("", 0)


def _unwrapped(text: str, is_cell_file: IsCellFile) -> Headline | None:
    """The error whose traceback another one's text has, as that of a DataLoader's worker.

    Its file is the whole name.
    """
    found = list(_WRAPPED.finditer(text))
    if not found:
        return None
    before, last = text[: found[-1].start()], text[found[-1].end() :]
    said = re.search(r"^\S.*", last, re.MULTILINE | re.DOTALL)
    parts = _LAST.match(said.group().strip()) if said else None
    if parts is None:
        return None
    places = [(file, int(line)) for file, line in _FRAME.findall(last) if is_cell_file(file)]
    where = _WHERE.search(before)
    name = parts[1].rpartition(".")[2]
    ranks = [int(each[1]) for each in found if each[1]]
    place = f"in {where[1]}" if where else f"on rank {ranks[-1]}" if ranks else ""
    if more := ranks[:-1]:
        place += f"; {say_ranks(more)} also failed"
    file, line = places[-1] if places else ("", 0)
    return Headline(name, parts[2] or "", line, place, file)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, and in its groups; of any other error itself."""
    inner = getattr(error, "exceptions", None)
    if not isinstance(inner, tuple):
        yield error
        return
    for each in inner:
        if isinstance(each, BaseException):
            yield from _leaves(each)


def _say_leaves(leaves: list[BaseException], is_cell_file: IsCellFile) -> str:
    told = []
    for each in leaves[:MAX_LEAVES]:
        _, line = _place(each, is_cell_file)
        told.append(_in_short(each) + (f" (line {line})" if line else ""))
    left = len(leaves) - MAX_LEAVES
    return "; ".join(told) + (f"; and {left} more" if left > 0 else "")


def _in_short(error: BaseException) -> str:
    name, text = type(error).__name__, text_of(error)
    if wrapped := _unwrapped(text, lambda _filename: False):
        name, text = wrapped.name, wrapped.text
    text = text.strip().partition("\n")[0]
    text = text if len(text) <= MAX_WORDS else text[: MAX_WORDS - 4] + " ..."
    return f"{name}{': ' if text else ''}{text}"


def _cause(error: BaseException, text: str) -> str:
    """Name the first error of the chain of causes, unless ``text`` says it already.

    The traceback of another process is no such error.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        if type(cause).__name__ in ("_RemoteTraceback", "RemoteTraceback"):
            break
        chain.append(cause)
    root = chain[-1]
    if root is error or ((words := text_of(root)) and words in text):
        return ""
    return f"caused by {_in_short(root)}"


def _code_of(error: BaseException, is_cell_file: IsCellFile) -> str:
    """The code of the line, for an assertion that says nothing."""
    filename, line = _place(error, is_cell_file)
    return linecache.getline(filename, line).strip() if line else ""
