"""Python values that cross the border: pickled, cut into pieces, checked before they are opened.

The pieces travel as keys of the store; the digest of the whole travels in a signed message. So
nothing is unpickled that the other end did not sign for.
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
    """Put a pickled value into the store and return what a signed message must say about it.

    Args:
        store: what it travels through.
        key: where it goes in there.
        data: the value.
        check: asked before each piece; what it raises ends this, and nothing is left in the store.
    """
    digest = hashlib.sha256()
    payload: JsonDict = {"key": key, "pieces": 0, "digest": ""}
    try:
        for begin in range(0, len(data), PIECE_BYTES):
            check()
            piece: Any = data[begin : begin + PIECE_BYTES]  # typed as str
            store.set(f"{key}/{payload['pieces']}", piece)
            payload["pieces"] += 1
            digest.update(piece)
    except BaseException:
        discard(store, payload)
        raise
    payload["digest"] = digest.hexdigest()
    # a round trip: the store acknowledges no set, and the message that tells of this value goes
    # over another connection, so that it might be read before the pieces are there
    store.check(_piece_keys(payload))
    return payload


def unpickle(data: bytes, loads: Callable[[bytes], T] = pickle.loads) -> T:
    """The value that was pickled, whose signature holds; ``loads`` opens it.

    Raises:
        RequestError: what it is made of is not to be had in this process.
    """
    try:
        return loads(data)
    except Exception as error:  # whatever it imports, and its own unpickling, raises
        raise RequestError(
            f"the value cannot be opened on this side ({type(error).__name__}: {error}); send "
            "parts of it that can, such as numbers, tensors or a state_dict()"
        ) from error


def get(store: Store, payload: JsonDict) -> bytes:
    """Collect a value as it was pickled, which is safe to open then; does not wait for it.

    Raises:
        RequestError: it is no longer there.
        SignatureError: when the pieces are not those that the message spoke of.
    """
    keys = _piece_keys(payload)
    if not store.check(keys):  # to get a key that is gone would wait for it
        raise RequestError("a value is no longer there: it was collected, or its group has ended")
    data = b"".join(store.get(key) for key in keys)
    if not hmac.compare_digest(hashlib.sha256(data).hexdigest(), payload["digest"]):
        raise SignatureError("a value was changed on its way and was not opened")
    return data


def discard(store: Store, payload: JsonDict) -> None:
    """Free the store's memory once everybody has read."""
    for key in _piece_keys(payload) if payload else ():
        store.delete_key(key)


def discard_unannounced(store: Store, key: str) -> None:
    """Free the memory of a value whose sender died before it could tell of it."""
    index = 0
    while store.delete_key(f"{key}/{index}"):
        index += 1


def exists(store: Store, payload: JsonDict) -> bool:
    """Return whether a value was not discarded yet."""
    return bool(store.check(_piece_keys(payload)[:1]))


def _piece_keys(payload: JsonDict) -> list[str]:
    return [f"{payload['key']}/{index}" for index in range(payload["pieces"])]
