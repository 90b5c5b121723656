"""The last lines of every rank and of all, in order, bounded, with what is being written now."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from nbddp.record.log_reader import MAX_KEPT_LINE, LineAssembler
from nbddp.ui.log_lines import Line, Tails

PIECES = st.lists(st.tuples(st.integers(0, 2), st.text(alphabet="ab \r\n", max_size=12)))


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def shown(lines: list[Line]) -> list[tuple[int | None, str]]:
    """Rank, or None for nbddp, and text."""
    return [(line.ranks[0] if line.ranks else None, line.text) for line in lines]


def test_lines_of_all_ranks_are_merged_in_the_order_they_came() -> None:
    tails = Tails()
    tails.flush(1)
    assert tails.lines(1) == tails.lines() == []
    assert tails.earlier(1) == tails.earlier() == 0
    tails.write(1, "a\nb\n")
    tails.say("careful\nor not\n")
    tails.write(0, "\n \n")
    tails.write(1, "d\n")
    nbddp = [(None, "careful"), (None, "or not")]
    assert shown(tails.lines()) == [(1, "a"), (1, "b"), *nbddp, (0, ""), (0, " "), (1, "d")]
    assert tails.lines(1) == [Line((1,), "a"), Line((1,), "b"), Line((1,), "d")]
    assert tails.lines(0) == [Line((0,), ""), Line((0,), " ")]


def test_only_the_last_lines_are_kept_and_the_others_counted() -> None:
    tails = Tails(max_lines=3)
    tails.write(0, "a\nb\nc\nd\n")
    tails.write(1, "e\n")
    assert texts(tails.lines()) == ["c", "d", "e"]
    assert texts(tails.lines(0)) == ["b", "c", "d"]
    assert (tails.earlier(), tails.earlier(0), tails.earlier(1)) == (2, 1, 0)
    tails.write(0, "flood\n" * 1000)
    assert texts(tails.lines(1)) == ["e"]
    assert tails.earlier() == 1002


def test_a_progress_bar_is_seen_in_its_place_while_it_moves() -> None:
    tails = Tails()
    for written, seen in {
        "begin\n\r10%": ["begin", "10%"],
        "\r20%": ["begin", "20%"],
        "\rdone\nend\n": ["begin", "done", "end"],
    }.items():
        tails.write(0, written)
        assert texts(tails.lines()) == texts(tails.lines(0)) == seen
    assert tails.earlier() == 0


def test_bars_of_several_ranks_are_last_in_order_of_rank() -> None:
    tails = Tails()
    tails.write(1, "\r10%")
    tails.write(0, "\r20%")
    tails.write(1, "\r30%")
    tails.write(3, "  ")  # one that was wiped
    tails.write(2, "a\n")
    tails.say("careful")
    assert shown(tails.lines()) == [(2, "a"), (None, "careful"), (0, "20%"), (1, "30%")]


@given(PIECES)
def test_what_is_seen_does_not_change_when_the_cell_ends(pieces: list[tuple[int, str]]) -> None:
    tails = Tails()
    for rank, text in pieces:
        tails.write(rank, text)
    merged, alone = tails.lines(), [tails.lines(rank) for rank in range(3)]
    tails.flush()
    assert tails.lines() == merged
    assert [tails.lines(rank) for rank in range(3)] == alone


@given(PIECES, st.integers(1, 5))
def test_nothing_is_lost_but_what_is_counted(pieces: list[tuple[int, str]], kept: int) -> None:
    tails, expected, merged = Tails(max_lines=kept), dict[int, list[str]](), list[tuple[int, str]]()
    assemblers = {rank: LineAssembler() for rank in range(3)}
    for rank, text in pieces:
        tails.write(rank, text)
        complete = assemblers[rank].add(text)
        expected.setdefault(rank, []).extend(complete)
        merged += [(rank, line) for line in complete]
    for rank, lines in expected.items():
        partial = [assemblers[rank].partial] if assemblers[rank].partial.strip() else []
        assert texts(tails.lines(rank)) == lines[-kept:] + partial
        assert tails.earlier(rank) == max(0, len(lines) - kept)
    assert shown(tails.lines())[: len(merged[-kept:])] == merged[-kept:]
    assert tails.earlier() == max(0, len(merged) - kept)


def test_what_comes_after_a_flush_is_a_new_line_and_one_rank_may_be_flushed_alone() -> None:
    tails = Tails()
    tails.write(0, "zero")
    tails.write(1, "one")
    tails.flush(1)
    before = tails.lines()
    tails.write(1, "more\n")
    assert shown(tails.lines()) == [(1, "one"), (1, "more"), (0, "zero")]
    tails.flush()
    tails.write(0, "b\n")
    assert texts(tails.lines(0)) == ["zero", "b"]
    assert shown(before) == [(1, "one"), (0, "zero")], "what was read changes no more"


def test_the_version_tells_whether_there_is_something_new() -> None:
    tails = Tails()
    seen = {tails.version}
    for change in (
        lambda: tails.write(0, "\r10%"),
        lambda: tails.write(0, "\r20%"),
        lambda: tails.say("careful"),
        tails.flush,
    ):
        change()
        seen.add(tails.version)
    assert len(seen) == 5
    tails.write(0, "")
    tails.lines()
    tails.lines(0)
    assert tails.version in seen


def test_a_line_without_an_end_is_not_kept_whole() -> None:
    tails = Tails(max_lines=10)
    for _ in range(10):
        tails.write(0, "x" * 1_000_000)
    assert sum(map(len, texts(tails.lines(0)))) <= 11 * (MAX_KEPT_LINE + 50)
    assert sum(map(len, texts(tails.lines()))) <= 11 * (MAX_KEPT_LINE + 50)


def test_a_flood_costs_little() -> None:
    tails, piece = Tails(), ("x" * 99 + "\n") * 50
    began = time.perf_counter()
    for number in range(1600):
        tails.write(number % 4, piece)
    assert time.perf_counter() - began < 5  # it takes 0.03 s on a quiet machine
    assert tails.earlier() == 79_500
