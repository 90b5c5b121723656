"""What is too long for a page is cut once, and it says how much is left out and where the whole is.

Only plain text is cut: pictures, HTML and data have the size that they need.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from nbddp.wire.messages import Failure, JsonDict

MAX_TEXT = 100_000  # characters of a value's or a display's plain text
MAX_MESSAGE = 10_000  # characters of what an exception says

OF_VALUE = "`%ddp pull _` fetches the value"
OF_DISPLAY = "print it instead, and the log has all of it"
TOO_LONG = "too long for a page"
OF_ERROR = "the rank has it whole, as `sys.last_value`"


def shorten(text: str, way_out: str, *, limit: int = MAX_TEXT) -> str:
    r"""The beginning, and a line on what is not there.

    >>> shorten("abcdef", "see x", limit=4), shorten("abcd", "see x", limit=4)
    ('abcd\n… 2 more characters; see x', 'abcd')
    """
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters; {way_out}"


def shorten_middle(text: str, way_out: str, *, limit: int = MAX_TEXT) -> str:
    """The beginning and the end, for a traceback: both tell more than what is between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    said = f"\n… {len(text) - 2 * half:,} more characters; {way_out}\n"
    return f"{text[:half]}{said}{text[-half:]}"


def shorten_display(data: JsonDict) -> JsonDict:
    """A MIME bundle whose plain text fits a page."""
    text = data.get("text/plain")
    return data | {"text/plain": shorten(text, OF_DISPLAY)} if isinstance(text, str) else data


def shorten_value(bundle: JsonDict) -> JsonDict:
    """A value's bundle whose plain text fits a page; of ranks that differ, it differs still."""
    text = bundle["data"].get("text/plain")
    if not isinstance(text, str) or len(text) <= MAX_TEXT:
        return bundle
    data = bundle["data"] | {"text/plain": shorten(text, OF_VALUE)}
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return bundle | {"data": data, "digest": digest}


def shorten_failure(failure: Failure) -> Failure:
    """An error whose message and traceback fit a page."""
    return replace(
        failure,
        text=shorten(failure.text, OF_ERROR, limit=MAX_MESSAGE),
        traceback=shorten_middle(failure.traceback, OF_ERROR),
    )
