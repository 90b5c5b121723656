"""The boundary around extensions: an error in one ends neither a cell nor a rank nor a view."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from nbddp.extension.installed import installed, load
from nbddp.sigint import Future, import_interruptibly, run_in_thread, wait_for_all

MAX_FAILURES = 3  # in a row; then the hook is off until the next start of the ranks
SLOW = 1.0  # seconds; a hook that takes longer has failed
# Waits of 10 ms for a hook for which an interrupt waits. On a busy machine each takes longer.
URGENT = 30
logger = logging.getLogger(__name__)

H = TypeVar("H")
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
        hook: str,
        act: Callable[[], T | None],
        *,
        may_be_slow: bool = False,
        is_urgent: bool = False,
    ) -> T | None:
        """Return what a hook returns; None if it fails, or is off.

        Args:
            extension: the name of its extension.
            hook: its name.
            act: calls it.
            may_be_slow: for an import, or if the user waits for it.
            is_urgent: if an interrupt waits for it. It is not called if its last call was slow. It
                runs on a thread of its own, and after 0.3 s nothing waits for it. Until it ends, no
                hook of its extension is called.
        """
        key, attempt = (extension, hook), self._attempt()
        record = self._records.get(key)
        if record is None or record.attempt != attempt:
            record = self._records[key] = _Record(attempt)
        is_off = record.in_a_row >= MAX_FAILURES or (is_urgent and record.is_slow)
        if is_off or self._is_late(extension):
            return None
        began, result, what = time.monotonic(), None, ""
        try:
            result = self._call_urgently(extension, act) if is_urgent else act()
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.exception("the extension %s failed in its hook %s", *key)
        seconds = time.monotonic() - began
        record.is_slow = not may_be_slow and (seconds > SLOW or self._is_late(extension))
        if record.is_slow and not what:
            what = f"it took {seconds:.1f} s"
            logger.warning("the extension %s took %.1f s in its hook %s", extension, seconds, hook)
        if not what:
            record.in_a_row = 0
            return result
        record.in_a_row += 1
        if not record.is_told:
            record.is_told = True
            self._tell(
                f"the extension {extension} failed in its hook {hook} ({what}); all else "
                f"goes on. After {MAX_FAILURES} failures in a row the hook is off until the next "
                "start of the ranks"
            )
        return result

    def _is_late(self, extension: str) -> bool:
        return extension in self._late and not self._late[extension].done()

    def _call_urgently(self, extension: str, act: Callable[[], T]) -> T:
        future = run_in_thread(f"nbddp-{extension}", partial(copy_context().run, act))
        for _ in range(URGENT):
            wait_for_all([future], 0.01)
            if future.done():
                return future.result()
        self._late[extension] = future
        future.add_done_callback(partial(_log_late_error, extension))
        raise TimeoutError("it is slow, and an interrupt waits for it")


def _log_late_error(extension: str, future: Future[Any]) -> None:
    if error := future.exception():
        logger.error("the extension %s failed after an interrupt", extension, exc_info=error)


class Hooks(Generic[H]):
    """The hooks of one kind of all extensions, such as those on a rank.

    Args:
        kind: the field of the manifest that names the class with the hooks.
        guard: calls them.
        *arguments: with which an object of the class is made, once.
    """

    def __init__(self, kind: str, guard: Guard, *arguments: Any) -> None:
        self._kind, self._guard, self._arguments = kind, guard, arguments
        self.made: dict[str, H] = {}

    @property
    def names(self) -> list[str]:
        """The extensions that have such hooks."""
        return [name for name, each in installed().items() if getattr(each, self._kind)]

    def load(self, name: str) -> H:
        """Return the object of an extension; the first time, import its class and make it."""
        if name not in self.made:
            target = getattr(installed()[name], self._kind)
            import_interruptibly(target.partition(":")[0])
            made = load(target)(*self._arguments)
            self.made.setdefault(name, made)  # a cell in the background may have been quicker
        return self.made[name]

    def call(
        self,
        hook: str,
        act: Callable[[str, H], T | None],
        names: Iterable[str] | None = None,
        *,
        slow: Container[str] = (),
        is_urgent: bool = False,
    ) -> dict[str, T]:
        """Call a hook of each extension. Return the results by extension, without those of errors.

        Args:
            hook: its name.
            act: calls it, with the name of an extension and its object.
            names: the extensions; None for all.
            slow: the extensions for which the user waits.
            is_urgent: whether an interrupt waits for the hooks of the others.
        """
        results: dict[str, T] = {}
        for name in self.names if names is None else names:
            made = self._guard.call(name, "load", partial(self.load, name), may_be_slow=True)
            if made is None:
                continue
            is_slow = name in slow
            result = self._guard.call(
                *(name, hook, partial(act, name, made)),
                may_be_slow=is_slow,
                is_urgent=is_urgent and not is_slow,
            )
            if result is not None:
                results[name] = result
        return results


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of facts; other values than those of JSON are an error of the hook."""
    copied: dict[str, Any] = json.loads(json.dumps({**facts}))
    return copied
