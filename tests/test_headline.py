"""The one line that is said of an error: the user's own words, and the user's own line."""

from __future__ import annotations

import sys
from dataclasses import astuple

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.worker.headline import Headline, headline_of

LOADER = """Caught KeyError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "/lib/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
  File "cell", line 5, in __getitem__
    return self.load(i)
  File "cell", line 7, in load
    raise mine.BadImage(f"image {i}:\\nbroken")
mine.BadImage: image 3:
broken
"""
SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/lib/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
AssertionError
"""
SAVED = """CheckpointException ranks:dict_keys([0, 2])
Traceback (most recent call last): (RANK 0)
  File "/lib/torch/distributed/checkpoint/utils.py", line 190, in reduce_scatter
    local_data = map_fun()
OSError: no space
Traceback (most recent call last): (RANK 2)
  File "/lib/torch/distributed/checkpoint/utils.py", line 190, in reduce_scatter
    local_data = map_fun()
_pickle.PicklingError: Can't pickle <function f>
"""
CHAIN = """
def load():
    raise KeyError('root')
def build():
    try: load()
    except KeyError as error: raise ValueError('middle') from error
try: build()
except ValueError as error: raise RuntimeError('top') from error"""


def is_cell(filename: str) -> bool:
    return filename == "cell"


WRAPPED = {"LOADER": LOADER, "SPAWNED": SPAWNED, "SAVED": SAVED}


def error_of(source: str) -> BaseException:
    """What a cell of this source raises."""
    try:
        exec(compile(source, "cell", "exec"), dict(WRAPPED))
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("it raised nothing")


SOURCES = {
    "plain": "\nraise ValueError('too low')",
    "cause": "raise ValueError('a') from KeyError('b')",
    "chain": CHAIN,
    "ranks": "raise RuntimeError(SAVED)",
    "cause of ranks": "raise ValueError('not saved') from RuntimeError(SAVED)",
    "context": "try:\n    1/0\nexcept ZeroDivisionError:\n    raise ValueError('a')",
    "from None": "raise ValueError('a') from None",
    "loader": "raise RuntimeError(LOADER)",
    "spawned": "raise RuntimeError(SPAWNED)",
    "no text": "raise NotImplementedError",
    "no traceback": "raise ValueError('see the Traceback (most recent call last):\\n')",
    "another process": (
        "class _RemoteTraceback(Exception): pass\nraise ValueError('a') from _RemoteTraceback('b')"
    ),
}


def test_the_users_message_and_line_come_first(snapshot: SnapshotAssertion) -> None:
    said = {
        name: [*astuple(headline_of(error_of(source), is_cell))] for name, source in SOURCES.items()
    }
    assert said == snapshot


@pytest.mark.parametrize("source", ["raise ValueError('a')", "raise RuntimeError(LOADER)"])
def test_a_scripts_file_is_named(source: str) -> None:
    found = headline_of(error_of(source), is_cell, {"cell": "train.py"}.__getitem__)
    assert (found.file, found.line > 0) == ("train.py", True)


def test_errors_that_are_each_others_cause_end_the_search() -> None:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert headline_of(one, is_cell).because.endswith("KeyError: 'other'")


def test_an_assertion_without_a_text_shows_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linecache.getline", lambda _file, line: f"    assert x == {line}\n")
    said = headline_of(error_of("\n\nassert 1 == 2"), is_cell)
    assert said == Headline("AssertionError", "assert x == 3", 3)
    assert headline_of(error_of("assert 1 == 2, 'why'"), is_cell).text == "why"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_a_group_names_what_is_in_it() -> None:
    source = (
        "def fail(n):\n    try: [][n]\n    except IndexError as error: return error\n"
        "inner = ExceptionGroup('b', [fail(1), ValueError('x' * 200)])\n"
        "raise ExceptionGroup('a', [inner, KeyError('c'), TypeError('d')])"
    )
    long = "x" * 104 + " ..."
    said = headline_of(error_of(source), is_cell)
    assert said.text.startswith("a: IndexError: list index out of range (line 2); ValueError: xxx")
    assert said.text.endswith("x ...; KeyError: 'c'; and 1 more")
    assert long in said.text
    assert (said.name, said.line) == ("ExceptionGroup", 5)


def test_what_the_users_words_say_already_is_not_said_again() -> None:
    error = RuntimeError("it cannot be sent (no lock)")
    error.__cause__ = TypeError("no lock")
    assert headline_of(error, is_cell).because == ""
    error.__cause__ = TypeError("another reason")
    assert headline_of(error, is_cell).because.endswith("TypeError: another reason")
