"""The plain values that ranks tell, and those of a rank that takes a dead one's place."""

from __future__ import annotations

import gc
import weakref
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbddp.record.rank_values import OwnValues, RankValues
from nbddp.topology import Topology
from nbddp.worker.plain_values import MAX_VALUES, PlainValues

NODES = [
    Topology(rank=rank, local_rank=rank % 2, world_size=4, local_world_size=2, node_rank=rank // 2)
    for rank in range(4)
]


class Role(Enum):
    MAIN, OTHER = 0, 1


def values_of(namespaces: dict[int, dict[str, Any]], cell: int = 1) -> RankValues:
    values = RankValues()
    for rank, namespace in namespaces.items():
        values.note(rank, cell, PlainValues(namespace).changes())
    return values


def own_of(values: RankValues, dead: int, alive: list[int]) -> OwnValues:
    return values.of_replacement(dead, alive[0], alive, NODES)


def in_dying_cell(source: str, alive: dict[int, dict[str, Any]], dead: int) -> dict[str, str]:
    values = values_of(alive)
    values.note_death(dead, 1, source)
    found = own_of(values, dead, [*alive])
    return {path: mark for path, (_, mark) in found.own.items()} | dict.fromkeys(found.unknown, "?")


def test_what_differs_is_given_back_and_what_is_alike_is_not() -> None:
    values = values_of({0: {"a": 0, "b": 1, "c": True}, 1: {"a": 1, "b": 1, "c": 1, "d": "x"}})
    found = own_of(values, 1, [0])
    assert found.own == {"a": ("0", "1"), "c": ("True", "1"), "d": ("", "'x'")}
    assert not found.unknown


def test_a_value_that_changed_in_the_dying_cell_is_not_the_one_before() -> None:
    namespaces = [{"best": rank / 2, "seed": rank} for rank in range(2)]
    plain = [PlainValues(each) for each in namespaces]
    values = RankValues()
    for rank in range(2):
        values.note(rank, 1, plain[rank].changes())
    namespaces[0]["best"] = 0.25
    values.note_death(1, 2, "best = min(best, loss)")
    values.note(0, 2, plain[0].changes())
    assert own_of(values, 1, [0]) == OwnValues({"seed": ("0", "1")}, ["best"])


@pytest.mark.parametrize(
    ("source", "alive", "own"),
    [
        ("main = rank == 0", {1: {"main": False}}, {"main": "True"}),
        ("seed = 7 + local_rank", {1: {"seed": 8}}, {"seed": "7"}),
        ("main = True", {1: {"main": True}}, {}),
        ("main = f()", {1: {"main": False}, 2: {"main": False}}, {"main": "True"}),
        ("done = f()", {1: {"done": False}, 2: {"done": False}}, {"done": "?"}),
        ("count = f()", {1: {"count": 3}, 2: {"count": 3}}, {}),
        ("count = f()", {1: {"count": 3}, 2: {"count": 4}}, {"count": "?"}),
        ("my_rank = f()", {1: {"my_rank": 1}, 2: {"my_rank": 2}}, {"my_rank": "0"}),
        ("lora_rank = f()", {1: {"lora_rank": 1}}, {"lora_rank": "?"}),
        ("gpu_id = f()", {1: {"gpu_id": 1}, 2: {"gpu_id": 0}}, {"gpu_id": "0"}),
        ("a = rank\na = f(a)", {1: {"a": 1}}, {"a": "?"}),
        ("for a in range(2): b = rank", {1: {"a": 1, "b": 1}}, {"a": "?", "b": "?"}),
        ("if f(): a = rank\nelse: a = 1", {1: {"a": 1}}, {"a": "?"}),
        ("%time\n!ls\na = rank", {1: {"a": 1}}, {"a": "0"}),
        ("here = 'cuda:%d' % local_rank", {1: {"here": "cuda:1"}}, {"here": "'cuda:0'"}),
        (
            "where = torch.device('cuda', local_rank)",
            {1: {"where": torch.device("cuda:1")}},
            {"where": "device cuda:0"},
        ),
    ],
)
def test_the_dying_cells_values_follow_from_the_rank_where_that_is_certain(
    source: str, alive: dict[int, dict[str, Any]], own: dict[str, str]
) -> None:
    assert in_dying_cell(source, alive, dead=0) == own


def test_code_that_another_rank_contradicts_tells_nothing() -> None:
    alive = {1: {"a": 1}, 2: {"a": 5}}
    assert in_dying_cell("a = rank", alive, dead=0) == {"a": "?"}


def test_only_changes_are_told_and_all_of_them_to_another_notebook() -> None:
    namespace: dict[str, Any] = {"a": 1, "b": "x", "_i3": "a = 1", "In": []}
    plain = PlainValues(namespace)
    assert plain.changes() == {"new": {"a": "1", "b": "'x'"}, "is_all": True}
    assert plain.changes() == {}
    namespace["a"] = True
    del namespace["b"]
    assert plain.changes() == {"new": {"a": "True"}, "gone": ["b"]}
    plain.forget()
    assert plain.changes() == {"new": {"a": "True"}, "is_all": True}


def test_very_many_values_are_told_to_a_bound() -> None:
    many = {f"n{number}": number for number in range(10 * MAX_VALUES)}
    assert len(PlainValues(dict(many)).changes()["new"]) <= MAX_VALUES
    told = PlainValues({"text": "x" * 10**7, "number": 1 << 10**6}).changes()["new"]
    assert all(len(mark) < 100 for mark in told.values())


def test_of_a_long_text_only_the_ends_are_looked_at() -> None:
    """It is looked at after each cell, and may be a whole data set."""
    long = "x" * 10**6
    one, *others = (
        PlainValues({"text": text}).changes()["new"]["text"]
        for text in (f"{long}a{long}", f"{long}b{long}", f"b{long}{long}", f"{long}{long}b")
    )
    assert [other == one for other in others] == [True, False, False]


def test_members_of_an_enum_are_told_apart_and_never_changed() -> None:
    """Every object that has a member shares it: another name in it would break the whole class."""
    ranks = {
        rank: {"role": role, "kept": SimpleNamespace(role=role), "seed": rank}
        for rank, role in enumerate(Role)
    }
    found = own_of(values_of(ranks), 1, [0])
    assert found.own == {"seed": ("0", "1")}
    assert found.unknown == ["role"]
    healed = dict(ranks[0])
    assert PlainValues(healed).take(found.own, ()) == ["seed"]
    assert [(each.name, each.value) for each in Role] == [("MAIN", 0), ("OTHER", 1)]


def test_no_object_of_the_users_is_kept_or_asked() -> None:
    class Asked:
        def __init__(self) -> None:
            self.number = 3

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        def __repr__(self) -> str:
            raise AssertionError

        __eq__ = __len__ = __bool__ = __repr__  # type: ignore[assignment]
        __hash__ = object.__hash__

    asked = Asked()
    namespace: dict[str, Any] = {"asked": asked, "many": [asked], "by": {asked: 1, "key": 2}}
    plain = PlainValues(namespace)
    assert {"asked.number": "3", "by['key']": "2"}.items() <= plain.changes()["new"].items()
    gone = weakref.ref(asked)
    namespace.clear()
    del asked
    gc.collect()
    assert gone() is None
