"""Messages survive a round trip; anything else raises WireError and no other error."""

import json
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from strategies import KINDS, any_message, of_kind
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import WireError
from nbddp.wire.messages import Message, MessageBatch, Metrics, Output, decode, encode


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_message_of_every_kind_survives_a_round_trip(
    kind: type[Any], data: st.DataObject
) -> None:
    message = data.draw(of_kind(kind))
    again = decode(encode(message))
    assert again == message
    assert type(again) is kind


@given(st.lists(any_message(), max_size=4))
def test_several_messages_are_encoded_as_one(messages: list[Message]) -> None:
    batch = MessageBatch(messages=messages)
    assert decode(encode(batch)) == batch


@pytest.mark.parametrize("kind", KINDS)
def test_each_message_class_is_frozen_documented_and_strict_about_its_fields(
    kind: type[Any],
) -> None:
    assert kind.__doc__
    assert kind.__dataclass_params__.frozen
    values: dict[str, Any] = {item.name: 1 for item in fields(kind)}
    decode(json.dumps([kind.__name__, values]).encode())
    with pytest.raises(WireError, match="surplus"):
        decode(json.dumps([kind.__name__, values | {"surplus": 1}]).encode())
    for item in fields(kind):
        if item.default is MISSING and item.default_factory is MISSING:
            few = {name: 1 for name in values if name != item.name}
            with pytest.raises(WireError, match=item.name):
                decode(json.dumps([kind.__name__, few]).encode())


def test_text_that_is_not_unicode_survives_a_round_trip() -> None:
    message = Output(start=0, end=1, text="file \udcff, \x00 and \U0001f600")
    assert decode(encode(message)) == message


def test_numbers_of_numpy_are_sent_as_plain_numbers() -> None:
    message = Metrics(rows=[[np.float32(0.5), np.int64(3), {}]])
    assert decode(encode(message)) == Metrics(rows=[[0.5, 3, {}]])


@given(any_message(), st.data())
def test_a_message_with_changed_bytes_is_another_message_or_refused(
    message: Message, data: st.DataObject
) -> None:
    changed = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    with suppress(WireError):  # and nothing else
        decode(bytes(changed))


NO_MESSAGES = [
    b"null",
    b"[]",
    b'["Shutdown"]',
    b'["Shutdown", {}, 1]',
    b'["Shutdown", "x"]',
    b'["Shutdown", null]',
    b'["Nonsense", {}]',
    b'["Failure", {"name": "E", "text": "", "traceback": ""}]',
    b"[[], {}]",
    b"[{}, {}]",
    b'"ab"',
    b'{"Shutdown": {}}',
    b"\xff\xfe",
    b'["Shutdown", {}] trailing',
    b"\x80\x04N.",  # a pickle
    b"[" * 100_000,
    b'{"a":' * 100_000,
    *(
        f'["MessageBatch", [["Shutdown", {{}}], {inside}]]'.encode()
        for inside in ("1", "[1]", '["Shutdown"]', '["No", {}]', '["MessageBatch", []]')
    ),
]


@pytest.mark.parametrize("data", NO_MESSAGES, ids=lambda data: data.decode("latin1")[:30])
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_the_error_for_an_invalid_message_has_the_reason(snapshot: SnapshotAssertion) -> None:
    for data in (b"", b'["Nonsense", {}]'):
        assert refusal(WireError, decode, data) == snapshot
