"""A value crosses the border in pieces, and is not opened unless all of it is what was signed."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.errors import RequestError, SignatureError
from nbddp.wire import parcels
from nbddp.wire.parcels import discard, pack, unpack

opened: list[str] = []


def spring(trap: str) -> str:
    """What a hostile value would run while it is unpickled."""
    opened.append(trap)
    return trap


class MemoryStore:
    """The four calls of a TCPStore that values need, in memory."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.keys[key] = value

    def get(self, key: str) -> bytes:
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.keys.pop(key, None) is not None


class Trap:
    """A value that leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return spring, ("sprung",)


@pytest.fixture
def store() -> MemoryStore:
    opened.clear()
    return MemoryStore()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(parcels, "PIECE_BYTES", 10)
    return 10


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=5))
def test_a_value_comes_out_as_it_went_in(value: Any) -> None:
    store = MemoryStore()
    assert unpack(store, pack(store, "key", value)) == value


def test_a_function_made_in_a_notebook_comes_out_too(store: MemoryStore) -> None:
    offset = 3
    again = unpack(store, pack(store, "key", lambda x: x + offset))
    assert again(4) == 7


def test_a_large_value_travels_in_pieces_that_the_store_accepts(
    store: MemoryStore, small_pieces: int
) -> None:
    value = bytes(range(100))
    parcel = pack(store, "key", value)
    size = sum(len(piece) for piece in store.keys.values())
    assert parcel["pieces"] == math.ceil(size / small_pieces) > 10
    assert set(store.keys) == {f"key/{index}" for index in range(parcel["pieces"])}
    assert max(len(piece) for piece in store.keys.values()) == small_pieces
    assert unpack(store, parcel) == value


@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_a_value_that_just_fills_its_pieces_comes_out_whole(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, surplus: int
) -> None:
    data = bytes(1000)
    size = len(pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL))
    monkeypatch.setattr(parcels, "PIECE_BYTES", size // 2 + surplus)
    assert unpack(store, pack(store, "key", data)) == data


def test_a_piece_is_smaller_than_what_the_stores_server_refuses() -> None:
    assert parcels.PIECE_BYTES < 8 << 20


def test_reading_leaves_the_pieces_for_other_readers(store: MemoryStore) -> None:
    parcel = pack(store, "key", [1, 2])
    assert unpack(store, parcel) == unpack(store, parcel) == [1, 2]


def test_discarding_removes_every_piece_and_nothing_else(
    store: MemoryStore, small_pieces: int
) -> None:
    del small_pieces
    kept = pack(store, "kept", "k" * 100)
    before = dict(store.keys)
    gone = pack(store, "gone", "g" * 100)
    assert store.keys != before
    discard(store, gone)
    assert store.keys == before
    assert unpack(store, kept) == "k" * 100


def test_a_value_under_another_digest_is_not_opened(store: MemoryStore) -> None:
    parcel = pack(store, "key", Trap())
    with pytest.raises(SignatureError) as caught:
        unpack(store, parcel | {"digest": "0" * 64})
    assert str(caught.value) == "a value was changed on its way and was not opened"
    assert opened == []
    unpack(store, parcel)
    assert opened == ["sprung"]  # it would have left its trace


def test_a_value_put_in_anothers_place_is_not_opened(store: MemoryStore) -> None:
    parcel = pack(store, "key", "harmless")
    store.set("key/0", pickle.dumps(Trap()))
    with pytest.raises(SignatureError):
        unpack(store, parcel)
    assert opened == []


@pytest.mark.parametrize("bit", range(8))
def test_a_value_changed_in_one_bit_of_any_piece_is_not_opened(
    store: MemoryStore, small_pieces: int, bit: int
) -> None:
    del small_pieces
    parcel = pack(store, "key", [Trap(), "x" * 50])
    for key, piece in list(store.keys.items()):
        store.set(key, bytes([piece[0] ^ 1 << bit]) + piece[1:])
        with pytest.raises(SignatureError):
            unpack(store, parcel)
        store.set(key, piece)
    assert opened == []


def test_pieces_in_another_order_or_one_too_few_are_not_opened(
    store: MemoryStore, small_pieces: int
) -> None:
    del small_pieces
    parcel = pack(store, "key", "abcdefghijklmnopqrstuvwxyz" * 3)
    with pytest.raises(SignatureError):
        unpack(store, parcel | {"pieces": parcel["pieces"] - 1})
    store.keys["key/1"], store.keys["key/2"] = store.keys["key/2"], store.keys["key/1"]
    with pytest.raises(SignatureError):
        unpack(store, parcel)


def test_a_value_that_cannot_be_pickled_leaves_nothing_in_the_store(store: MemoryStore) -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pack(store, "key", (value for value in "generator"))
    assert store.keys == {}


def test_a_value_that_is_gone_is_not_waited_for(store: MemoryStore, small_pieces: int) -> None:
    del small_pieces
    parcel = pack(store, "key", "x" * 100)
    del store.keys["key/3"]
    with pytest.raises(RequestError) as caught:
        unpack(store, parcel)
    assert str(caught.value) == (
        "a value is no longer there: it was collected, or its group has ended"
    )


def test_a_value_is_there_before_anybody_is_told_of_it() -> None:
    class SlowStore(MemoryStore):
        """Does what was set when it is asked something, as a server does that is behind."""

        def __init__(self) -> None:
            super().__init__()
            self.behind: dict[str, bytes] = {}

        def set(self, key: str, value: bytes) -> None:
            self.behind[key] = value

        def check(self, keys: list[str]) -> bool:
            self.keys |= self.behind
            return super().check(keys)

    store = SlowStore()
    pack(store, "key", "x")
    assert list(store.keys) == ["key/0"]


def test_discarding_what_is_gone_or_was_never_there_harms_nobody(store: MemoryStore) -> None:
    parcel = pack(store, "key", 1)
    discard(store, parcel)
    discard(store, parcel)
    discard(store, {})
    assert store.keys == {}


def test_a_value_that_is_not_wanted_any_more_leaves_nothing(
    store: MemoryStore, small_pieces: int
) -> None:
    def check() -> None:
        if len(store.keys) == 3:
            raise RequestError("not wanted")

    with pytest.raises(RequestError, match="not wanted"):
        parcels.put(store, "key", bytes(10 * small_pieces), check=check)
    assert store.keys == {}
