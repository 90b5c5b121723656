"""Values that agree are shown once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nbddp.ui.log_lines import agreeing


def value(text: str) -> dict[str, Any]:
    return {"data": {"text/plain": text}, "metadata": {}}


def test_groups_come_in_order_of_their_lowest_rank() -> None:
    results = {0: value("a"), 1: value("b"), 2: value("a"), 3: value("c"), 4: value("b")}
    groups = [([0, 2], value("a")), ([1, 4], value("b")), ([3], value("c"))]
    assert agreeing(results) == groups
    assert agreeing({}) == []


def test_values_that_look_alike_in_text_only_are_told_apart() -> None:
    rich = {"data": {"text/plain": "1", "text/html": "<b>1</b>"}, "metadata": {}}
    assert agreeing({0: value("1"), 1: rich}) == [([0], value("1")), ([1], rich)]


@given(st.dictionaries(st.integers(0, 30), st.sampled_from("abc")))
def test_every_rank_is_in_one_group_with_its_own_value(results: dict[int, str]) -> None:
    groups = agreeing({rank: value(results[rank]) for rank in sorted(results)})
    found = {rank: bundle["data"]["text/plain"] for ranks, bundle in groups for rank in ranks}
    assert found == results
    assert sum(len(ranks) for ranks, _ in groups) == len(results)
    assert len(groups) == len(set(results.values()))
