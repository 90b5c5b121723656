"""`%ddp timeline`: which ranks waited for which rank in a cell."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from nbddp.extensions.timeline.collective_timeline import Timeline, UnfinishedCollective
from nbddp.formatting import format_bytes, format_line, format_ranks, format_seconds, plural
from nbddp.ui.report.blocks import Block, Mood, Picture, Report, Table, Text, note
from nbddp.ui.wording import describe_straggler

MAX_ROWS = 32  # ranks in the picture and in the table
MAX_AWAITED = 8  # of these, ranks that others wait for
MAX_COLUMNS = 10  # in the table, for ranks that others wait for
MAX_NAMED = 16  # ranks in a line of text
MAX_OVERLAPS = 16  # rows of DDP's measurements
MAX_BUCKETS = 6  # sizes in a row
SHOWN_LINES = 5
MIN_SECONDS = 0.0005  # shorter times are shown as 0
LETTERS = {"gone": " ", "wait": "#", "data": "d"}
COMPUTE = "."


def timeline_report(timeline: Timeline) -> Report:
    """Report the collectives of a cell, and how long ranks waited in them."""
    if timeline.is_empty:
        return Report(_describe_empty(timeline))
    unfinished = [
        _describe_unfinished(collective, is_over=timeline.is_over, died=timeline.died)
        for collective in timeline.unmet
    ]
    warnings = [*unfinished, *([describe_straggler(timeline.awaited)] if timeline.awaited else [])]
    title = _title(timeline)
    alt = f"ranks as rows, time across: {title}; the table has the numbers"
    return Report(
        title,
        [
            *(Text(each, Mood.WARN) for each in warnings),
            Picture(lambda: _draw(timeline), alt, text="\n".join(timeline_as_text(timeline))),
            _waiting_table(timeline),
            *map(Text, _facts(timeline)),
            *_overlap_blocks(timeline),
            *map(note, _notes(timeline)),
        ],
    )


def _describe_unfinished(
    unfinished: UnfinishedCollective, *, is_over: bool, died: Container[int] = ()
) -> str:
    """Say which ranks wait or waited, in which collective, and for which ranks.

    >>> from nbddp.wire.collective import Collective
    >>> call, until = Collective("barrier", 6), {0: 4.0, 2: 4.0}
    >>> barrier = UnfinishedCollective(call, {0: 1.0, 2: 1.5}, until, (1,), {(9, ""): 3})
    >>> _describe_unfinished(barrier, is_over=True)
    'ranks 0,2 waited in barrier #6 to the end, 3.0 s: rank 1 did not come, it was at line 9'
    >>> _describe_unfinished(barrier, is_over=False)
    'ranks 0,2 have waited in barrier #6 for 3.0 s: rank 1 has not come, it was at line 9'
    >>> _describe_unfinished(barrier, is_over=True, died=[1])
    'ranks 0,2 waited in barrier #6 to the end, 3.0 s: rank 1 died, it was at line 9'
    """
    seconds = format_seconds(max(unfinished.wait_seconds.values()))
    has_one = len(unfinished.arrivals) == 1
    waited = f"waited in {unfinished.call} to the end, {seconds}"
    if not is_over:
        waited = f"{'has' if has_one else 'have'} waited in {unfinished.call} for {seconds}"
    missing = [rank for rank in unfinished.missing if rank not in died]
    not_come = "did not" if is_over else "has not" if len(missing) == 1 else "have not"
    # a rank that died may have entered the collective without reporting it
    dead = [rank for rank in unfinished.missing if rank in died]
    reasons = [f"{format_ranks(missing)} {not_come} come"] if missing else []
    reasons += [f"{format_ranks(dead)} died"] if dead else []
    was = "it was" if len(unfinished.missing) == 1 else "they were mostly"
    at = f", {was} at {format_line(*unfinished.place)}" if unfinished.place else ""
    return f"{format_ranks(sorted(unfinished.arrivals))} {waited}: {', '.join(reasons)}{at}"


def _describe_empty(timeline: Timeline) -> str:
    """Say why the timeline is empty.

    >>> _describe_empty(Timeline(cell=3, ranks=(0, 1), span=(0.0, 0.0)))
    'no collectives were seen in cell 3: no rank waited for another'
    """
    if not timeline.cell:
        return "no collectives were seen: no cell has run yet"
    reason = ": no rank waited for another" if timeline.is_over else " so far; it still runs"
    return f"no collectives were seen in cell {timeline.cell}{reason}"


def _title(timeline: Timeline) -> str:
    steps = len(timeline.steps)
    if steps > 1 and timeline.span[0] == timeline.steps[0][0]:
        steps -= 1
    facts = [
        f"collectives of cell {timeline.cell}" + ("" if timeline.is_over else " so far"),
        plural(steps, "step") if steps else "",
        plural(len(timeline.meetings), "collective"),
        format_seconds(timeline.seconds),
    ]
    return " · ".join(filter(None, facts))


# ---- the picture, and its text form


def _draw(timeline: Timeline) -> tuple[bytes, int]:
    from nbddp.charts.figure import png_of  # loads matplotlib
    from nbddp.extensions.timeline.figure import draw_timeline

    return png_of(draw_timeline(timeline, shown_ranks(timeline)))


def shown_ranks(timeline: Timeline) -> Sequence[int]:
    """Return the ranks to show: of many, first those that others wait for, then those that wait.

    >>> line = Timeline(cell=1, ranks=range(64), span=(0, 1), waits={(60, 63): 0.5, (61, 63): 0.9})
    >>> shown_ranks(line)[-4:]
    [28, 60, 61, 63]
    """
    if len(timeline.ranks) <= MAX_ROWS:
        return timeline.ranks
    waiting, awaited = dict.fromkeys(timeline.ranks, 0.0), dict.fromkeys(timeline.ranks, 0.0)
    for (waiter, late), seconds in timeline.waits.items():
        waiting[waiter] += seconds
        awaited[late] += seconds
    first = sorted(filter(awaited.get, awaited), key=lambda rank: -awaited[rank])[:MAX_AWAITED]
    rest = sorted(waiting, key=lambda rank: -waiting[rank])
    return sorted([*dict.fromkeys([*first, *rest])][:MAX_ROWS])


def timeline_as_text(timeline: Timeline, columns: int = 72) -> Iterator[str]:
    """Yield a row of letters for each rank. A letter is what the rank did most of that time.

    >>> line = Timeline(cell=1, ranks=(0,), span=(0.0, 8.0), loads={0: [(2.0, 4.0)]})
    >>> [*timeline_as_text(line, 8)][1]
    '       0  ..dd....'
    """
    died = "   nothing: it died" if timeline.died else ""
    yield f"    rank  . computes   # waits for the last rank   d waits for data{died}"
    width = max(timeline.seconds, 1e-9) / columns
    for rank in shown_ranks(timeline):
        shares = [dict.fromkeys(LETTERS, 0.0) for _ in range(columns)]  # of each column
        for kind, began, end in timeline.pieces(rank):
            a, b = (began - timeline.span[0]) / width, (end - timeline.span[0]) / width
            for place in range(max(0, int(a)), min(columns, int(b) + 1)):
                shares[place][kind] += max(0.0, min(b, place + 1) - max(a, place))
        yield f"{rank:>8}  {''.join(map(_letter, shares))}".rstrip()


def _letter(shares: Mapping[str, float]) -> str:
    if sum(shares.values()) < 0.5:
        return COMPUTE
    return LETTERS[max(shares, key=lambda kind: shares[kind])]


# ---- numbers


def _waiting_table(timeline: Timeline) -> Table:
    """Return a table of the seconds that each rank waited for each other rank."""
    awaited = dict.fromkeys(timeline.ranks, 0.0)
    for (_, rank), seconds in timeline.waits.items():
        awaited[rank] += seconds
    columns = list(timeline.ranks)
    if len(columns) > MAX_COLUMNS:
        most = sorted(columns, key=lambda rank: -awaited[rank])[:MAX_COLUMNS]
        columns = sorted(rank for rank in most if awaited[rank] >= MIN_SECONDS)
    rows = []
    for rank in shown_ranks(timeline):
        waits = {other: timeline.waits.get((rank, other), 0.0) for other in timeline.ranks}
        times = ["" if other == rank else _format_time(waits[other]) for other in columns]
        rows.append([f"rank {rank}", *times, _format_time(sum(waits.values()))])
    head = ["waited for", *(f"rank {rank}" for rank in columns), "all"]
    return Table(head, rows, "seconds that ranks waited, by rank waited for")


def _format_time(seconds: float) -> str:
    if seconds < MIN_SECONDS:
        return "0"
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else format_seconds(seconds)


def _format_short_time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else _format_time(seconds)


def _facts(timeline: Timeline) -> Iterator[str]:
    if any(timeline.lines.values()):
        places = ", ".join(_place_shares(timeline.lines))
        yield f"while others waited, the last rank was at {places}"
    loading = [
        f"rank {rank} {_format_time(seconds)}"
        for rank in shown_ranks(timeline)
        if (seconds := timeline.loading(rank)) >= MIN_SECONDS
    ]
    if loading:
        yield f"waited for data: {', '.join(loading)}"
    if (late := timeline.loading_awaited()) >= MIN_SECONDS:
        yield f"ranks waited {_format_time(late)} for a rank that itself waited for data"
    for title, took in list(timeline.on_gpu.items())[:SHOWN_LINES]:
        times = [f"rank {rank} {_format_short_time(it)}" for rank, it in took.items()][:MAX_NAMED]
        listed = ", ".join(times)
        yield f"{title} on the GPU, on average and with the waiting there: {listed}"


def _place_shares(lines: Mapping[str, float]) -> list[str]:
    """Return the first lines of code, each with its fraction of the waiting if there are several.

    >>> _place_shares({"line 9": 3.0, "line 4": 1.0}), _place_shares({"line 9": 2.0})
    (['line 9 (75 %)', 'line 4 (25 %)'], ['line 9'])
    """
    total, shown = sum(lines.values()), list(lines.items())[:SHOWN_LINES]
    if len(lines) == 1:
        return [place for place, _ in shown]
    return [f"{place} ({100 * seconds / total:.0f} %)" for place, seconds in shown]


def _overlap_blocks(timeline: Timeline) -> list[Block]:
    """Return a table of the times that DDP measured for each model and rank."""
    if not timeline.overlaps:
        return []
    head = ["DDP", "forward", "backward", "communication", "overlapped", "exposed", "buckets"]
    rows = []
    for model in timeline.overlaps[:MAX_OVERLAPS]:
        times = model.forward, model.backward, model.communication, model.overlapped, model.exposed
        name = f"{model.name}, rank {model.rank}"
        rows.append([name, *map(_format_short_time, times), _buckets(model.buckets)])
    newest = max(each.iteration for each in timeline.overlaps)
    words = (
        f"averages of the first iterations and of every hundredth, up to {newest}; communication "
        "includes waiting, and is exposed where it does not overlap with the backward pass"
    )
    return [Table(head, rows, "times measured by DDP"), note(words)]


def _buckets(sizes: Sequence[int]) -> str:
    texts = [format_bytes(size) for size in sizes[:MAX_BUCKETS]]
    more = len(sizes) - len(texts)
    return " + ".join([*texts, *([f"{more} more"] if more else [])])


def _notes(timeline: Timeline) -> Iterator[str]:
    if len(shown := shown_ranks(timeline)) < len(timeline.ranks):
        which = "the ranks that waited, or that others waited for"
        yield f"{len(shown)} of {len(timeline.ranks)} ranks are shown: {which}"
    if left_out := timeline.lost + timeline.thinned:
        yield f"{plural(left_out, 'more collective')}: too many, or too fast, to keep"
    if timeline.error:
        yield f"clocks of the nodes: ± {1000 * timeline.error:.1f} ms"
    if not timeline.unmet and not any(each.wait_seconds for each in timeline.meetings):
        hint = "; `--env TORCH_NCCL_ENABLE_TIMING=1` adds the times on the GPU"
        measured = "" if timeline.on_gpu else hint
        yield (
            "waiting is unknown: ranks do not wait in these collectives, or NCCL runs them, "
            f"and these are the times of enqueueing{measured}"
        )
