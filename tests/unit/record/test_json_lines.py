"""Rows of JSON are read many at a time, each as if it were alone, also while a file grows."""

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from runs_on_disk import lines

from nbddp.record.json_lines import CHUNK, JsonLinesReader

GOOD = st.fixed_dictionaries(
    {"time": st.floats(allow_nan=False) | st.integers()},
    optional={"rank": st.integers(), "odd": st.text() | st.none() | st.lists(st.booleans())},
)
TORN = ["{", "7", "[]", "null", "{}", '"x"', "1", "2", '{"ti', "[1", "2]", '"', '"a']
TWO = ['{"time": 1.0} {"time": 2.0}', '{"time": 1.0}, {"time": 2.0}', '{"time": "x"}', "\x00"]
BAD = st.sampled_from([*TORN, *TWO])
LINES = st.lists(GOOD.map(json.dumps) | BAD, max_size=30)


def one_by_one(texts: list[str], needed: tuple[str, ...]) -> tuple[list[Any], int]:
    found, bad = [], 0
    for line in filter(str.strip, texts):
        try:
            row = json.loads(line)
            assert isinstance(row["time"], float | int)
            assert {*needed} <= row.keys()
            found.append(row)
        except (ValueError, TypeError, KeyError, AssertionError):
            bad += 1
    return found, bad


@given(texts=LINES, needed=st.sampled_from([(), ("rank",), ("odd", "rank")]))
def test_lines_read_in_bulk_equal_lines_read_one_by_one(
    texts: list[str], needed: tuple[str, ...], tmp_path_factory: Any
) -> None:
    path: Path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    path.write_text("\n".join(texts), encoding="utf-8")
    read = JsonLinesReader(path, *needed)
    assert (list(read), read.unreadable) == one_by_one(texts, needed)


def test_torn_lines_and_invalid_bytes_do_not_affect_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = [{"time": float(number), "kind": "x"} for number in range(CHUNK // 10)]
    path.write_bytes(b"\xff\xfe\x00\n" + lines(whole).encode() + b'{"time": 9.0, "ki')
    read = JsonLinesReader(path, "kind")
    assert list(read) == whole
    assert read.unreadable == 2


def test_rows_of_a_growing_file_are_read_once_their_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    reader = JsonLinesReader(path, "rank")
    assert reader.read() == []
    with path.open("a") as file:
        file.write('{"time": 1.0, "rank": 0, "lo')
        file.flush()
        assert reader.read() == []
        file.write(
            'ss": 2.0}\n{"time": 2.0}\n[1]\nodd\n{"time": "x", "rank": 0}\n{"time": 3, "rank": 1}'
        )
    assert reader.read() == [{"time": 1.0, "rank": 0, "loss": 2.0}]
    assert reader.read() == []
    assert reader.read(is_over=True) == [{"time": 3, "rank": 1}]
    assert reader.read(is_over=True) == []
    assert reader.unreadable == 4
