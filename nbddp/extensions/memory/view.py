"""The memory of the ranks as tables: a row for each holder, a column for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from nbddp.extensions.memory.messages import GPU, OTHER, PROCESS, MemoryAnswer, Used
from nbddp.formatting import format_bytes, format_ranks, plural
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.report.blocks import Cell, Mood, Report, Table, Text, note

MAX_RANKS, MAX_ROWS = 8, 15
MIN_BYTES = 1 << 16  # smaller holders share a row
RUNS = "a cell runs, so these are the last samples; after it, `%ddp memory` says who holds what"
SMALLER, REST, SHARED = "smaller holders", "everything else", "shared with other processes"
NOT_WRITTEN, LIBRARIES, FREE = "not written to yet", "tensors of libraries", "free"
NO_NAME = {  # the rows without a name, in this order, below the holders
    SMALLER: "",
    OTHER: "",
    LIBRARIES: "not visible from Python",
    SHARED: "imported modules",
    FREE: "kept by torch",
    REST: "Python, libraries, freed memory",
    NOT_WRITTEN: "takes no memory",
}
Answers = Mapping[int, MemoryAnswer]
Row = tuple[str, str]  # the name and the kind of a holder


def memory_report(answers: Answers, problems: Sequence[str] = ()) -> Report:
    """Report who holds the memory of each rank."""
    total = sum(each.used[PROCESS].share for each in answers.values())
    together = f" · {format_bytes(total)} together, shared memory counted once" if total else ""
    title = f"memory of {format_ranks([*answers])}{together}"
    return Report(title, [*_tables(answers), *(Text(each, Mood.BAD) for each in problems)])


def freed_report(answers: Answers, problems: Sequence[str] = ()) -> Report:
    """Report how much memory each rank gave back, and who holds the rest."""
    head, rows = ["rank"], [[Cell(str(rank), rank=rank)] for rank in answers]
    for place in (PROCESS, GPU):
        head += [f"{place}: given back", "before", "now"]
        for row, answer in zip(rows, answers.values(), strict=True):
            before, now = (used.get(place, Used()).total for used in (answer.before, answer.used))
            freed = Cell(format_bytes(max(0, before - now)), Mood.STRONG)
            is_used = before or now
            row += (
                [freed, *map(Cell, map(format_bytes, (before, now)))] if is_used else [Cell("")] * 3
            )
    table = Table(head, rows, "memory given back").without_empty_columns()
    rest = memory_report(answers, problems)
    return Report(
        f"{format_ranks([*answers])} gave memory back",
        [table, note("who holds the rest:"), *rest.blocks],
    )


def sampled_report(ranks: Sequence[RankSnapshot]) -> Report:
    """Report the last samples of ranks that run a cell."""
    rows: list[list[str | Cell]] = [
        [
            Cell(str(rank.rank), rank=rank.rank),
            format_bytes(rank.memory) if rank.memory else "no sample yet",
            format_bytes(rank.gpu_memory) if rank.gpu else "",
            format_bytes(rank.gpu_reserved) if rank.gpu else "",
        ]
        for rank in ranks
        if rank.is_alive
    ]
    head = ["rank", "process", "GPU: tensors", "GPU: kept by torch"]
    table = Table(head, rows, "memory").without_empty_columns()
    return Report("memory while a cell runs", [table, note(RUNS)])


def _tables(answers: Answers) -> Iterator[Table | Text]:
    """Yield a table for each place; of many ranks, those that use most."""
    for place in (PROCESS, GPU):
        with_place = {rank: each for rank, each in answers.items() if place in each.used}
        used = {rank: each.used[place].total for rank, each in with_place.items()}
        shown = sorted(sorted(used, key=lambda rank: -used[rank])[:MAX_RANKS])
        columns = [_shares(answers[rank], place) for rank in shown]
        rows = [[*_titles(*row), *(_size(each[row]) for each in columns)] for row in _rows(columns)]
        totals = [Cell(format_bytes(used[rank]), Mood.STRONG) for rank in shown]
        head = [place, "", *(f"rank {rank}" for rank in shown)]
        if shown:
            rows.append([Cell("total", Mood.STRONG), Cell(""), *totals])
            yield Table(head, rows, f"memory of the {place}")
        if more := len(used) - len(shown):
            yield note(f"and {plural(more, 'more rank')}, with less")


def _titles(name: str, kind: str) -> tuple[Cell, Cell]:
    if name:
        return Cell(name), Cell(kind)
    return Cell(kind, Mood.MUTED), Cell(NO_NAME[kind], Mood.MUTED)


def _size(size: int) -> Cell:
    if not size:
        return Cell("")
    return Cell(format_bytes(size) if size > 0 else f"-{format_bytes(-size)}")


def _rows(columns: Sequence[Counter[Row]]) -> list[Row]:
    """Return the rows: named holders, the largest first, and then the others.

    Put holders that are small on all ranks into one row.
    """
    largest = {row: max(column[row] for column in columns) for column in columns for row in column}
    of_name: Counter[str] = Counter()
    for (name, _), size in largest.items():
        of_name[name] += size
    named = [row for row in largest if row[0]]
    named.sort(key=lambda row: (-of_name[row[0]], row[0], -largest[row]))
    big = sorted(named, key=lambda row: -largest[row])[:MAX_ROWS]
    shown = [row for row in named if row in big and largest[row] >= MIN_BYTES]
    for column in columns:
        column["", SMALLER] = sum(column[row] for row in named if row not in shown)
    others = [("", kind) for kind in NO_NAME]
    return shown + [row for row in others if any(column[row] for column in columns)]


def _shares(answer: MemoryAnswer, place: str) -> Counter[Row]:
    """Return the holders of a rank's memory; together they have its total."""
    used = answer.used[place]
    holders = [each for each in answer.holders if each[0] == place]
    shares = Counter({(name, kind): size for _, name, kind, size in holders})
    shares["", SHARED] = used.shared
    if place == GPU:
        shares["", FREE] = used.total - used.tensors
    rest = used.total - shares.total()
    shares["", NOT_WRITTEN if rest < 0 else LIBRARIES if place == GPU else REST] = rest
    return shares
