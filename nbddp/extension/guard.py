"""The boundary around extensions: an error in one ends neither a cell nor a rank nor a view."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nbddp.extension.installed import load

MAX_FAILURES = 3  # in a row; then the hook is off until the next start of the ranks
SLOW = 1.0  # seconds; a hook that takes longer has failed
logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Record:
    """The failures of a hook in an attempt."""

    attempt: int
    in_a_row: int = 0
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

    def call(
        self,
        extension: str,
        hook: Callable[..., T],
        *args: Any,
        default: T,
        may_be_slow: bool = False,
    ) -> T:
        """Return what a hook returns; the default if it fails, or is off.

        ``may_be_slow``: for an import, or if the user waits for it.
        """
        key, attempt = (extension, hook.__name__), self._attempt()
        record = self._records.get(key)
        if record is None or record.attempt != attempt:
            record = self._records[key] = _Record(attempt)
        if record.in_a_row >= MAX_FAILURES:
            return default
        began = time.monotonic()
        try:
            result = hook(*args)
            seconds = time.monotonic() - began
            if may_be_slow or seconds <= SLOW:
                record.in_a_row = 0
                return result
            what = f"it took {seconds:.1f} s"
            logger.warning("the extension %s took %.1f s in its hook %s", key[0], seconds, key[1])
        except Exception as error:
            what, result = f"{type(error).__name__}: {error}".partition("\n")[0], default
            logger.exception("the extension %s failed in its hook %s", *key)
        record.in_a_row += 1
        if not record.is_told:
            record.is_told = True
            self._tell(
                f"the extension {extension} failed in its hook {hook.__name__} ({what}); all else "
                f"goes on. After {MAX_FAILURES} failures in a row the hook is off until the next "
                "start of the ranks"
            )
        return result

    def make(self, extension: str, target: str, base: type[T]) -> T:
        """Return an object of the class that a target names; one of its base if that fails."""
        kind = self.call(extension, load, target, default=base, may_be_slow=True)
        return self.call(extension, kind, default=base())
