"""The text that the notebooks train on: all of it there, and nothing else in it."""

import hashlib

from nbddp import sonnets


def test_the_text_has_79_complete_sonnets_in_ascii() -> None:
    text = sonnets()
    poems = text.removesuffix("\n").split("\n\n")
    assert len(set(poems)) == len(poems) == 79
    assert {len(poem.splitlines()) for poem in poems} == {14}
    assert text.isascii()
    # losses are stated for this very text
    checksum = "43e4c8d2c87194a97d9ee29ea0746d23d78849e23cc1b102f0a8e7f9fbf2633a"
    assert hashlib.sha256(text.encode()).hexdigest() == checksum
