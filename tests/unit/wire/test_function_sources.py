"""Values that are pushed bring along the cells of their functions."""

import linecache
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from nbddp.wire import function_sources
from nbddp.wire.function_sources import dumps_with_sources, loads_with_sources
from nbddp.worker.heal import namespace_transfer
from nbddp.worker.requests import dumps

Define = Callable[[str, str], dict[str, Any]]


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Define:
    """Runs a cell of this name, and registers its source as IPython does."""
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))

    def run(name: str, text: str) -> dict[str, Any]:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, name, "exec"), namespace)
        return namespace

    return run


def test_functions_are_sent_with_the_source_of_their_cells_and_of_functions_they_call(
    define: Define,
) -> None:
    inner = define("/tmp/kernel/1.py", "def inner(x):\n    return 1 / x\n")
    text = "def outer(x):\n    return inner(x)\n"
    outer = define("/tmp/kernel/2.py", text)
    outer["inner"] = inner["inner"]
    data = dumps_with_sources({"f": outer["outer"]}, {"/tmp/kernel/2.py": 7})
    found, cells = loads_with_sources(data)
    assert found["f"](2) == 0.5
    assert cells == {
        "/tmp/kernel/1.py": "def inner(x):\n    return 1 / x\n",
        "<ipython-input-7>": text,
    }
    assert found["f"].__code__.co_filename == "<ipython-input-7>"
    assert pickle.loads(data).keys() == {"f"}  # code that wants only the values does not see them


def test_plain_values_and_functions_from_files_are_sent_without_cell_sources(
    define: Define,
) -> None:
    define("/tmp/kernel/1.py", "def unused(): pass\n")
    for value in (1, [b"x" * 100], len, Path, pytest.fixture):
        assert loads_with_sources(dumps_with_sources(value, {})) == (value, {})


def test_an_instance_of_a_class_from_a_cell_is_sent_with_the_cells_source(define: Define) -> None:
    text = "class Net:\n    def go(self):\n        return 3\n"
    made = define("/tmp/kernel/3.py", text)["Net"]()
    value, cells = loads_with_sources(dumps_with_sources(made, {}))
    assert value.go() == 3
    assert cells == {"/tmp/kernel/3.py": text}


def _carried(function: FunctionType, *, as_of_a_cell: bool) -> Any:
    namespace = function.__globals__ if as_of_a_cell else {}
    namespace["f"] = function
    carried = namespace_transfer.pickle_namespace(namespace, exclude={*namespace} - {"f"})
    opened: dict[str, Any] = {}
    namespace_transfer.load_namespace(carried.data, opened, carried.storages)
    return opened["f"]


@pytest.mark.parametrize(
    "travel",
    [
        lambda function: pickle.loads(dumps_with_sources(function, {})),
        lambda function: pickle.loads(function_sources.dumps(function)),
        lambda function: pickle.loads(dumps(function, name="f")[0]),
        partial(_carried, as_of_a_cell=False),
        partial(_carried, as_of_a_cell=True),
    ],
    ids=["pushed", "sent", "pulled", "carried", "carried as a cell's"],
)
def test_a_function_keeps_the_filename_of_its_cell_in_every_transfer(
    define: Define, travel: Callable[[FunctionType], Any]
) -> None:
    made = define("/tmp/kernel/4.py", "def outer():\n    return [i for i in (lambda: (1, 2))()]\n")
    there = travel(made["outer"])
    assert there() == [1, 2]
    codes = [
        there.__code__,
        *(each for each in there.__code__.co_consts if hasattr(each, "co_code")),
    ]
    assert len(codes) > 1  # the lambda's too
    assert {each.co_filename for each in codes} == {"/tmp/kernel/4.py"}
