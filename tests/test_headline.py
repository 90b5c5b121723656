"""The one line that is said of an error: the user's own words, and the user's own line."""

from __future__ import annotations

import sys

import pytest

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


@pytest.mark.parametrize(
    ("source", "headline"),
    [
        ("\nraise ValueError('too low')", Headline("ValueError", "too low", 2)),
        (
            "raise ValueError('a') from KeyError('b')",
            Headline("ValueError", "a", 1, "caused by KeyError: 'b'"),
        ),
        (CHAIN, Headline("RuntimeError", "top", 8, "caused by KeyError: 'root'")),
        (
            "raise RuntimeError(SAVED)",
            Headline(
                "PicklingError",
                "Can't pickle <function f>",
                1,
                "on rank 2; rank 0 also failed",
            ),
        ),
        (
            "raise ValueError('not saved') from RuntimeError(SAVED)",
            Headline(
                "ValueError", "not saved", 1, "caused by PicklingError: Can't pickle <function f>"
            ),
        ),
        (
            "try:\n    1/0\nexcept ZeroDivisionError:\n    raise ValueError('a')",
            Headline("ValueError", "a", 4),
        ),
        ("raise ValueError('a') from None", Headline("ValueError", "a", 1)),
        (
            "raise RuntimeError(LOADER)",
            Headline("BadImage", "image 3:\nbroken", 7, "in DataLoader worker process 3"),
        ),
        ("raise RuntimeError(SPAWNED)", Headline("AssertionError", "", 1, "in Process 1")),
        ("raise NotImplementedError", Headline("NotImplementedError", "", 1)),
        (
            "raise ValueError('see the Traceback (most recent call last):\\n')",
            Headline("ValueError", "see the Traceback (most recent call last):\n", 1),
        ),
    ],
    ids=[
        "plain",
        "cause",
        "chain",
        "ranks",
        "cause of ranks",
        "context",
        "from None",
        "loader",
        "spawned",
        "no text",
        "no traceback",
    ],
)
def test_the_users_message_and_line_come_first(source: str, headline: Headline) -> None:
    assert headline_of(error_of(source), is_cell) == headline


@pytest.mark.parametrize("source", ["raise ValueError('a')", "raise RuntimeError(LOADER)"])
def test_a_scripts_file_is_named(source: str) -> None:
    found = headline_of(error_of(source), is_cell, {"cell": "train.py"}.__getitem__)
    assert (found.file, found.line > 0) == ("train.py", True)


def test_the_traceback_of_another_process_is_no_cause() -> None:
    source = (
        "class _RemoteTraceback(Exception): pass\nraise ValueError('a') from _RemoteTraceback('b')"
    )
    assert headline_of(error_of(source), is_cell) == Headline("ValueError", "a", 2)


def test_errors_that_are_each_others_cause_end_the_search() -> None:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert headline_of(one, is_cell).because == "caused by KeyError: 'other'"


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
    error = RuntimeError("work cannot be sent (no lock); call it with rank")
    error.__cause__ = TypeError("no lock")
    assert headline_of(error, lambda _name: False).because == ""
    error.__cause__ = TypeError("another reason")
    assert headline_of(error, lambda _name: False).because == "caused by TypeError: another reason"
