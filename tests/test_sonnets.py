"""The text that the notebooks train on: all of it there, and nothing else in it."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from nbddp import sonnets


def test_it_is_79_whole_sonnets_each_once() -> None:
    text = sonnets()
    poems = text.removesuffix("\n").split("\n\n")
    assert len(set(poems)) == len(poems) == 79
    assert {len(poem.splitlines()) for poem in poems} == {14}
    assert text.endswith("\n")
    assert not any(line != line.strip() for line in text.splitlines())


def test_it_is_plain_letters() -> None:
    assert sonnets().isascii()
    assert set(sonnets()) - set(map(chr, range(32, 127))) == {"\n"}
    assert len(set(sonnets())) == 59


def test_no_letter_of_it_changes_unseen() -> None:
    """Losses are stated for this very text."""
    known = "43e4c8d2c87194a97d9ee29ea0746d23d78849e23cc1b102f0a8e7f9fbf2633a"
    assert hashlib.sha256(sonnets().encode()).hexdigest() == known


@pytest.mark.process
def test_asking_for_it_loads_no_torch() -> None:
    asked = "import nbddp, sys; nbddp.sonnets(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", asked], check=True)
