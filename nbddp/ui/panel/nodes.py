"""Ranks of several nodes as a table: a row for each node, and one for each rank that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nbddp.errors import say_ranks
from nbddp.formatting import format_bytes
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.by_node import NodeOfRanks
from nbddp.ui.gpus import short_gpu
from nbddp.ui.panel.bare import ink
from nbddp.ui.panel.html import COLUMNS, escape

MAX_NODES = 32  # with a row each; of more those that matter
MAX_OTHERS = 16  # ranks with a row each
_OF_A_RANK = dict(COLUMNS)
_LEFT_OUT = ("node", "progress")  # of a rank's columns

_Cells = dict[str, str]  # what stands in a row, by the column's title


def node_table(nodes: Sequence[NodeOfRanks]) -> str:
    """All nodes; the columns are those of ranks, and what is empty all the way down is left out."""
    shown = _most_telling(nodes)
    open_ranks = _chosen([each for node in shown for each in node.others])
    rows: list[tuple[str, _Cells]] = []
    for node in shown:
        rows.append(("nbddp-node", _of_node(node)))
        rows += [("", _of_rank(each)) for each in node.others if each in open_ranks]
    titles = [title for title in _titles() if any(cells.get(title) for _, cells in rows)]
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join(_row(kind, [cells.get(title, "") for title in titles]) for kind, cells in rows)
    others = sum(len(node.others) for node in nodes)
    notes = [_and_more(len(nodes) - len(shown), "nodes that are alike")]
    notes.append(_and_more(others - len(open_ranks), "ranks that differ"))
    return (
        f'<table class="nbddp-ranks nbddp-nodes" aria-label="nodes"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>{''.join(notes)}"
    )


def _titles() -> Iterator[str]:
    yield "node"
    yield from (title for title, _ in COLUMNS if title not in _LEFT_OUT)


def _row(kind: str, cells: Sequence[str]) -> str:
    return f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _and_more(count: int, what: str) -> str:
    return f'<div class="nbddp-muted">and {count} more {what}</div>' if count else ""


def _most_telling(nodes: Sequence[NodeOfRanks]) -> list[NodeOfRanks]:
    """All that fit: those that are odd or have a rank that is, in their order."""
    chosen = sorted(nodes, key=lambda node: (not node.is_odd, not node.others, node.number))
    return sorted(chosen[:MAX_NODES], key=lambda node: node.number)


def _chosen(others: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """All that fit: those that failed first."""
    known = sorted(others, key=lambda each: (not each.is_cause, each.is_well, each.rank))
    return known[:MAX_OTHERS]


def _of_rank(each: RankSnapshot) -> _Cells:
    return {title: say(each) for title, say in COLUMNS if title not in _LEFT_OUT}


def _of_node(node: NodeOfRanks) -> _Cells:
    """What its ranks have in common, said as of one rank."""
    one = replace(node.usual[0], state=node.state, seconds=node.seconds)
    return {
        "node": f"<strong>{escape(node.title)}</strong>" if node.is_odd else escape(node.title),
        "rank": _numbers(node.ranks),
        "state": _state(node, one),
        "line": _OF_A_RANK["line"](one) if node.place else "",
        "collective": escape(node.collective),
        "step": escape(node.step),
        "CPU": _together(node.cpu),
        "memory": _together(format_bytes(node.memory)) if node.memory else "",
        "GPU": escape(_gpus(node)),
    }


def _numbers(ranks: Sequence[RankSnapshot]) -> str:
    said = say_ranks([each.rank for each in ranks])
    return said.removeprefix("ranks ").removeprefix("rank ")


def _state(node: NodeOfRanks, one: RankSnapshot) -> str:
    said = _OF_A_RANK["state"](one)
    if node.is_odd and one.is_well:
        style = ink("warn")
        said = f'<span class="nbddp-waits" style="{style}">{escape(one.state)}</span>'
    return said if not node.others else f"{len(node.usual)} of {len(node.ranks)} {said}"


def _together(said: str) -> str:
    return f'<span title="all its ranks together">{said}</span>' if said else ""


def _gpus(node: NodeOfRanks) -> str:
    names = Counter(short_gpu(each.gpu) for each in node.ranks if each.gpu)
    bytes_held = sum(each.gpu_memory for each in node.ranks)
    held = format_bytes(bytes_held) if bytes_held else ""
    said = [f"{count} {name}" for name, count in names.items()]
    return " · ".join(filter(None, [held, *said])) if names else ""
