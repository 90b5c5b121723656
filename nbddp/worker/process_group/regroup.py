"""Connect this rank with the others again, make the models usable, and report failures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from nbddp.formatting import with_article
from nbddp.wire.messages import Failure, Regroup, RunCell
from nbddp.worker.process_group import unfinished_steps
from nbddp.worker.process_group.migration import Migration, renew_torch, unbind
from nbddp.worker.process_group.object_collectives import gather_objects
from nbddp.worker.process_group.object_state import parameters_of
from nbddp.worker.process_group.process_group import ProcessGroup
from nbddp.worker.process_group.revival import Subgroups
from nbddp.worker.torch_errors import is_backend_error
from nbddp.worker.tracebacks import failure_outside_cells
from nbddp.worker.watch.namespace import paths_of

_EXHAUSTED = (
    "the process groups are new ones: after each interrupt torch keeps threads of the old "
    "connections, and there were too many of them"
)


class Connected(NamedTuple):
    """Connected groups, and what :meth:`Regrouper.move_models` must know of the ranks.

    Attributes:
        subgroups: the subgroups if all groups live on; None if there are new groups.
        new_ranks: in a heal, the ranks with a new process.
        is_inside_step: whether an optimizer of this rank has begun a step and not finished it.
        not_reset: models that are in the middle of a step, and why.
    """

    subgroups: Subgroups | None
    new_ranks: Sequence[int]
    is_inside_step: bool
    not_reset: Sequence[tuple[Any, str]]


class Regrouper:
    """Handles ``Regroup``. A failure is reported once, by the next cell that needs the group."""

    def __init__(
        self, group: ProcessGroup, namespace: Mapping[str, Any], notify_user: Callable[[str], None]
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._notify_user = notify_user
        self._may_migrate = True
        self._failure: Failure | None = None

    def regroup(self, command: Regroup) -> None:
        """Destroy the process group or, if requested, connect it with the other ranks again."""
        self._failure, has_lost_connection = None, False
        try:
            if command.form:
                self.move_models(self.connect(command.generation))
            else:
                self._group.destroy()
        except Exception as error:  # noqa: BLE001 - the next cell reports it; the rank lives on
            has_lost_connection = is_backend_error(error)
            self._failure = failure_outside_cells(error)
        if self._failure is not None:  # here, because the error refers to the groups
            self.leave(has_lost_connection=has_lost_connection, may_suspend=command.form)

    def leave(
        self, *, has_lost_connection: bool, is_heal: bool = False, may_suspend: bool = True
    ) -> None:
        """Leave the groups after an error. Keep them suspended if the next connect may revive them.

        This ends the waits of other ranks for this one.
        """
        if may_suspend and self._group.suspend(
            has_lost_connection=has_lost_connection, is_heal=is_heal
        ):
            return
        group = dist.group.WORLD
        for model in self._group.bound_objects.models:
            if model.__dict__.get("process_group") is group:
                unbind(model)
        self._group.destroy()
        del group
        gc.collect()  # its connections close with the last reference

    def pop_failure(self, command: RunCell) -> Failure | None:
        """Return why this cell cannot start. The next cell may try again."""
        failure, self._failure = self._failure, None
        return failure if command.needs_group else None

    def connect(self, generation: int, new_ranks: Sequence[int] = ()) -> Connected:
        """Connect this rank with the other ranks again. Then call :meth:`move_models`.

        All groups live on if that is possible. ``new_ranks``: in a heal, those with a new process.
        """
        self._failure = None  # of an earlier group
        lives_on = self._group.init(generation, keeps_groups=True, new_ranks=new_ranks)
        if not lives_on:
            renew_torch(self._namespace)
        if self._group.is_exhausted:
            self._notify_user(_EXHAUSTED)
        counts = self._group.step_counts
        steps, is_inside_step = self._count_steps(), counts.is_inside_step
        counts.clear()  # a new process begins at zero
        subgroups = self._group.revive_subgroups(steps, new_ranks) if lives_on else None
        not_reset = unfinished_steps.reset(self._group.bound_objects) if lives_on else []
        return Connected(subgroups, new_ranks, is_inside_step, not_reset)

    def move_models(
        self, connected: Connected, *, source: int = 0, has_state: bool = False
    ) -> None:
        """Move the models to the connected groups, with the same state on all ranks.

        Args:
            connected: the groups.
            source: the rank whose models and states the other ranks get.
            has_state: whether sharded models have got the state of one step on all ranks.
        """
        new_ranks, subgroups = connected.new_ranks, connected.subgroups
        if subgroups and has_state:
            subgroups.reports.clear()  # uneven steps do not matter any more
        new_migration = partial(
            Migration,
            self._group.bound_objects,
            self._namespace,
            bool(new_ranks),
            connected.is_inside_step,
        )
        migrations = [new_migration(source)]
        if subgroups is not None:
            migrations = [new_migration(source, None, subgroups.dropped, connected.not_reset)]
            for group in subgroups.with_objects:
                migrations.append(new_migration(_first_survivor(group, new_ranks), group, []))
        self._migrate(migrations, subgroups)
        self._group.apply_user_timeout()

    def _count_steps(self) -> unfinished_steps.StepReport:
        """Count the steps of all optimizers except those of DDP models, which are made equal."""
        counts, objects = self._group.step_counts, self._group.bound_objects
        spread = [*map(id, unfinished_steps.spread_optimizers(objects))]
        of_ddp = {id(each) for model in objects.models for each in model.parameters()}
        optimizers = [
            optimizer
            for optimizer in objects.optimizers
            if id(optimizer) in spread or of_ddp.isdisjoint(map(id, parameters_of(optimizer)))
        ]
        names = paths_of(optimizers, self._namespace)
        return {
            names.get(id(optimizer), with_article(type(optimizer).__name__)): [
                *counts.of(optimizer),
                id(optimizer) in spread,
            ]
            for optimizer in optimizers
        }

    def _migrate(self, migrations: Sequence[Migration], subgroups: Subgroups | None) -> None:
        """Move the models. If that failed once, do not try again with the next group.

        A lost connection or an interrupt does not count as a failure of the models.
        """
        may_migrate, self._may_migrate = self._may_migrate, True
        try:
            lines = [line for each in migrations for line in each.run(may_migrate=may_migrate)]
            if subgroups and subgroups.has_objects_anywhere:
                # rank 0 tells what other ranks have moved
                lines = [*dict.fromkeys(line for each in gather_objects(lines) for line in each)]
        except Exception as error:
            self._may_migrate = self._group.is_broken or is_backend_error(error)
            raise
        uneven = unfinished_steps.describe_uneven(subgroups.reports) if subgroups else []
        for line in [*uneven, *lines]:
            self._notify_user(line)


def _first_survivor(group: Any, new_ranks: Sequence[int]) -> int:
    """Return the first rank of a group, as its number in it, that has the process of before."""
    ranks = enumerate(dist.get_process_group_ranks(group))
    return next(index for index, rank in ranks if rank not in new_ranks)
