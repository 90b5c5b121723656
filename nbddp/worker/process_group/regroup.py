"""Connect this rank with the others again, make the models usable, and report failures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from nbddp.formatting import with_article
from nbddp.sharding import parameters_of
from nbddp.wire.messages import Failure, Regroup, RunCell
from nbddp.worker.process_group import unfinished_steps
from nbddp.worker.process_group.bound_objects import accumulations
from nbddp.worker.process_group.kept_references import renew_torch
from nbddp.worker.process_group.migration import Migration, unbind
from nbddp.worker.process_group.object_collectives import gather_objects
from nbddp.worker.process_group.process_group import ProcessGroup
from nbddp.worker.process_group.revival import Connected
from nbddp.worker.torch_errors import is_backend_error
from nbddp.worker.tracebacks import failure_outside_cells
from nbddp.worker.watch.namespace import paths_of

_EXHAUSTED = (
    "the process groups are new ones: after each interrupt torch keeps threads of the old "
    "connections, and there were too many of them"
)

_BETWEEN_STEPS = (
    "the cell ended between the steps of one iteration: {} made a step, and {} did not; load a "
    "checkpoint if they must have made the same steps"
)


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
        counts, objects = self._group.step_counts, self._group.bound_objects
        spread = unfinished_steps.spread_optimizers(objects)
        optimizers = self._optimizers(spread)
        steps = {
            name: [*counts.of(optimizer), spread.get(optimizer, "")]
            for name, optimizer in optimizers.items()
        }
        totals = {name: counts.total(each) for name, each in optimizers.items()}
        micro_steps = [each.micro_step for each in accumulations(objects.optimizers)]
        stepped, others = map(self._names_of, counts.unfinished_iteration())
        between = _BETWEEN_STEPS.format(", ".join(stepped), ", ".join(others)) if stepped else ""
        report = {
            "steps": steps,
            "totals": totals,
            "has begun backward": counts.has_begun_backward,
            "micro-steps": micro_steps,
            "between": between,
        }
        subgroups = self._group.revive_subgroups(report, new_ranks) if lives_on else None
        reports = subgroups.reports if subgroups is not None else []
        for name, optimizer in optimizers.items() if reports else ():
            counts.set_total(optimizer, max(each["totals"].get(name, 0) for each in reports))
        # all ranks drop their gradients, or none does
        is_uneven = any(
            other["has begun backward"] or other["micro-steps"] != micro_steps for other in reports
        )
        drops = not lives_on or bool(new_ranks) or is_uneven
        not_reset = unfinished_steps.reset(objects, drops_gradients=drops) if lives_on else []
        all_steps = [each["steps"] for each in reports]
        uneven = unfinished_steps.describe_uneven(all_steps)
        lines = {each["between"] for rank, each in enumerate(reports) if rank not in new_ranks}
        uneven += filter(None, lines if len(lines) == 1 else ())  # else some ranks are behind
        is_inside_step = counts.is_inside_step or bool(stepped)
        return Connected(
            subgroups, new_ranks, all_steps, counts.of, uneven, is_inside_step, drops, not_reset
        )

    def move_models(
        self, connected: Connected, *, source: int = 0, has_state: bool = False
    ) -> None:
        """Move the models to the connected groups, with the same state on all ranks.

        Args:
            connected: the groups.
            source: the rank whose models and states the other ranks get.
            has_state: whether sharded models have got the state of one step on all ranks.
        """
        if has_state:
            connected = replace(connected, uneven=())  # uneven steps do not matter any more
        new_migration = partial(Migration, self._group.bound_objects, self._namespace, connected)
        migrations = [new_migration(source)]
        for group in connected.subgroups.with_objects if connected.subgroups else ():
            migrations.append(new_migration(_first_survivor(group, connected.new_ranks), group))
        self._migrate(migrations, connected)
        self._group.step_counts.clear()  # a new process begins at zero
        self._group.apply_user_timeout()

    def _optimizers(self, spread: Container[Optimizer]) -> dict[str, Optimizer]:
        """Return ``spread`` optimizers and those of plain models, by name.

        Those of DDP models are left out, because they are made equal.
        """
        objects = self._group.bound_objects
        of_ddp = {id(each) for model in objects.models for each in model.parameters()}
        found = [
            optimizer
            for optimizer in objects.optimizers
            if optimizer in spread or of_ddp.isdisjoint(map(id, parameters_of(optimizer)))
        ]
        return dict(zip(self._names_of(found), found, strict=True))

    def _names_of(self, optimizers: Sequence[Optimizer]) -> list[str]:
        names = paths_of(optimizers, self._namespace)
        return [names.get(id(each), with_article(type(each).__name__)) for each in optimizers]

    def _migrate(self, migrations: Sequence[Migration], connected: Connected) -> None:
        """Move the models. If that failed once, do not try again with the next group.

        A lost connection or an interrupt does not count as a failure of the models.
        """
        may_migrate, self._may_migrate = self._may_migrate, True
        try:
            lines = [line for each in migrations for line in each.run(may_migrate=may_migrate)]
            if connected.subgroups and connected.subgroups.has_objects_anywhere:
                # rank 0 tells what other ranks have moved
                lines = [*dict.fromkeys(line for each in gather_objects(lines) for line in each)]
        except Exception as error:
            self._may_migrate = self._group.is_broken or is_backend_error(error)
            raise
        for line in [*connected.uneven, *lines]:
            self._notify_user(line)


def _first_survivor(group: Any, new_ranks: Sequence[int]) -> int:
    """Return the first rank of a group, as its number in it, that has the process of before."""
    ranks = enumerate(dist.get_process_group_ranks(group))
    return next(index for index, rank in ranks if rank not in new_ranks)
