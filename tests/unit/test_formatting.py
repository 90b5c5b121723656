"""Exits of processes and lists of ranks have a text."""

import signal

from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from nbddp.formatting import describe_exit, format_ranks


def test_describe_exit_of_typical_exit_codes(snapshot: SnapshotAssertion) -> None:
    codes = (None, 0, 3, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM, -999)
    assert {str(code): describe_exit(code) for code in codes} == snapshot


@given(st.integers())
def test_describe_exit_accepts_every_exit_code(exitcode: int) -> None:
    assert describe_exit(exitcode).startswith(("exited", "was killed"))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_format_ranks_lists_exactly_the_given_ranks(ranks: set[int]) -> None:
    word, _, text = format_ranks(sorted(ranks)).partition(" ")
    listed: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        listed += range(int(low), int(high or low) + 1)
    assert listed == sorted(ranks)
    assert word == ("rank" if len(ranks) == 1 else "ranks")
