"""Wait times between ranks, from reported arrivals, by group and number."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from arrivals import BASE, KIND, arrival_messages, matcher_of, matcher_with

from nbddp.record.collectives.collective_matcher import (
    MAX_KEPT_ARRIVALS,
    MIN_KEPT_COLLECTIVES,
)
from nbddp.wire.collective_arrivals import CollectiveArrivals

LATE = 0.05


def late(rank: int, _step: int) -> float:
    return 0.1 + (LATE if rank == 2 else 0.0)


def test_the_wait_of_a_rank_lasts_from_its_arrival_to_the_last_arrival() -> None:
    found = matcher_of(late, ahead=lambda rank: 3.0 if rank == 1 else 0.0).history()
    total = pytest.approx(40 * LATE, rel=1e-3)
    assert (found.count, dict(found.waits)) == (40, {(0, 2): total, (1, 2): total})
    first = found.matched[0]
    assert (first.call.number, first.call.kind, first.last_rank) == (1, "all_reduce float [72]", 2)
    assert first.wait_seconds == {0: pytest.approx(LATE), 1: pytest.approx(LATE), 2: 0.0}
    assert first.at == pytest.approx(BASE + 0.15)
    assert found.tracks[1].error == 0.03, "the clock of another machine is corrected"


def test_a_rank_that_is_late_once_in_the_window_is_not_reported_as_a_straggler() -> None:
    def once(rank: int, step: int) -> float:
        return 0.1 + (rank == 2) * (0.5 if step == 12 else 0.005)

    assert matcher_of(once, steps=18).straggler() is None


def test_a_rank_starved_of_cpu_is_not_reported_as_a_straggler() -> None:
    def messages(rank: int) -> Iterator[CollectiveArrivals]:
        for message in arrival_messages([0.15 * step + rank * LATE for step in range(1, 18)]):
            yield replace(message, awake_time=900_000, cpu_time=900_000 - rank * 300_000)

    waiting = matcher_with(messages(0), messages(1))
    assert waiting.stragglers() is None
    assert waiting.straggler() is None


def test_a_straggler_is_reported_with_its_code_line_and_its_time_loading_data() -> None:
    waiting = matcher_with([], [])
    for rank in (0, 1):
        at = [0.2 * step + rank * LATE for step in range(1, 20)]
        waiting.add_step(rank, BASE + 0.2, 1)
        waiting.add_step(rank, BASE + 3.0, 2)
        for message in arrival_messages(at):
            if message.rows and rank == 1:
                came = message.rows[1::3]
                message = replace(
                    message,
                    cell_lines=[[9, ""], [4, "train.py"]],
                    samples=[it for each in came for it in (each - 1000, 0, each + 100_000, 1)],
                    batch_waits=[it for each in came for it in (each - 49_000, each)],
                )
            waiting.add(rank, message, 0.0)
    met = waiting.history().matched[3]
    assert met.places == {(9, ""): 1}, "what was seen while nobody waited does not count"
    assert met.loading == pytest.approx(0.98 * LATE, rel=0.01)
    awaited = waiting.straggler()
    assert awaited is not None
    assert (awaited.place, awaited.is_loading, awaited.steps) == ((9, ""), True, 1)


def test_process_groups_are_matched_separately_and_groups_of_unknown_ranks_are_skipped() -> None:
    waiting = matcher_with([], [], [], [])
    groups = {"[0, 2]": (0, 2), "[1, 3]": (1, 3), "'tensor parallel'": (0, 1), "[0, 7]": (0,)}
    for group, ranks in groups.items():
        for rank in ranks:
            at = [0.1 * step + 0.01 * rank for step in range(1, 9)]
            for message in arrival_messages(at, kind=["all_reduce", "float [1]", group, True, 0]):
                waiting.add(rank, message, 0.0)
    found = waiting.history()
    assert {each.call.group for each in found.matched} == {"[0, 2]", "[1, 3]"}
    assert set(found.waits) == {(0, 2), (1, 3)}
    assert found.count == 16


def test_collectives_of_a_new_process_group_do_not_match_earlier_ones() -> None:
    """A cell may form its process group again."""

    def messages(rank: int) -> Iterator[CollectiveArrivals]:
        for turn in (0, 1):
            at = [turn + 0.1 * step + 0.02 * rank for step in range(1, 5)]
            for message in arrival_messages(at, kind=[*KIND[:4], turn]):
                yield replace(message, is_over=bool(turn and message.is_over))

    found = matcher_with(messages(0), messages(1)).history()
    assert found.count == 2 * 4
    assert max(each.total_wait for each in found.matched) == pytest.approx(0.02, rel=1e-3)


def test_a_new_cell_starts_without_the_collectives_of_the_previous_cell() -> None:
    waiting = matcher_of(late)
    waiting.reset_for_cell([0, 1], 2)
    assert waiting.stragglers() is None
    waiting.add_step(0, BASE + 100, 7)
    waiting.add(0, CollectiveArrivals(cell=1, base=BASE, kinds=[KIND], rows=[99, 0, 0]), 0.0)
    found = waiting.history()
    assert (found.cell, found.count, found.ranks) == (2, 0, (0, 1)), "that came too late"
    waiting.add(0, CollectiveArrivals(cell=2, base=BASE + 100, kinds=[KIND], rows=[1, 0, 0]), 0.0)
    found = waiting.history()
    assert found.tracks[0].began == BASE + 100
    assert list(found.tracks[0].steps) == [(BASE + 100, 7)]


def test_lost_and_omitted_collectives_are_counted_and_dropped_ones_stay_in_the_sums() -> None:
    found = matcher_with(
        *(
            arrival_messages(
                [0.01 * step + (0.005 if rank == 3 else 0.0) for step in range(1, 700)],
                lost=int(rank == 0),
                omitted=2 * (rank == 0),
            )
            for rank in range(MAX_KEPT_ARRIVALS // MIN_KEPT_COLLECTIVES)
        )
    ).history()
    assert (found.count, len(found.matched)) == (699, MIN_KEPT_COLLECTIVES)
    assert (found.lost, found.thinned) == (7, 14)
    assert found.waits[0, 3] == pytest.approx(699 * 0.005, rel=1e-3)
