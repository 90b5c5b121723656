"""A value is transferred in pieces, and unpickled only if all of them match the signature."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from refusals import refusal
from stores import MemoryStore
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import RequestError, SignatureError
from nbddp.wire import payloads
from nbddp.wire.function_sources import dumps
from nbddp.wire.payloads import discard, get, put

opened: list[str] = []


def pack(store: MemoryStore, key: str, value: Any) -> dict[str, Any]:
    return put(store, key, dumps(value))


def unpack(store: MemoryStore, payload: dict[str, Any]) -> Any:
    return payloads.unpickle(get(store, payload))


def spring(trap: str) -> str:
    """The code that a hostile value would run while it is unpickled."""
    opened.append(trap)
    return trap


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
    monkeypatch.setattr(payloads, "PIECE_BYTES", 10)
    return 10


@pytest.mark.parametrize("size", [99, 100, 101])
def test_a_large_value_travels_in_pieces_that_the_store_accepts(
    store: MemoryStore, small_pieces: int, size: int
) -> None:
    value = bytes(range(size))
    payload = put(store, "key", value)
    assert payload["pieces"] == math.ceil(size / small_pieces)
    assert set(store.keys) == {f"key/{index}" for index in range(payload["pieces"])}
    assert max(len(piece) for piece in store.keys.values()) == small_pieces
    for _reader in range(2):
        assert get(store, payload) == value


@pytest.mark.usefixtures("small_pieces")
def test_discard_removes_exactly_the_pieces_of_a_payload(store: MemoryStore) -> None:
    kept = pack(store, "kept", "k" * 100)
    before = dict(store.keys)
    gone = pack(store, "gone", "g" * 100)
    assert store.keys != before
    for payload in (gone, gone, {}):  # also for removed and unknown values
        discard(store, payload)
        assert store.keys == before
    assert unpack(store, kept) == "k" * 100


@pytest.mark.usefixtures("small_pieces")
def test_only_the_signed_value_is_unpickled(
    store: MemoryStore, snapshot: SnapshotAssertion
) -> None:
    payload = pack(store, "key", [Trap(), "x" * 50])
    kept = dict(store.keys)
    others: list[tuple[dict[str, Any], dict[str, bytes]]] = [
        (payload | {"digest": "0" * 64}, kept),
        (payload | {"pieces": payload["pieces"] - 1}, kept),
        (payload, kept | {"key/1": kept["key/2"], "key/2": kept["key/1"]}),
        (payload, {**dict.fromkeys(kept, b""), "key/0": pickle.dumps(Trap())}),
    ]
    others += [
        (payload, kept | {key: bytes([piece[0] ^ 1 << bit]) + piece[1:]})
        for key, piece in kept.items()
        for bit in range(8)
    ]
    for told, pieces in others:
        store.keys = pieces
        reason = refusal(SignatureError, unpack, store, told)
        assert opened == []
    assert reason == snapshot
    store.keys = kept
    unpack(store, payload)
    assert opened == ["sprung"]  # it would have left its trace


@pytest.mark.usefixtures("small_pieces")
def test_unpacking_a_deleted_value_fails_at_once(
    store: MemoryStore, snapshot: SnapshotAssertion
) -> None:
    payload = pack(store, "key", "x" * 100)
    del store.keys["key/3"]
    assert refusal(RequestError, unpack, store, payload) == snapshot


def test_a_value_is_stored_before_it_is_announced() -> None:
    class SlowStore(MemoryStore):
        """Applies a write only at a later read, as a slow server does."""

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


def test_a_cancelled_put_leaves_no_keys_in_the_store(store: MemoryStore, small_pieces: int) -> None:
    def check() -> None:
        if len(store.keys) == 3:
            raise RequestError("not wanted")

    with pytest.raises(RequestError, match="not wanted"):
        payloads.put(store, "key", bytes(10 * small_pieces), check=check)
    assert store.keys == {}
