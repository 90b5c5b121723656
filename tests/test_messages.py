"""What is encoded comes back the same; what is no message of ours is a WireError, nothing else."""

from __future__ import annotations

import json
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import KINDS, any_message, of_kind

from nbddp.errors import WireError
from nbddp.wire.messages import Batch, CellEnded, Failure, Leave, Message, Output, decode, encode


def decode_or_refuse(data: bytes) -> Message | None:
    """The message, or None; any other error than WireError fails the test."""
    try:
        return decode(data)
    except WireError:
        return None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_message_of_every_kind_comes_back_the_same(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(of_kind(kind))
    again = decode(encode(message))
    assert again == message
    assert type(again) is kind


@given(st.lists(any_message(), max_size=4))
def test_several_messages_cross_the_border_as_one(messages: list[Message]) -> None:
    batch = Batch(reports=messages)  # type: ignore[arg-type]
    assert decode(encode(batch)) == batch


@pytest.mark.parametrize("inside", ["1", "[1]", '["Leave"]', '["No", {}]', '["Batch", []]'])
def test_a_batch_with_something_in_it_that_is_no_message_is_refused(inside: str) -> None:
    with pytest.raises(WireError):
        decode(f'["Batch", [["Leave", {{}}], {inside}]]'.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_every_kind_is_frozen_and_says_what_it_is_for(kind: type[Any]) -> None:
    assert kind.__doc__
    assert kind.__dataclass_params__.frozen
    assert not hasattr(kind, "__dict__") or "__slots__" in vars(kind)


def test_a_message_cannot_be_changed() -> None:
    message = Output(start=0, end=1, text="a")
    with pytest.raises(FrozenInstanceError):
        message.end = 2  # type: ignore[misc]


def test_text_that_is_no_unicode_crosses_the_border_too() -> None:
    message = Output(start=0, end=1, text="file \udcff, \x00 and \U0001f600")
    assert decode(encode(message)) == message


def test_the_bytes_are_plain_ascii_without_line_breaks() -> None:
    data = encode(Output(start=0, end=3, text="é\n\x1b[0m"))
    assert data.isascii()
    assert b"\n" not in data


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5))
def test_arbitrary_json_is_refused(value: Any) -> None:
    with pytest.raises(WireError):
        decode(json.dumps(value).encode())


@given(any_message(), st.data())
def test_a_message_with_changed_bytes_is_another_message_or_refused(
    message: Message, data: st.DataObject
) -> None:
    changed = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(changed))


@given(any_message(), st.data())
def test_a_message_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(WireError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_too_many_is_refused(kind: type[Any]) -> None:
    values: dict[str, Any] = {item.name: 1 for item in fields(kind)}
    decode(json.dumps([kind.__name__, values]).encode())
    with pytest.raises(WireError, match="surplus"):
        decode(json.dumps([kind.__name__, values | {"surplus": 1}]).encode())


REQUIRED = [
    (kind, item.name)
    for kind in KINDS
    for item in fields(kind)
    if item.default is MISSING and item.default_factory is MISSING
]


@pytest.mark.parametrize(("kind", "missing"), REQUIRED)
def test_a_field_too_few_is_refused(kind: type[Any], missing: str) -> None:
    values = {item.name: 1 for item in fields(kind) if item.name != missing}
    with pytest.raises(WireError, match=missing):
        decode(json.dumps([kind.__name__, values]).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"",
            "not a message of nbddp: JSONDecodeError('Expecting value: line 1 column 1 (char 0)')",
        ),
        (b'["Nonsense", {}]', "not a message of nbddp: KeyError('Nonsense')"),
    ],
)
def test_the_refusal_says_why(data: bytes, message: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(data)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "data",
    [
        b"null",
        b"[]",
        b'["Leave"]',
        b'["Leave", {}, 1]',
        b'["Leave", "x"]',
        b'["Leave", 5]',
        b'["Leave", null]',
        b"[[], {}]",
        b"[{}, {}]",
        b'"ab"',
        b'{"Leave": {}}',
        b"\xff\xfe",
        b'["Leave", {}] trailing',
        b"\x80\x04N.",  # a pickle
    ],
)
def test_what_looks_nearly_right_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000])
def test_json_nested_beyond_all_measure_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_a_failure_travels_inside_a_cells_end_and_comes_out_whole() -> None:
    failure = Failure(name="ValueError", text="no", traceback="Traceback", line=3, at=1.5)
    values = {item.name: getattr(failure, item.name) for item in fields(failure)}
    ended = CellEnded(cell=1, seconds=0.1, in_group=True, failure=values)
    again = decode(encode(ended))
    assert isinstance(again, CellEnded)
    assert Failure(**again.failure) == failure


def test_a_cell_is_ok_when_it_has_no_failure() -> None:
    assert CellEnded(cell=1, seconds=0.1, in_group=True).is_ok
    assert not CellEnded(cell=1, seconds=0.1, in_group=True, failure={"name": "E"}).is_ok


def test_a_failure_by_itself_is_no_message() -> None:
    with pytest.raises(WireError):
        decode(b'["Failure", {"name": "E", "text": "", "traceback": ""}]')


def test_leaving_needs_no_words() -> None:
    assert encode(Leave()) == b'["Leave", {}]'
