"""Payloads: pickled values of any size, sent in pieces and checked before they are unpickled.

The pieces are keys of the store. A signed message holds the digest of the whole value. So no value
is unpickled unless the other end has signed for it.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from nbddp.errors import RequestError, SignatureError

if TYPE_CHECKING:
    from torch.distributed import Store

    from nbddp.wire.messages import JsonDict

T = TypeVar("T")

PIECE_BYTES = 4 << 20  # the store's libuv server refuses payloads above 8 MiB


def put(
    store: Store, key: str, data: bytes, *, check: Callable[[], None] = lambda: None
) -> JsonDict:
    """Store a pickled value and return the reference that a signed message must hold.

    Args:
        store: store for the pieces.
        key: prefix of the pieces' keys.
        data: the pickled value.
        check: called before each piece. An error that it raises stops the transfer, and the pieces
            are deleted.
    """
    digest = hashlib.sha256()
    payload: JsonDict = {"key": key, "pieces": 0, "digest": ""}
    try:
        for offset in range(0, len(data), PIECE_BYTES):
            check()
            piece: Any = data[offset : offset + PIECE_BYTES]  # typed as str
            store.set(f"{key}/{payload['pieces']}", piece)
            payload["pieces"] += 1
            digest.update(piece)
    except BaseException:
        discard(store, payload)
        raise
    payload["digest"] = digest.hexdigest()
    # A round trip, because the store does not acknowledge set(). The message with the reference
    # uses another connection and could arrive before the pieces.
    store.check(_piece_keys(payload))
    return payload


def unpickle(data: bytes, loads: Callable[[bytes], T] = pickle.loads) -> T:
    """Unpickle a value with a valid signature; ``loads`` does the work.

    Raises:
        RequestError: the value needs something that this process does not have.
    """
    try:
        return loads(data)
    except Exception as error:  # imports and the value's own code may raise anything
        raise RequestError(
            f"the value cannot be unpickled in this process ({type(error).__name__}: {error}); "
            "send only parts of it, such as numbers, tensors or a state_dict()"
        ) from error


def get(store: Store, payload: JsonDict) -> bytes:
    """Return a pickled value, which is now safe to unpickle. Does not wait for it.

    Raises:
        RequestError: the value was deleted.
        SignatureError: the pieces differ from those that were signed.
    """
    keys = _piece_keys(payload)
    if not store.check(keys):  # get() of a missing key would wait for it
        raise RequestError("the value was deleted: it was already read, or its group has ended")
    data = b"".join(store.get(key) for key in keys)
    if not hmac.compare_digest(hashlib.sha256(data).hexdigest(), payload["digest"]):
        raise SignatureError("the value was changed on its way and was not unpickled")
    return data


def discard(store: Store, payload: JsonDict) -> None:
    """Delete a value from the store after all readers have read it."""
    for key in _piece_keys(payload) if payload else ():
        store.delete_key(key)


def discard_unannounced(store: Store, key: str) -> None:
    """Delete a value if its sender died before it could send the reference."""
    index = 0
    while store.delete_key(f"{key}/{index}"):
        index += 1


def exists(store: Store, payload: JsonDict) -> bool:
    """Return whether a value is still in the store."""
    return bool(store.check(_piece_keys(payload)[:1]))


def _piece_keys(payload: JsonDict) -> list[str]:
    return [f"{payload['key']}/{index}" for index in range(payload["pieces"])]
