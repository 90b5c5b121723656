"""The text of a failure: one line with the user's own message and line, and a short traceback."""

import itertools
import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import IPython.core.interactiveshell
import pytest
import torch
from IPython.core.error import UsageError
from syrupy.assertion import SnapshotAssertion

import nbddp
from nbddp.wire.messages import Failure
from nbddp.worker.cell.failure import describe_failure
from nbddp.worker.tracebacks import error_text, failure_outside_cells, format_traceback

CELL = "<ipython-input-3>"
OURS = Path(nbddp.__file__).parent

Fail = Callable[..., BaseException]


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("inner")


class _RemoteTraceback(Exception):  # noqa: N818 - multiprocessing's own name
    pass


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))

    def run(source: str, *, filename: str = CELL, **names: Any) -> BaseException:
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)
        names |= {"OddError": OddError, "_RemoteTraceback": _RemoteTraceback, "torch": torch}
        try:
            exec(compile(source, filename, "exec"), names)
        except Exception as error:  # noqa: BLE001 - any exception
            return error.with_traceback(getattr(error.__traceback__, "tb_next", None))
        raise AssertionError("it raised nothing")

    return run


# ---- the traceback

CHAIN = """def load():
    raise KeyError('root')
def build():
    try:
        load()
    except KeyError as error:
        raise ValueError('middle') from error
try:
    build()
except ValueError as error:
    raise RuntimeError('top') from error"""
IN_TORCH = "model = torch.nn.Linear(5, 1)\n\nmodel('x')"
FAILS = {
    "one library": IN_TORCH,
    "several libraries": "import asyncio\n\nasync def f(): asyncio.Queue(0).get_nowait()\n"
    "asyncio.run(f())",
    "a chain": CHAIN,
    "a text that cannot be had": "raise OddError",
    "deep": "def call(n): return call(n - 1) if n else [][0]\ncall(300)",
    "the source is not there": "exec('1 / 0')",
}


def test_a_traceback_shows_user_frames_and_counts_library_frames(
    fail: Fail, snapshot: SnapshotAssertion
) -> None:
    for name, source in FAILS.items():
        text = format_traceback(fail(source))
        assert re.sub(r"\.\.\. \d+ frames?", "... N frames", text) == snapshot(name=name)


def test_the_members_of_an_exception_group_are_in_its_traceback(
    fail: Fail, snapshot: SnapshotAssertion
) -> None:
    source = (
        "def f(n):\n    try: [][n]\n    except IndexError as error: return error\n"
        "raise ExceptionGroup('several', [f(1), TypeError('second')]) from None"
    )
    assert format_traceback(fail(source)) == snapshot


def test_the_whole_traceback_has_the_frames_of_libraries(fail: Fail) -> None:
    error = fail(IN_TORCH)
    assert "... " not in format_traceback(error, is_whole=True)
    assert "F.linear(" in format_traceback(error, is_whole=True)


def test_file_line_and_arrow_have_colors_where_they_are_shown(fail: Fail) -> None:
    error = fail(IN_TORCH)
    text = format_traceback(error, has_colors=True)
    assert "\x1b[32mcell [3]\x1b[0m line 3\n" in text
    assert "\x1b[31m----> 3\x1b[0m model('x')" in text
    assert re.sub(r"\x1b\[\d+m", "", text) == format_traceback(error)


def test_a_frame_without_a_line_number_gets_the_line_of_its_function(fail: Fail) -> None:
    """An interrupt may strike in an instruction that has none."""
    error = fail("def f(): 1 / 0\nf.__code__ = f.__code__.replace(co_linetable=b'')\nf()")
    assert "line 1, in f" in format_traceback(error)
    assert described(error).line == 1


def test_no_frame_of_nbddp_or_ipython_is_in_a_traceback(fail: Fail) -> None:
    def inner() -> None:
        raise ValueError("deep")

    files = (OURS / "train" / "log_and_track.py", IPython.core.interactiveshell.__file__)
    for file, is_whole in itertools.product(files, (False, True)):
        between = eval(compile("lambda f: f()", str(file), "eval"))
        error = fail("between(inner)", between=between, inner=inner)
        text = format_traceback(error, is_whole=is_whole)
        assert str(file) not in text
        assert "... " not in text
        assert "in inner" in text


def test_no_frame_of_nbddp_is_in_the_text_of_another_process(fail: Fail) -> None:
    in_loader = (
        "Caught ValueError in DataLoader worker process 0.\nTraceback (most recent call last):\n"
        f'  File "{OURS}/train/reading.py", line 3, in fetch\n    data = self[i]\n           ~~~\n'
        f'  File "{CELL}", line 5, in __getitem__\n    return load(i)\nValueError: image 0'
    )
    text = format_traceback(fail("raise ValueError(text)", text=in_loader))
    assert "reading.py" not in text
    assert "    data = " not in text
    assert f'(most recent call last):\n  File "{CELL}", line 5' in text


def test_a_usage_error_of_a_magic_is_one_line(fail: Fail) -> None:
    error = fail("raise UsageError('no such file')", UsageError=UsageError)
    assert format_traceback(error) == "UsageError: no such file"


def test_exceptions_in_a_cyclic_cause_chain_are_shown_once(fail: Fail) -> None:
    one, other = fail("raise ValueError('one')"), fail("raise KeyError('other')")
    one.__cause__, other.__cause__ = other, one
    assert format_traceback(one).count("ValueError: one") == 1
    assert summary_of(one)[-1] == "caused by KeyError: 'other'"


# ---- the error in a line


def is_cell(filename: str) -> bool:
    return filename in (CELL, "/home/me/train.py")


def name_of(filename: str) -> str:
    return "train.py" if filename.endswith("train.py") else ""


def described(error: BaseException) -> Failure:
    shell = Mock(is_cell_file=is_cell, name_of_file=name_of, user_ns={})
    shell.format_error.return_value = "shown"
    return describe_failure(error, shell, stuck_in=None, at=1.0)


def summary_of(error: BaseException) -> tuple[str | int, ...]:
    failure = described(error)
    return failure.name, failure.text, failure.line, failure.file, failure.because


WORKER = "in DataLoader worker process 0"
FULL = "unable to write to file </torch_12_34_0>: No space left on device (28)"


def loaded(error: str) -> str:
    """Return the source of a loader whose worker raises an error."""
    return f"""class BadImage(Exception):
    def __init__(self, number, kind): super().__init__(number, kind)
class Images:
    def __getitem__(self, index):
        raise {error}
try:
    Images()[7]
except Exception:
    caught = torch._utils.ExceptionWrapper(where={WORKER!r})
caught.reraise()"""


@pytest.mark.parametrize(
    ("source", "summary"),
    [
        ("\nraise ValueError('too low')", ("ValueError", "too low", 2, "", "")),
        (CHAIN, ("RuntimeError", "top", 11, "", "caused by KeyError: 'root'")),
        ("raise ValueError('a') from OddError()", ("ValueError", "a", 1, "", "OddError")),
        ("raise ValueError('no b') from TypeError('b')", ("ValueError", "no b", 1, "", "")),
        ("raise ValueError('a') from _RemoteTraceback('b')", ("ValueError", "a", 1, "", "")),
        ("raise ValueError('a') from None", ("ValueError", "a", 1, "", "")),
        ("raise NotImplementedError", ("NotImplementedError", "", 1, "", "")),
        ("x = 3\nassert x == 2", ("AssertionError", "assert x == 2", 2, "", "")),
        ("assert 1 == 2, 'why'", ("AssertionError", "why", 1, "", "")),
        (loaded("OSError('bad image 7')"), ("OSError", "bad image 7", 5, "", WORKER)),
        (loaded("KeyError('label')"), ("KeyError", "'label'", 5, "", WORKER)),
        (loaded("BadImage(7, 'png')"), ("BadImage", "(7, 'png')", 5, "", WORKER)),
        (loaded("ValueError"), ("ValueError", "", 5, "", WORKER)),
        (loaded(f"RuntimeError('{FULL}')"), ("RuntimeError", FULL, 5, "", "/dev/shm is full")),
        (f"raise RuntimeError('{FULL}')", ("RuntimeError", FULL, 1, "", "/dev/shm is full")),
    ],
)
def test_an_error_summary_has_type_message_line_file_and_cause(
    fail: Fail, source: str, summary: tuple[str | int, ...]
) -> None:
    *facts, because = summary_of(fail(source))
    assert tuple(facts) == summary[:-1]
    assert str(summary[-1]) in str(because)
    assert bool(because) == bool(summary[-1])


NAMES = {
    "modle = 1\nmodel": ("model", "modle"),
    "n = 1\nnp": ("np", ""),
    "def f(batches): batch\nf(1)": ("batch", "batches"),
    "prnt(1)": ("prnt", "print"),
    loaded("np"): ("np", ""),
    "raise ValueError(\"name 'x' is not defined\")": ("", ""),
    "import typing\ndef f(x: 'np'): pass\ntyping.get_type_hints(f)": ("", ""),
}


@pytest.mark.parametrize("source", NAMES)
def test_a_missing_name_is_reported_unless_library_code_uses_it(fail: Fail, source: str) -> None:
    failure = described(fail(source))
    missing, similar = NAMES[source]
    hint = f"Did you mean `{similar}`?" if similar else ""
    assert (failure.missing_name, failure.hint) == (missing, hint)


def test_the_model_of_a_destroyed_group_is_named(fail: Fail) -> None:
    class Model(torch.nn.Module):
        def forward(self) -> None:
            raise ValueError("Group <ProcessGroup object at 0x7f> is not registered, please create")

    model = Model()
    error = fail("model()", model=model)
    shell = Mock(is_cell_file=is_cell, name_of_file=name_of, user_ns={"kept": [model]})
    shell.format_error.return_value = "shown"
    hint = describe_failure(error, shell, stuck_in=None, at=1.0).hint
    assert hint == "`kept[0]` is on the old process group: create it again."
    shell.user_ns = {}
    hint = describe_failure(error, shell, stuck_in=None, at=1.0).hint
    assert hint == "A model or a group is on the old process group: create it again."


NO_CUDA = ["Torch not compiled with CUDA enabled", "No CUDA GPUs are available"]


@pytest.mark.parametrize("text", NO_CUDA)
def test_a_call_of_cuda_without_cuda_names_to_device(fail: Fail, text: str) -> None:
    assert "`.to(device)`" in described(fail(f"raise AssertionError({text!r})")).because


def test_an_error_summary_names_the_file_of_a_script(fail: Fail) -> None:
    error = fail("\nraise ValueError('a')", filename="/home/me/train.py")
    assert summary_of(error) == ("ValueError", "a", 2, "train.py", "")


def test_an_exception_that_cannot_be_turned_into_text_keeps_its_own_name(fail: Fail) -> None:
    error = fail("raise OddError")
    failure = described(error)
    assert (failure.name, failure.traceback, failure.line) == ("OddError", "shown", 1)
    assert failure.text.endswith("__str__() raised RuntimeError")
    assert failure_outside_cells(error).text == failure.text
    assert error_text(ValueError("too low")) == "too low"
