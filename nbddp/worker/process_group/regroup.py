"""A rank's part in a new process group: form it, take the models along, say what came of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from nbddp.wire.messages import Failure, Regroup, RunCell
from nbddp.worker.cell.failure import failure_outside_cells
from nbddp.worker.process_group.migration import Migration, unbind
from nbddp.worker.process_group.nccl import is_backend_error
from nbddp.worker.process_group.process_group import ProcessGroup


class Regrouper:
    """Does what a Regroup says; a failure is told by the next cell that needs the group, once.

    Attributes:
        was_left: whether the last failure is but that another rank has gone away.
    """

    def __init__(
        self, group: ProcessGroup, namespace: Mapping[str, Any], notify_user: Callable[[str], None]
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._notify_user = notify_user
        self._bound_objects = group.bound_objects
        self._may_migrate = True
        self._failure: Failure | None = None
        self.is_consequence = False

    def regroup(
        self,
        command: Regroup,
        *,
        source: int = 0,
        is_heal: bool = False,
        on_joined: Callable[[], None] = lambda: None,
    ) -> str:
        """Leave the process group and, if asked, meet the other ranks in a new one.

        Args:
            command: which.
            source: the rank whose models the others take over.
            is_heal: whether some ranks are new.
            on_joined: what is done in the new group before that.

        Returns:
            Why it failed, in one line; nothing if it did not.
        """
        self._failure = failure = None
        try:
            if command.form:
                self._group.init(command.generation)
                on_joined()
                self._migrate(source, is_heal=is_heal)
                self._group.apply_user_timeout()
            else:
                self._group.destroy()
        except Exception as error:  # noqa: BLE001 - the next cell says it; the rank lives on
            self.is_consequence = is_backend_error(error)
            failure = failure_outside_cells(error)
        if failure is None:
            return ""
        self._failure = None if is_heal else failure  # of a heal, its answer tells
        group = self._group.current()
        for model in self._bound_objects.models:
            if model.__dict__.get("process_group") is group:
                unbind(model)
        self._group.destroy()  # which frees the others: they may wait for this rank
        del group
        gc.collect()  # its connections close when nothing holds it any more
        return f"{failure.name}: {failure.text}".partition("\n")[0]

    def pop_failure(self, command: RunCell) -> Failure | None:
        """Why this cell cannot begin; the one after it is free to try again."""
        failure, self._failure = self._failure, None
        return failure if command.needs_group else None

    def _migrate(self, source: int, *, is_heal: bool) -> None:
        """Take the models along; what failed here once is not tried again at the next group.

        That the connection was lost, or an interrupt ended it, says nothing of the models.
        """
        may_migrate, self._may_migrate = self._may_migrate, True
        try:
            migration = Migration(
                self._bound_objects,
                self._namespace,
                self._group.device,
                source=source,
                is_heal=is_heal,
            )
            lines = migration.run(may_migrate=may_migrate)
        except Exception as error:
            self._may_migrate = self._group.is_broken or is_backend_error(error)
            raise
        for line in lines:
            self._notify_user(line)
