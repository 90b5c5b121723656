"""The plain values that ranks report, and those of a rank that replaces a dead rank."""

import gc
import itertools
import random
import weakref
from collections import Counter, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nbddp.record.heal.rank_values import OwnValues, RankValues
from nbddp.topology import Topology
from nbddp.worker.cell.input_forecast import may_request_input
from nbddp.worker.heal import reported_values
from nbddp.worker.heal.namespace_transfer import pickle_namespace
from nbddp.worker.heal.reported_values import MAX_VALUES, ReportedValues
from nbddp.worker.watch.namespace import paths_of

NODES = [
    Topology(rank=rank, local_rank=rank % 2, world_size=4, local_world_size=2, node_rank=rank // 2)
    for rank in range(4)
]


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other tests a report may miss values."""
    monkeypatch.setattr(reported_values, "CPU_SECONDS", 9.0)


class Role(Enum):
    MAIN, OTHER = 0, 1


def values_of(namespaces: dict[int, dict[str, Any]], cell: int = 1) -> RankValues:
    values = RankValues()
    for rank, namespace in namespaces.items():
        values.add(rank, cell, ReportedValues(namespace).changes())
    return values


def own_of(values: RankValues, dead: int, alive: list[int]) -> OwnValues:
    return values.of_replacement(dead, alive[0], alive, NODES)


def own_after_death(namespaces: list[dict[str, Any]], source: str, **changed: Any) -> OwnValues:
    """The known values of rank 1, which died in a cell that rank 0 has finished."""
    ranks, values = [ReportedValues(each) for each in namespaces], RankValues()
    for rank, reported in enumerate(ranks):
        values.add(rank, 1, reported.changes())
    namespaces[0] |= changed
    values.add_death(1, 2, source)
    values.add(0, 2, ranks[0].changes())
    return own_of(values, 1, [0])


def test_only_values_that_differ_between_ranks_are_restored() -> None:
    values = values_of({0: {"a": 0, "b": 1, "c": True}, 1: {"a": 1, "b": 1, "c": 1, "d": "x"}})
    found = own_of(values, 1, [0])
    assert found.texts == {"a": ("0", "1"), "c": ("True", "1"), "d": ("", "'x'")}
    assert not found.unknown


def test_a_value_that_the_failed_cell_may_have_changed_is_not_restored() -> None:
    namespaces = [{"best": rank / 2, "seed": rank} for rank in range(2)]
    found = own_after_death(namespaces, "best = min(best, loss)", best=0.25)
    assert found == OwnValues({"seed": ("0", "1")}, ["best"])


def test_an_object_assigned_by_the_failed_cell_is_not_replaced_by_an_earlier_value() -> None:
    """A model has no mark. Its name had one before that cell."""
    namespaces: list[dict[str, Any]] = [{"model": None}, {"model": None}]
    model = nn.Linear(1, 1)
    found = own_after_death(namespaces, "model = nn.Linear(1, 1)", model=model)
    assert ReportedValues(namespaces[0]).restore(found.texts, ()) == []
    assert namespaces[0]["model"] is model


OUT_0 = "PosixPath('out/0')"


@pytest.mark.parametrize(
    ("source", "alive", "expected"),
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
        ("out = Path(f'out/{rank}')", {1: {"out": Path("out/1")}}, {"out": OUT_0}),
        ("out = pathlib.Path('out') / str(rank)", {1: {"out": Path("out/1")}}, {"out": OUT_0}),
        ("t = rank, 'a'", {1: {"t": (1, "a")}}, {"t": "(0, 'a',)"}),
        ("l = [rank]\na = l[0]", {1: {"l": [1], "a": 1}}, {"l": "?", "a": "?"}),
        ("a = np.int64(rank)", {1: {"a": np.int64(1)}}, {"a": "?"}),
        ("for a in range(2): b = rank", {1: {"a": 1, "b": 1}}, {"a": "?", "b": "?"}),
        ("if f(): a = rank\nelse: a = 1", {1: {"a": 1}}, {"a": "?"}),
        ("%time\n!ls\na = rank", {1: {"a": 1}}, {"a": "0"}),
        ("here = 'cuda:%d' % local_rank", {1: {"here": "cuda:1"}}, {"here": "'cuda:0'"}),
        (
            "d = torch.device('cuda', rank)",
            {1: {"d": torch.device("cuda:1")}},
            {"d": "device cuda:0"},
        ),
        ("a = rank", {1: {"a": 1}, 2: {"a": 5}}, {"a": "?"}),  # rank 2 contradicts the code
    ],
)
def test_values_of_the_failed_cell_are_derived_from_the_rank_only_if_certain(
    source: str, alive: dict[int, dict[str, Any]], expected: dict[str, str]
) -> None:
    values = values_of(alive)
    values.add_death(0, 1, source)
    found = own_of(values, 0, [*alive])
    marks = {path: mark for path, (_, mark) in found.texts.items()}
    assert marks | dict.fromkeys(found.unknown, "?") == expected


def test_only_changed_values_are_reported_and_all_values_to_another_notebook() -> None:
    namespace: dict[str, Any] = {"a": 1, "b": "x", "_i3": "a = 1", "In": []}
    plain = ReportedValues(namespace)
    assert plain.changes() == {"new": {"a": "1", "b": "'x'"}, "is_all": True}
    assert plain.changes() == {}
    namespace["a"] = True
    del namespace["b"]
    assert plain.changes() == {"new": {"a": "True"}, "gone": ["b"]}
    plain.report_all_next()
    assert plain.changes() == {"new": {"a": "True"}, "is_all": True}


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment]  # as of a metaclass with an __eq__


class Nowhere(type):
    __module__ = property(lambda _: 1 / 0)


class Unnamed:
    """Has ended when its proxy is used."""


class Lazy:
    """Like a proxy of a web framework outside of a request."""

    __class__ = property(lambda _: 1 / 0)


def test_an_object_that_cannot_be_asked_for_its_class_hides_no_other() -> None:
    odd = Unhashable("Odd", (), {})()
    names = {"a": odd, "held": [odd], "kind": type(odd), "mine": 1}
    assert ReportedValues(names).changes()["new"]["mine"] == "1"
    proxies = [weakref.proxy(Unnamed()), Lazy()]
    assert paths_of([odd], {"more": proxies, "rest": [odd]}) == {id(odd): "rest[0]"}
    assert {*pickle_namespace({"dead": proxies[0], "lazy": proxies[1], "x": 3}).names} == {"x"}
    assert not may_request_input("use(lazy)", {"use": print, "lazy": Nowhere("Odd", (), {})})


def test_the_report_is_bounded_and_has_only_the_ends_of_long_texts_and_lists() -> None:
    """They are looked at after each cell, and may be whole data sets."""
    long = "x" * 10**6
    texts = [f"{long}a{long}", f"{long}b{long}", f"b{long}{long}", f"{long}{long}b"]
    lists = [[int(at == place) for at in range(999)] for place in (-1, 499, 0, 998)]
    for one, middle, first, last in (texts, lists):
        mark, *others = (
            ReportedValues({"it": value}).changes()["new"]["it"]
            for value in (one, middle, first, last)
        )
        assert [other == mark for other in others] == [True, False, False]
    many = {f"n{number}": number for number in range(10 * MAX_VALUES)}
    assert len(ReportedValues(dict(many)).changes()["new"]) <= MAX_VALUES
    told = ReportedValues({"text": "x" * 10**7, "number": 1 << 10**6}).changes()["new"]
    assert all(len(mark) < 100 for mark in told.values())


def healed(ranks: dict[int, dict[str, Any]], here: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Give a donor's values those of rank 1. Return the paths that changed, and that differ."""
    rank_values = own_of(values_of(ranks), 1, [0]).texts
    values = ReportedValues(here)
    return values.restore(rank_values, ()), values.differing(rank_values)


def holders(make: Callable[[], Any]) -> dict[str, Any]:
    """Such a value as a variable, in an object, and in a class."""
    kind = type("Kind", (), {"__module__": "__main__", "value": make()})
    return {"value": make(), "held": SimpleNamespace(value=make()), "Kind": kind}


def test_differing_enum_members_are_reported_and_never_changed() -> None:
    """Every object that has a member shares it: another name in it would break the whole class."""

    ranks = {
        rank: {"Role": Role, **holders(lambda role=role: role), "seed": rank}
        for rank, role in enumerate(Role)
    }
    taken, unlike = healed(ranks, dict(ranks[0]))
    assert taken == ["seed"]
    assert unlike == ["value", "held.value", "Kind.value"]
    assert [(each.name, each.value) for each in Role] == [("MAIN", 0), ("OTHER", 1)]


Pair = namedtuple("Pair", "rank other")
PLAIN: list[Callable[[int], Any]] = [
    lambda rank: Path(f"out/{rank}"),
    lambda rank: PurePosixPath(f"out/{rank}"),
    np.int64,
    np.float32,
    lambda rank: np.bool_(rank == 0),
    lambda rank: complex(rank, 1),
    lambda rank: b"%d" % rank,
    lambda rank: range(rank, 20, 3),
    lambda rank: slice(rank, None, 3),
    lambda rank: {rank, "a"},
    lambda rank: frozenset({rank}),
    lambda rank: (rank, (None, Path(f"{rank}"))),
    lambda rank: [rank, "a", [rank + 1]],
    lambda rank: [np.int64(rank)],
    lambda rank: [*range(rank)],
    lambda rank: Pair(rank, 1),
]


@pytest.mark.parametrize("make", PLAIN, ids=lambda make: type(make(1)).__name__)
def test_small_values_of_plain_types_are_restored(make: Callable[[int], Any]) -> None:
    ranks = {
        rank: {**holders(partial(make, rank)), "settings": {"value": make(rank)}}
        for rank in range(2)
    }
    here = ranks[0]
    taken, unlike = healed(ranks, here)
    assert taken == ["value", "held.value", "Kind.value", "settings['value']"]
    assert not unlike
    for value in (here["value"], here["held"].value, here["settings"]["value"], here["Kind"].value):
        assert value == make(1)
        assert type(value) is type(make(1))


def test_a_restored_list_stays_shared_by_its_holders_which_are_not_named() -> None:
    def values(rank: int) -> dict[str, Any]:
        seen = [rank]
        best = seen if rank == 0 else ["alone"]
        holders = {"kept": SimpleNamespace(seen=seen), "f": seen.append, "add": partial(map, seen)}
        return {"seen": seen, **holders, "best": best}

    here = values(0)
    taken, unlike = healed({0: here, 1: values(1)}, here)
    assert (taken, unlike) == (["seen", "best", "kept.seen"], [])
    assert here["seen"] is here["kept"].seen
    here["f"](2)
    assert (here["seen"], here["best"]) == ([1, 2], ["alone"])


def test_plain_attributes_of_a_user_defined_module_are_restored_and_its_tensors_are_not() -> None:
    class Net(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.peers, self.layer = [rank], nn.Linear(1, 1)
            self.register_buffer("mean", torch.tensor([float(rank)]))

    here = {"net": Net(0)}
    assert healed({0: here, 1: {"net": Net(1)}}, here) == (["net.peers"], [])
    assert here["net"].peers == [1]


def closure(rank: int) -> Callable[[], int]:
    return lambda: rank


OTHERS: list[Callable[[int], Any]] = [
    closure,
    lambda rank: partial(pow, rank),
    lambda rank: partial(closure(rank)),
    lambda rank: [closure(rank)],
    lambda rank: {1: closure(rank)},
    lambda rank: deque([rank]),
    lambda rank: Counter({rank: 1}),
    lambda rank: {rank: "me"},
    itertools.count,
    lambda rank: [*range(rank, 1000)],
    lambda rank: bytearray([rank]),
    lambda rank: torch.tensor([rank]),
    lambda rank: torch.Size([rank]),
    lambda rank: Pair(torch.tensor(rank), 1),
    lambda rank: np.arange(rank, 9),
    lambda rank: torch.Generator().manual_seed(rank),
    lambda rank: [torch.Generator().manual_seed(rank)],
    np.random.default_rng,
    lambda rank: np.random.Generator(np.random.MT19937(rank)),
    np.random.RandomState,
    random.Random,
]


@pytest.mark.parametrize("make", OTHERS)
def test_only_other_values_that_differ_between_ranks_are_named(make: Callable[[int], Any]) -> None:
    one, other, same = (holders(partial(make, rank)) for rank in (0, 1, 1))
    taken, unlike = healed({0: one, 1: other}, one)
    assert (taken, unlike) == ([], ["value", "held.value", "Kind.value"])
    assert not own_of(values_of({0: same, 1: other}), 1, [0]).texts


def test_a_default_of_a_cells_function_that_differs_is_named() -> None:
    ranks: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    for rank, namespace in ranks.items():
        exec(f"def f(x, *, r={rank}): return r\ndef g(x, r=2): return r", namespace)
    assert healed(ranks, ranks[0]) == ([], ["f"])


def test_equal_sets_and_dicts_in_another_order_are_not_named() -> None:
    objects = [closure(1), closure(2)]
    one = {"few": {1, 17, 33}, "many": {*objects}, "by": {1: deque([1]), "b": 2}}
    two = {"few": {33, 17, 1}, "many": {*objects[::-1]}, "by": {"b": 2, 1: deque([1])}}
    assert not own_of(values_of({0: one, 1: two}), 1, [0]).texts


def test_a_value_omitted_for_lack_of_time_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It seems new in the cell in which a rank dies, and may be older, and equal on all ranks."""
    monkeypatch.setattr(reported_values, "CLOCK_INTERVAL", 1)
    values, ranks = (
        RankValues(),
        [ReportedValues({"seen": deque([1]), "step": 1}) for _ in range(2)],
    )
    for cell, patience, living in ((1, 9.0, 2), (2, -1.0, 2), (3, 9.0, 1)):
        monkeypatch.setattr(reported_values, "CPU_SECONDS", patience)
        for rank in range(living):
            values.add(rank, cell, ranks[rank].changes())
    values.add_death(1, 3, "")
    assert own_of(values, 1, [0]) == OwnValues({}, [])


def test_reported_values_neither_keep_user_objects_alive_nor_call_them() -> None:
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
    plain = ReportedValues(namespace)
    assert {"asked.number": "3", "by['key']": "2"}.items() <= plain.changes()["new"].items()
    gone = weakref.ref(asked)
    namespace.clear()
    del asked
    gc.collect()
    assert gone() is None
