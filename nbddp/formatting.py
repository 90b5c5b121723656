"""Format counts, durations, memory, lists of names, exits of processes, lines and ranks."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

MAX_SHOWN = 4  # names that are shown of a long list
BY_USER = "by you"  # the cause of a rank's death: `%ddp kill`, or the button


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "step"), plural(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Return an amount of memory.

    >>> [format_bytes(each) for each in (1, 36, 20_480, 1_050_624, 300 << 20, 5 << 29, 141 << 30)]
    ['1 byte', '36 bytes', '20 KiB', '1.0 MiB', '300 MiB', '2.5 GiB', '141.0 GiB']
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            digits = 1 if count < 10 * size or unit == "GiB" else 0
            return f"{count / size:.{digits}f} {unit}"
    return plural(round(count), "byte")


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> [format_seconds(each) for each in (0.0312, 7.26, 59.96, 3725)]
    ['31 ms', '7.3 s', '1:00', '1:02:05']
    """
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def cut_text(text: str, most: int, end: str = "…") -> str:
    """Return the first characters of a text that has more than ``most``, with an end mark.

    >>> cut_text("abcdef", 6), cut_text("abcdef", 5), cut_text("abcdef", 5, " ...")
    ('abcdef', 'abcd…', 'a ...')
    """
    return text if len(text) <= most else text[: most - len(end)] + end


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun.

    >>> with_article("Answer"), with_article("CellEnded")
    ('an Answer', 'a CellEnded')
    """
    return f"an {noun}" if noun[:1] in "AEIOUaeiou" else f"a {noun}"


def format_few(names: Sequence[str], count: int = 0) -> str:
    """Return the first few names and the number of the others.

    Args:
        names: all names, or the first ones.
        count: the number of all names, if ``names`` has only the first ones.

    >>> format_few(["a", "b"]), format_few(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c, d and 1 more')
    """
    shown = ", ".join(names[:MAX_SHOWN])
    more = (count or len(names)) - MAX_SHOWN
    return f"{shown} and {more} more" if shown and more > 0 else shown


def list_some(names: Sequence[str], most: int, *, more: int = 0) -> str:
    """Return the first names, and the number of the others together with ``more``.

    >>> list_some(["a", "b"], 2), list_some(["a", "b", "c"], 2, more=1000)
    ('a, b', 'a, b, 1,001 more')
    """
    others = max(0, len(names) - most) + more
    return ", ".join([*names[:most], *([f"{others:,} more"] if others else [])])


def describe_exit(exitcode: int | None, cause: str = "") -> str:
    """Return how a process ended, in words.

    ``cause`` is BY_USER, or the fault that fired before.

    >>> describe_exit(-9)
    'was killed by SIGKILL'
    >>> describe_exit(3)
    'exited with code 3'
    >>> describe_exit(-9, BY_USER)
    'was killed by you'
    >>> describe_exit(-9, "kill@rank=1,step=30")
    'was killed by SIGKILL after the fault kill@rank=1,step=30'
    >>> describe_exit(None)
    'disappeared'
    """
    if cause == BY_USER and exitcode == -signal.SIGKILL:
        return f"was killed {BY_USER}"
    if cause and cause != BY_USER:
        return f"{describe_exit(exitcode)} after the fault {cause}"
    if exitcode is None:
        return "disappeared"
    if exitcode < 0:
        try:
            return f"was killed by {signal.Signals(-exitcode).name}"
        except ValueError:  # a real-time signal has no name
            return f"was killed by signal {-exitcode}"
    return f"exited with code {exitcode}"


def format_line(line: int, file: str = "") -> str:
    """Return a line of a cell or a script as text.

    >>> format_line(3), format_line(3, "train.py")
    ('line 3', 'train.py line 3')
    """
    return f"{file} line {line}".lstrip()


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, with ranges.

    >>> format_ranks([1]), format_ranks([0, 1, 2, 3]), format_ranks([0, 2, 3])
    ('rank 1', 'ranks 0-3', 'ranks 0,2-3')
    """
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {format_number_ranges(ranks)}"


def ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of each text.

    >>> ranks_by_text({0: "a", 1: "b", 2: "a"})
    {'a': [0, 2], 'b': [1]}
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return ranks


def format_number_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, sorted and with ranges.

    >>> format_number_ranges([3, 1, 2, 7])
    '1-3,7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def unknown_rank(rank: int, world_size: int) -> str:
    """Say that there is no rank with this number."""
    return f"there is no rank {rank}; the group has ranks 0 to {world_size - 1}"
