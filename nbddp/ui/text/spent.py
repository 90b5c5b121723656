"""Where a cell's time went, as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nbddp.errors import say_ranks
from nbddp.formatting import plural
from nbddp.record.spent import Timeline
from nbddp.ui.rows import said_rows, shown_ranks
from nbddp.ui.words import aligned, say_awaited, say_seconds, say_unmet

SHOWN_LINES = 5
MAX_OVERLAPS = 16  # rows of DDP's measurements
MAX_BUCKETS = 6  # that are named
LEAST = 0.0005  # seconds that are said
FITTING = 8  # ranks that fit beside each other as text,
FITTING_PAGE = 10  # and in a page
MAX_NAMED = 16  # ranks that are named in a line


def spent_text(line: Timeline) -> str:
    """All that is said of it."""
    if line.is_empty:
        return nothing(line)
    rows = [f"{rank:>8}  {said}".rstrip() for rank, said in said_rows(line)]
    died = "   nothing: it died" if line.died else ""
    parts = [
        [spent_title(line)],
        late(line),
        ["", f"    rank  . computes   # waits for the last rank   d waits for data{died}", *rows],
        ["", *matrix_lines(line)],
        list(line_facts(line)),
        ["", *overlap_lines(line)] if line.overlaps else [],
        list(notes(line)),
    ]
    return "\n".join(each for part in parts for each in part)


def late(line: Timeline) -> list[str]:
    """Who is waited for, and who was waited for until the end."""
    unmet = [say_unmet(each, is_over=line.is_over, died=line.died) for each in line.unmet]
    return [*unmet, *([say_awaited(line.awaited)] if line.awaited else [])]


def nothing(line: Timeline) -> str:
    """What is said of a cell without collectives.

    >>> nothing(Timeline(cell=3, ranks=(0, 1), span=(0.0, 0.0)))
    'no collectives were seen in cell 3: there is nobody to wait for'
    """
    if not line.cell:
        return "no collectives were seen: no cell has run yet"
    so_far = ": there is nobody to wait for" if line.is_over else ", which runs, so far"
    return f"no collectives were seen in cell {line.cell}{so_far}"


def spent_title(line: Timeline) -> str:
    """What is looked at, in one line."""
    steps = len(line.steps) - 1 if line.steps and line.span[0] == line.steps[0][0] else 0
    steps = steps or len(line.steps)
    facts = [
        f"collectives of cell {line.cell}" + ("" if line.is_over else " so far"),
        plural(steps, "step") if steps else "",
        plural(len(line.meetings), "collective"),
        say_seconds(line.seconds),
    ]
    return " · ".join(filter(None, facts))


def matrix(line: Timeline, most: int = FITTING_PAGE) -> tuple[list[int], list[list[str]]]:
    """Seconds that each rank waited for each other, in words; the last column is their sum.

    The ranks that are waited for are those of the columns: of many only those that anybody waits
    for, and of these the ``most`` that are waited for most.
    """
    awaited = dict.fromkeys(line.ranks, 0.0)
    for (_, rank), seconds in line.waits.items():
        awaited[rank] += seconds
    ranked = sorted(awaited, key=lambda rank: -awaited[rank])[:most]
    is_all = len(awaited) <= FITTING
    columns = sorted(rank for rank in ranked if is_all or awaited[rank] >= LEAST)
    rows = []
    for rank in shown_ranks(line):
        waits = [line.waits.get((rank, each), 0.0) for each in columns]
        whole = sum(line.waits.get((rank, each), 0.0) for each in line.ranks)
        said = [_say(it) if each != rank else "" for each, it in zip(columns, waits, strict=True)]
        rows.append([f"rank {rank}", *said, _say(whole)])
    return columns, rows


def matrix_lines(line: Timeline) -> list[str]:
    """The matrix as lines, which shall not be broken."""
    columns, rows = matrix(line, FITTING)
    head = ["waited for", *(f"rank {rank}" for rank in columns), "all"]
    return aligned([head, *rows])


def _say(seconds: float) -> str:
    if seconds < LEAST:
        return "0"
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else say_seconds(seconds)


def line_facts(line: Timeline) -> Iterator[str]:
    """Where the awaited ones were, and who waited for data."""
    if any(line.lines.values()):
        yield f"while others waited, the last rank was at {', '.join(_shares(line.lines))}"
    loading = [
        f"rank {rank} {_say(seconds)}"
        for rank in shown_ranks(line)
        if (seconds := line.loading(rank)) >= LEAST
    ]
    if loading:
        yield f"waited for data: {', '.join(loading)}"
    for title, took in list(line.on_gpu.items())[:SHOWN_LINES]:
        each = ", ".join(f"rank {rank} {_short(it)}" for rank, it in list(took.items())[:MAX_NAMED])
        last = min(took, key=lambda rank: took[rank])
        which = f"; rank {last} mostly comes last" if _differ(took) else ""
        yield f"{title} on the GPU, on average and with the waiting there: {each}{which}"
    if (late := line.loading_awaited()) >= LEAST:
        yield f"ranks waited {_say(late)} for one that itself waited for data"


def _shares(lines: Mapping[str, float]) -> list[str]:
    """The first few lines, each with its part of the waiting, unless there is just one.

    >>> _shares({"line 9": 3.0, "line 4": 1.0}), _shares({"line 9": 2.0})
    (['line 9 (75 %)', 'line 4 (25 %)'], ['line 9'])
    """
    whole, shown = sum(lines.values()), list(lines.items())[:SHOWN_LINES]
    if len(lines) == 1:
        return [place for place, _ in shown]
    return [f"{place} ({100 * seconds / whole:.0f} %)" for place, seconds in shown]


def _differ(took: Mapping[int, float]) -> bool:
    """Whether it took some ranks so much longer that they must have waited."""
    return max(took.values()) > 1.2 * min(took.values()) + LEAST


OVERLAP_HEAD = ("DDP", "forward", "backward", "communication", "beside it", "alone", "buckets")


def overlap_rows(line: Timeline) -> list[tuple[str, ...]]:
    """What DDP has measured, a row for each model and rank."""
    return [
        (
            f"{each.name}, rank {each.rank}",
            *map(_short, (each.forward, each.backward, each.sending, each.overlap, each.bare)),
            _say_buckets(each.buckets),
        )
        for each in line.overlaps[:MAX_OVERLAPS]
    ]


def overlap_notes(line: Timeline) -> Iterator[str]:
    """What the numbers are, and in which order the buckets of a model are sent."""
    newest = max(each.iteration for each in line.overlaps)
    yield (
        f"averages of the first iterations and of every hundredth, up to {newest}; communication "
        "has the waiting in it, and was beside the backward or alone"
    )
    told: dict[str, tuple[str, ...]] = {}
    for each in line.overlaps:
        if len(each.order) > 1:
            told.setdefault(each.name, each.order)
    for name, order in told.items():
        shown = " | ".join(_shorten_order(each) for each in order[:MAX_BUCKETS])
        more = " | ..." if len(order) > MAX_BUCKETS else ""
        yield f"{name} sends its parameters in the order {shown}{more}"


def overlap_lines(line: Timeline) -> list[str]:
    """The same as lines of text."""
    return [*aligned([OVERLAP_HEAD, *overlap_rows(line)]), *overlap_notes(line)]


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else _say(seconds)


def _say_buckets(sizes: tuple[int, ...]) -> str:
    said = [f"{size / 2**20:.2g}" if size < 1e6 else f"{size / 2**20:.1f}" for size in sizes]
    if len(said) > MAX_BUCKETS:
        said = [*said[: MAX_BUCKETS - 1], f"{len(said) - MAX_BUCKETS + 1} more"]
    return f"{' + '.join(said)} MiB" if said else ""


def _shorten_order(indices: str) -> str:
    """The numbers of a bucket's parameters, without most of many.

    >>> _shorten_order("9 8 7"), _shorten_order("9 8 7 6 5 4")
    ('9 8 7', '9 8 ... 4')
    """
    each = indices.split()
    return indices if len(each) <= 4 else f"{each[0]} {each[1]} ... {each[-1]}"


def notes(line: Timeline) -> Iterator[str]:
    """What is not in it, and how far it can be trusted."""
    if len(shown := shown_ranks(line)) < len(line.ranks):
        some = f"{len(shown)} of {len(line.ranks)} ranks"
        yield f"{some} are shown: who waits, or is waited for, most"
    if len(line.ranks) > FITTING:
        yield "a rank that nobody waits for has no column"
    if line.lost:
        yield f"{line.lost} collectives were begun faster than they could be read: not in it"
    if line.thinned:
        yield f"{line.thinned} more were left out: too many to tell of each"
    if line.died:
        yield f"{say_ranks(sorted(line.died))} died: its last collectives may not have been told of"
    if line.error:
        yield f"clocks of the nodes: ± {1000 * line.error:.1f} ms"
    if not line.unmet and not any(each.waits for each in line.meetings):
        yield (
            "no waiting is reckoned: in none of these collectives all ranks wait for each other, "
            "or they are NCCL's, whose calls return before the others come: these are times of "
            "enqueueing"
            + ("" if line.on_gpu else "; `--env TORCH_NCCL_ENABLE_TIMING=1` adds those on the GPU")
        )
