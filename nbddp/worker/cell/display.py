"""Send the rich output of a cell: the value of its last line, and ``display()``."""

from __future__ import annotations

import hashlib
import uuid
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from nbddp.wire.messages import Display, Failure, JsonDict
from nbddp.worker.output.log_writer import flush_python_streams

_WIDGET = "application/vnd.jupyter.widget-view+json"
NO_WIDGET = (
    "nbddp: {kind}: a widget of a rank cannot be shown; use nbddp.track and nbddp.log, "
    "or create it in a cell that runs in the notebook itself"
)


class RankDisplayHook(DisplayHook):
    """Keep the MIME bundle of the last expression instead of printing it."""

    bundle: JsonDict = {}  # noqa: RUF012 - replaced, never modified

    def __call__(self, result: Any = None) -> None:
        """Keep the value, even if a closing semicolon hides it."""
        super().__call__(result)
        if result is not None and self.quiet():
            self.fill_exec_result(result)

    def write_output_prompt(self) -> None:
        """Print no ``Out[1]:``: the controller shows equal values of ranks once."""

    def write_format_data(self, format_dict: JsonDict, md_dict: JsonDict | None = None) -> None:
        """Keep the MIME bundle for the controller."""
        data, metadata = sendable_bundle(format_dict, md_dict)
        self.bundle = truncate_value({"data": data, "metadata": metadata})

    def finish_displayhook(self) -> None:
        """Print no line break after the value."""


class RankDisplayPublisher(DisplayPublisher):
    """Send the output of ``display()`` and figures to the controller.

    After ``clear_output()``, the displays of a rank replace its earlier ones, one by one. All ranks
    share the output of a cell, so nothing else is cleared.
    """

    send: Callable[[Display], None] | None = None
    cell = 0

    def begin_cell(self, cell: int) -> None:
        """Forget the displays of the cell before."""
        self.cell, self._shown, self._next, self._has_cleared = cell, list[str](), 0, False
        self._newest: JsonDict = {}

    def publish(  # type: ignore[override]
        self,
        data: JsonDict,
        metadata: JsonDict | None = None,
        *,
        transient: JsonDict | None = None,
        update: bool = False,
        **_ignored: Any,
    ) -> None:
        """Send one bundle, after all earlier output."""
        flush_python_streams()
        data, metadata = sendable_bundle(data, metadata)
        is_repeated = self._has_cleared and self._next > 0 and data == self._newest
        self._newest = data
        display_id = str((transient or {}).get("display_id", ""))
        if not display_id:
            if is_repeated:  # IPython shows figures again that are open at the end of a cell
                return
            display_id, update = self._replaced(data)
        message = Display(
            data=truncate_display(data),
            metadata=metadata,
            display_id=display_id,
            is_update=update,
        )
        if self.send is not None:
            self.send(message)

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002
        """Let the next displays replace the earlier ones."""
        del wait  # the earlier ones always stay until then
        self._has_cleared, self._next = True, 0

    def _replaced(self, data: JsonDict) -> tuple[str, bool]:
        """Return the id of a display, and whether it replaces an earlier display."""
        if not self._has_cleared and data.keys() == {"text/plain"}:
            return "", False  # a line of the log
        is_update = self._next < len(self._shown)
        if not is_update:
            self._shown.append(uuid.uuid4().hex)
        self._next += 1
        return self._shown[self._next - 1], is_update


def sendable_bundle(data: JsonDict, metadata: JsonDict | None) -> tuple[JsonDict, JsonDict]:
    """Return a MIME bundle and its metadata as JSON values. Replace a widget by a hint.

    A widget needs the kernel that created it, and the page is not connected to the ranks.
    """
    if _WIDGET in data:
        kind = str(data.get("text/plain", "")).partition("(")[0] or "a widget"
        return {"text/plain": NO_WIDGET.format(kind=kind)}, {}
    return json_ready(data), json_ready(metadata or {})


def json_ready(value: Any) -> Any:
    """Convert a MIME bundle to JSON values. Bytes become base64, as in Jupyter's messages.

    Numbers and arrays of NumPy or torch become Python numbers and lists, as charts need them.
    """
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return json_ready(value.tolist()) if hasattr(value, "tolist") else str(value)


MAX_TEXT = 100_000  # characters of plain text in a value or display
MAX_MESSAGE = 10_000  # characters of an exception's text

VALUE_HINT = "`%ddp pull _` fetches the value"
DISPLAY_HINT = "print it instead, and the log has all of it"
TOO_LONG = "too long for a page"
ERROR_HINT = "`sys.last_value` on the rank has all of it"


def truncate(text: str, hint: str, *, limit: int = MAX_TEXT) -> str:
    r"""Return the beginning of a text, and a line that counts the missing characters.

    >>> truncate("abcdef", "see x", limit=4), truncate("abcd", "see x", limit=4)
    ('abcd\n… 2 more characters; see x', 'abcd')
    """
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters; {hint}"


def truncate_display(data: JsonDict) -> JsonDict:
    """Truncate the plain text of a MIME bundle."""
    text = data.get("text/plain")
    return data | {"text/plain": truncate(text, DISPLAY_HINT)} if isinstance(text, str) else data


def truncate_value(bundle: JsonDict) -> JsonDict:
    """Truncate the plain text of a value. A digest still tells different values apart."""
    text = bundle["data"].get("text/plain")
    if not isinstance(text, str) or len(text) <= MAX_TEXT:
        return bundle
    data = bundle["data"] | {"text/plain": truncate(text, VALUE_HINT)}
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return bundle | {"data": data, "digest": digest}


def truncate_failure(failure: Failure) -> Failure:
    """Truncate the text and the traceback of an error. Keep both ends of the traceback."""
    traceback, half = failure.traceback, MAX_TEXT // 2
    if (more := len(traceback) - 2 * half) > 0:
        notice = f"\n… {more:,} more characters; {ERROR_HINT}\n"
        traceback = f"{traceback[:half]}{notice}{traceback[-half:]}"
    text = truncate(failure.text, ERROR_HINT, limit=MAX_MESSAGE)
    torch_text = truncate(failure.torch_text, ERROR_HINT, limit=MAX_MESSAGE)
    return replace(failure, text=text, traceback=traceback, torch_text=torch_text)
