"""Tracebacks as people read them: libraries' frames folded, and the user's own left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from nbddp.worker import folding
from nbddp.worker.folding import folded, library_of

MODULE = torch.nn.modules.module.__file__
DISTRIBUTED = torch.distributed.__file__
CELL = "Cell In[3], line 8\n      7 model = net()\n----> 8 model(x)\n"
END = "RuntimeError: mat1 and mat2 shapes cannot be multiplied"


WITHIN_A_MESSAGE = (
    f"{CELL}\nValueError: Caught ValueError in DataLoader worker process 0.\n"
    "Original Traceback (most recent call last):\n"
    f'  File "{MODULE}", line 3, in fetch\n    data = [self[i]\n            ~~~~~\n'
    f'  File "{MODULE}", line 5, in fetch\n    data\n'
    '  File "<ipython-input-3-55e2eb48c2b8>", line 5, in __getitem__\n    return load(i)\n'
    "ValueError: image 0 is broken"
)
IN_A_GROUP = (
    '    | Traceback (most recent call last):\n    |   File "train.py", line 6, in f\n'
    f'    |     g()\n    |   File "{MODULE}", line 2, in g\n    |     h()\n    |     ^^^\n'
    "    | ValueError: bad\n    +----"
)
IN_C = (
    f"{CELL}\nRuntimeError: no\n"
    "Exception raised from meta at ../LinearAlgebra.cpp:200 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x8 (0x7f in /lib/libc10.so)\n"
    "frame #1: c10::detail::fail(char const*) + 0x6a (0x7f in /lib/libc10.so)\n"
)


def ipythons(*files: str) -> str:
    """Frames as IPython writes them."""
    frames = [
        f"File {file}:12, in call(x)\n     11 if x:\n---> 12     return x\n" for file in files
    ]
    return "\n".join([CELL, *frames, END])


def test_frames_of_libraries_are_folded_and_those_of_the_user_stay(
    snapshot: SnapshotAssertion,
) -> None:
    assert folded(ipythons(MODULE, MODULE)) == snapshot(name="one library")
    several = ipythons(MODULE, asyncio.__file__, pytest.__file__)
    assert folded(several) == snapshot(name="several libraries")
    between = ipythons(MODULE, "/home/me/train.py", MODULE)
    assert folded(between) == snapshot(name="the user's between")
    assert folded(WITHIN_A_MESSAGE) == snapshot(name="within a message")
    assert folded(IN_A_GROUP) == snapshot(name="in a group")
    assert folded(IN_C) == snapshot(name="in C")


def test_colours_do_not_hide_a_frame() -> None:
    coloured = ipythons(MODULE).replace("File ", "\x1b[36mFile \x1b[39m\x1b[32m")
    coloured = coloured.replace(", in call", "\x1b[39m, in \x1b[36mcall")
    assert MODULE not in folded(coloured)
    assert "in torch\n" in folded(coloured)


def test_a_traceback_of_libraries_alone_stays_as_it_is() -> None:
    text = ipythons(MODULE).removeprefix(CELL)
    assert folded(text) == text


@pytest.mark.parametrize("text", ["", "UsageError: File not found", "a\n\nb\n", END])
def test_what_is_no_traceback_stays(text: str) -> None:
    assert folded(text) == text


@pytest.mark.parametrize(
    ("filename", "library"),
    [
        (MODULE, "torch"),
        (DISTRIBUTED, "torch"),
        (folding.__file__, "nbddp"),
        (asyncio.__file__, "asyncio"),
        ("<frozen runpy>", "runpy"),
        ("<frozen importlib._bootstrap>", "importlib"),
        (str(Path.home() / "train.py"), ""),
        ("~/train.py", ""),
        ("~nobody-of-this-name/train.py", ""),
        ("<string>", ""),
        (__file__, ""),
    ],
)
def test_a_file_belongs_to_a_library_or_to_the_user(filename: str, library: str) -> None:
    assert library_of(filename) == library
