"""Form a new process group on this rank, move the models to it, and report failures."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Set
from types import FunctionType
from typing import Any

import torch.distributed as dist

from nbddp.wire.messages import Failure, Regroup, RunCell
from nbddp.worker.cell.failure import failure_outside_cells
from nbddp.worker.process_group.migration import Migration, renew_torch, unbind
from nbddp.worker.process_group.process_group import ProcessGroup
from nbddp.worker.torch_errors import is_backend_error


class Regrouper:
    """Handles ``Regroup``. A failure is reported once, by the next cell that needs the group.

    Attributes:
        is_consequence: whether the last failure is only a consequence of another rank's end.
    """

    def __init__(
        self, group: ProcessGroup, namespace: Mapping[str, Any], notify_user: Callable[[str], None]
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._notify_user = notify_user
        self._may_migrate = True
        self._failure: Failure | None = None
        self._moved_line, self._moved_names = "", set[str]()
        self.is_consequence = False

    def regroup(
        self,
        command: Regroup,
        *,
        source: int = 0,
        is_heal: bool = False,
        on_joined: Callable[[], None] = lambda: None,
    ) -> str:
        """Destroy the process group and, if requested, form a new one with the other ranks.

        Args:
            command: the message.
            source: rank whose models and states the other ranks get.
            is_heal: whether some ranks have a new process.
            on_joined: called in the new group before models are moved.

        Returns:
            Why it failed, in one line; empty if it succeeded.
        """
        self._failure = failure = None
        try:
            if command.form:
                self._group.init(command.generation)
                renew_torch(self._namespace)
                on_joined()
                self._migrate(source, is_heal=is_heal)
                self._group.apply_user_timeout()
            else:
                self._group.destroy()
        except Exception as error:  # noqa: BLE001 - the next cell reports it; the rank lives on
            self.is_consequence = is_backend_error(error)
            failure = failure_outside_cells(error)
        if failure is None:
            return ""
        self._failure = None if is_heal else failure  # the answer reports the failure of a heal
        group = dist.group.WORLD
        for model in self._group.bound_objects.models:
            if model.__dict__.get("process_group") is group:
                unbind(model)
        self._group.destroy()  # ends the waits of other ranks for this one
        del group
        gc.collect()  # its connections close with the last reference
        return f"{failure.name}: {failure.text}".partition("\n")[0]

    def pop_failure(self, command: RunCell) -> Failure | None:
        """Return why this cell cannot start. The next cell may try again."""
        failure, self._failure = self._failure, None
        return failure if command.needs_group else None

    def _migrate(self, source: int, *, is_heal: bool) -> None:
        """Move the models. If that failed once, do not try again with the next group.

        A lost connection or an interrupt does not count as a failure of the models.
        """
        may_migrate, self._may_migrate = self._may_migrate, True
        try:
            objects, namespace = self._group.bound_objects, self._namespace
            migration = Migration(objects, namespace, source, is_heal)
            lines = migration.run(may_migrate=may_migrate)
        except Exception as error:
            self._may_migrate = self._group.is_broken or is_backend_error(error)
            raise
        for line in lines:
            self._notify_user(line)
        if migration.moved_line:
            self._moved_line, self._moved_names = migration.moved_line, migration.moved_names

    def tell_moved(self, source: str) -> None:
        """Tell which objects were moved, in the first cell that uses one of them.

        The next cell after a failure may have nothing to do with them.
        """
        line, names = self._moved_line, self._moved_names
        if line and (not names or uses_any(names, source, self._namespace)):
            self._moved_line = ""
            self._notify_user(line)


def uses_any(names: Set[str], source: str, namespace: Mapping[str, Any]) -> bool:
    """Return whether a cell uses a variable, itself or in functions that it uses.

    >>> uses_any({"model"}, "model(x)", {}), uses_any({"model"}, "print(1)", {})
    (True, False)
    >>> uses_any({"len"}, "%time count()", {"count": lambda: len([])})
    True
    """
    words, seen = {*re.findall(r"\w+", source)}, set[str]()
    while words - seen and not words & names:
        new, seen = words - seen, seen | words
        functions = [namespace[word] for word in new if type(namespace.get(word)) is FunctionType]
        words = {name for function in functions for name in function.__code__.co_names}
    return bool(words & names)
