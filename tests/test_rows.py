"""The lines of a record are read many at a time, and each as if it were alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nbddp.record import rows
from nbddp.record.rows import Rows

GOOD = st.fixed_dictionaries(
    {"time": st.floats(allow_nan=False) | st.integers()},
    optional={"rank": st.integers(), "odd": st.text() | st.none() | st.lists(st.booleans())},
)
TORN = ["{", "7", "[]", "null", "{}", '"x"', "1", "2", '{"ti', "[1", "2]", '"', '"a']
TWO = ['{"time": 1.0} {"time": 2.0}', '{"time": 1.0}, {"time": 2.0}', '{"time": "x"}', "\x00"]
BAD = st.sampled_from([*TORN, *TWO])
LINES = st.lists(GOOD.map(json.dumps) | BAD, max_size=30)


def one_by_one(lines: list[str], needed: tuple[str, ...]) -> tuple[list[Any], int]:
    found, bad = [], 0
    for line in filter(str.strip, lines):
        try:
            row = json.loads(line)
            assert isinstance(row["time"], float | int)
            assert {*needed} <= row.keys()
            found.append(row)
        except (ValueError, TypeError, KeyError, AssertionError):
            bad += 1
    return found, bad


@given(lines=LINES, needed=st.sampled_from([(), ("rank",), ("odd", "rank")]))
def test_lines_read_together_are_what_each_is_alone(
    lines: list[str], needed: tuple[str, ...], tmp_path_factory: Any
) -> None:
    path: Path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    read = Rows(path, *needed)
    assert (list(read), read.unreadable) == one_by_one(lines, needed)


def test_a_torn_line_costs_none_of_its_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = [{"time": float(number), "kind": "x"} for number in range(3 * rows.AT_ONCE)]
    text = "".join(f"{json.dumps(each)}\n" for each in whole)
    path.write_text(text + '{"time": 9.0, "ki')
    read = Rows(path, "kind")
    assert list(read) == whole
    assert read.unreadable == 1


def test_bytes_that_are_no_text_are_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'\xff\xfe\x00\n{"time": 1.0}\n')
    read = Rows(path)
    assert (list(read), read.unreadable) == ([{"time": 1.0}], 1)
