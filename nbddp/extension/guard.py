"""The boundary around extensions: an error in one ends neither a cell nor a rank nor a view."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nbddp.extension.installed import load
from nbddp.sigint import Future, run_in_thread, wait_for_all

MAX_FAILURES = 3  # in a row; then the hook is off until the next start of the ranks
SLOW = 1.0  # seconds; a hook that takes longer has failed
# Waits of 10 ms for a hook for which an interrupt waits. On a busy machine each takes longer.
URGENT = 30
logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Record:
    """The failures of a hook in an attempt, and whether its last call was slow."""

    attempt: int
    in_a_row: int = 0
    is_slow: bool = False
    is_told: bool = False


class Guard:
    """Calls the hooks of extensions.

    Args:
        tell: shows a sentence to the user.
        attempt: returns the attempt of the ranks, 1 from their first start on.
    """

    def __init__(self, tell: Callable[[str], None], attempt: Callable[[], int]) -> None:
        self._tell = tell
        self._attempt = attempt
        self._records: dict[tuple[str, str], _Record] = {}
        self._late: dict[str, Future[Any]] = {}  # by extension, a hook for which nothing waits now

    def call(
        self,
        extension: str,
        hook: Callable[..., T],
        *args: Any,
        default: T,
        may_be_slow: bool = False,
        is_urgent: bool = False,
    ) -> T:
        """Return what a hook returns; the default if it fails, or is off.

        Args:
            extension: the name of its extension.
            hook: the hook.
            *args: its arguments.
            default: what to return instead.
            may_be_slow: for an import, or if the user waits for it.
            is_urgent: if an interrupt waits for it. It is not called if its last call was slow. It
                runs on a thread of its own, and after 0.3 s nothing waits for it. Until it ends, no
                hook of its extension is called.
        """
        key, attempt = (extension, hook.__name__), self._attempt()
        record = self._records.get(key)
        if record is None or record.attempt != attempt:
            record = self._records[key] = _Record(attempt)
        is_off = record.in_a_row >= MAX_FAILURES or (is_urgent and record.is_slow)
        if is_off or self._is_late(extension):
            return default
        began, what = time.monotonic(), ""
        try:
            result = self._call_urgently(extension, hook, *args) if is_urgent else hook(*args)
        except Exception as error:
            result, what = default, f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.exception("the extension %s failed in its hook %s", *key)
        seconds = time.monotonic() - began
        record.is_slow = not may_be_slow and (seconds > SLOW or self._is_late(extension))
        if record.is_slow and not what:
            what = f"it took {seconds:.1f} s"
            logger.warning("the extension %s took %.1f s in its hook %s", key[0], seconds, key[1])
        if not what:
            record.in_a_row = 0
            return result
        record.in_a_row += 1
        if not record.is_told:
            record.is_told = True
            self._tell(
                f"the extension {extension} failed in its hook {hook.__name__} ({what}); all else "
                f"goes on. After {MAX_FAILURES} failures in a row the hook is off until the next "
                "start of the ranks"
            )
        return result

    def _is_late(self, extension: str) -> bool:
        return extension in self._late and not self._late[extension].done()

    def _call_urgently(self, extension: str, hook: Callable[..., T], *args: Any) -> T:
        future = run_in_thread(
            f"nbddp-{extension}", partial(copy_context().run, partial(hook, *args))
        )
        for _ in range(URGENT):
            wait_for_all([future], 0.01)
            if future.done():
                return future.result()
        self._late[extension] = future
        future.add_done_callback(partial(_log_late_error, extension))
        raise TimeoutError("it is slow, and an interrupt waits for it")

    def make(self, extension: str, target: str, base: type[T]) -> T:
        """Return an object of the class that a target names; one of its base if that fails."""
        kind = self.call(extension, load, target, default=base, may_be_slow=True)
        return self.call(extension, kind, default=base())


def _log_late_error(extension: str, future: Future[Any]) -> None:
    if error := future.exception():
        logger.error("the extension %s failed after an interrupt", extension, exc_info=error)
