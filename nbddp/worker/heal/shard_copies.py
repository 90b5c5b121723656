"""Copies of shards in the memory of the next rank, with which a heal goes back to an earlier step.

Every N steps each rank packs the state of its sharded models, and everything that goes back with
them. A thread sends the copy to the next rank, and gets that of the rank before. It uses a process
group and a store connection of its own, so that a slow or failed copy never stops the training.

A rank leaves out a copy while it still exchanges the one before, and after a cell that has failed:
the other ranks may have made a copy that it has not reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer, optimizer

from nbddp.errors import RequestError
from nbddp.formatting import format_bytes, plural
from nbddp.reporting.training_objects import checkpoints
from nbddp.sharding import has_dtensors
from nbddp.worker.heal.shard_recovery import send_and_receive
from nbddp.worker.heal.spread_state import (
    Objects,
    dtensors_in,
    pack,
    spread_objects,
    unpack,
)
from nbddp.worker.heal.training_state import companions, late_companions
from nbddp.worker.process_group.object_collectives import gather_objects

if TYPE_CHECKING:
    from nbddp.worker.process_group.process_group import ProcessGroup

TIMEOUT = timedelta(seconds=60)  # for all ranks to reach a copy, and to exchange it
_LEFT_OUT = "left out"  # key of a copy that a rank leaves out; its value says why it failed, if so
_NOT_FOUND = (
    "no copies of shards: no variable leads to the optimizer that trains them, so a heal could not "
    "find it; keep the model and the optimizer in variables, not only in those of a function"
)
# Two ranks on one machine: packing 120 MB took 0.09 s of CPU time (0.3 s on two busy cores), and
# the exchange took 0.2 s (0.8 s).
SECONDS_PER_BYTE = 0.3 / 120e6


@dataclass(eq=False, slots=True)
class Copy:
    """The state of one step.

    Attributes:
        step: the number of steps that the optimizer had made.
        own_state: the packed state of this rank; empty if it leaves out this copy.
        held: the packed state of the rank before this one.
        references: references to the sharded models and optimizers, and to what goes back with
            them, by their path in the copy.
    """

    step: int
    own_state: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    held: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    references: dict[str, Any] = field(default_factory=dict)

    def has(self, objects: Objects) -> bool:
        """Return whether the copy has the state of exactly these objects.

        Their paths may be other ones: a new variable may lead to a model.
        """
        found = [reference() for reference in self.references.values()]
        spread = {id(each) for each in found if isinstance(each, (nn.Module, Optimizer))}
        return spread == {*map(id, objects.values())}

    def old_paths(self, objects: Objects) -> dict[str, str]:
        """Return the path in the copy of each object, by its path now."""
        old = {id(reference()): path for path, reference in self.references.items()}
        return {path: old[id(obj)] for path, obj in objects.items() if id(obj) in old}


@dataclass(eq=False, repr=False)
class ShardCopies:
    """Makes copies in the steps of an optimizer of a sharded model.

    Args:
        namespace: the user's variables.
        group: has the optimizers and schedules of this process, and counts their steps.
        open_store: returns a store connection for the thread.
        rank: this rank.
        world_size: the number of ranks.
        notify: shows a line to the user.
    """

    _namespace: dict[str, Any]
    _group: ProcessGroup
    _open_store: Callable[[], dist.Store]
    _rank: int
    _world_size: int
    _notify: Callable[[str], None]

    def __post_init__(self) -> None:
        self._every = self._count = self._heals = 0
        self._prefix = ""
        self._pending: tuple[Optimizer, Copy, Objects] | None = None
        self._jobs: SimpleQueue[tuple[str, Copy | None]] = SimpleQueue()
        self._busy = threading.Lock()  # held while a copy is exchanged
        self._has_thread = False
        self._copies: list[Copy] = []  # the newest that all ranks have, and one in progress
        self._problem = ""  # why the thread has made no copy, if the user does not know it
        self._was_announced = self._is_in_cell = self._is_due = False
        optimizer.register_optimizer_step_pre_hook(lambda obj, *_: self._end_copy(obj))
        optimizer.register_optimizer_step_post_hook(lambda obj, *_: self._count_step(obj))

    def begin_cell(self, prefix: str, every: int) -> None:
        """Make a copy after each ``every`` steps; none if it is 0.

        Args:
            prefix: prefix of the keys in the store, the same on all ranks.
            every: steps.
        """
        if every and not self._group.lasts:
            self._notify(f"no copies of shards: a heal over {self._group.backend} cannot use them")
            every = 0
        if self._is_in_cell and self._every:  # the last cell has failed
            self._jobs.put((f"{self._prefix}/{self._count + 1}", None))
        self._report_problem()
        self._prefix, self._every, self._count = prefix, every, 0
        self._pending, self._was_announced, self._is_in_cell = None, False, True
        if every and not self._has_thread:
            self._has_thread = True
            arguments = self._open_store(), self._jobs, self._busy, self._heals
            threading.Thread(
                target=self._run, args=arguments, name="nbddp-copies", daemon=True
            ).start()

    def end_cell(self) -> None:
        """Send the copy of the last step. Do not call this after a cell that has failed."""
        if self._pending is not None:
            self._end_copy(self._pending[0])
        self._is_in_cell = False
        self._report_problem()

    def _report_problem(self) -> None:
        problem, self._problem = self._problem, ""
        if problem:
            self._notify(problem)

    # ---- on the main thread

    def _count_step(self, obj: Optimizer) -> None:
        if not self._every or not has_dtensors(obj):
            return
        step = self._group.step_counts.total(obj)
        if step % self._every and not self._is_due:
            return
        objects = spread_objects(self._namespace, self._group.bound_objects)
        optimizers = _optimizers(objects)
        if obj not in optimizers:
            self._announce(_NOT_FOUND)
        if optimizers[:1] != [obj]:  # another optimizer decides when
            return
        self._is_due = False
        self._announce(self._describe(objects))
        copy = Copy(step)
        if not self._busy.locked():
            others = companions(self._namespace)
            copy.own_state = pack(others)  # now: the next iteration draws and loads
            copy.references = _references(objects | others)
        self._pending = obj, copy, objects

    def _end_copy(self, obj: Optimizer) -> None:
        """Add the shards, and what the loop has changed after the step; then send the copy.

        A loop steps other optimizers and its schedules after its first optimizer. So this runs
        before the next step of that one.
        """
        if self._pending is None or self._pending[0] is not obj:
            return
        (_, copy, objects), self._pending = self._pending, None
        self._count += 1
        key = f"{self._prefix}/{self._count}"
        if not copy.own_state.numel() or not self._busy.acquire(blocking=False):
            self._jobs.put((key, None))
            return
        late = late_companions(objects, self._namespace, self._group.bound_objects)
        copy.own_state = pack(objects | late, copy.own_state)
        copy.references |= _references(late)
        self._jobs.put((key, copy))

    def _announce(self, text: str) -> None:
        """Show a line once in each cell."""
        if not self._was_announced:
            self._was_announced = True
            self._notify(text)

    def _describe(self, objects: Objects) -> str:
        size = sum(each.to_local().nbytes for each in dtensors_in(objects))
        seconds = max(0.01, size * SECONDS_PER_BYTE)
        return (
            f"copies of shards: every {plural(self._every, 'step')}, each rank copies its shards "
            f"and those of the rank before, together {format_bytes(2 * size)}, and needs twice "
            f"that during a copy, which takes about {seconds:.2g} s, most of it in the background"
        )

    # ---- in a heal

    def why_not(self, objects: Objects, new_ranks: Sequence[int]) -> str:
        """Return why no copy can restore the shards of ranks; "" if one can.

        Args:
            objects: the sharded models and optimizers.
            new_ranks: ranks with a new process.
        """
        for rank in new_ranks:
            if (after := (rank + 1) % self._world_size) in new_ranks:
                return f", and rank {after}, which had the copy of rank {rank}, died too"
        if any(each.has(objects) for each in self._copies):
            return ""
        problem = f"; {self._problem}" if self._problem else ""
        return f", and there is no copy of it yet (`%%ddp --shard-copies 100` makes one{problem})"

    def restore(self, objects: Objects, new_ranks: Set[int], wait: Callable[[Any], None]) -> None:
        """Set all ranks back to the newest step of which they have copies. All ranks call this.

        Args:
            objects: the sharded models and optimizers of this rank.
            new_ranks: ranks with a new process.
            wait: waits for a message.

        Raises:
            RequestError: there is no such step.
        """
        own_rank, is_new = self._rank, self._rank in new_ranks
        first, counts = _optimizers(objects)[0], self._group.step_counts
        copies = {each.step: each for each in self._copies if each.has(objects)}
        gathered = gather_objects([[*copies], counts.total(first)])
        held = [{*steps} for rank, (steps, _) in enumerate(gathered) if rank not in new_ranks]
        step = max(held[0].intersection(*held), default=0)
        is_lost = any((rank + 1) % self._world_size in new_ranks for rank in new_ranks)
        if not step or is_lost:
            raise RequestError(
                "the ranks have stopped in different steps, and have no copies of the same step "
                "(`%%ddp --shard-copies 100` makes copies): run `%ddp restart --replay` and load a "
                "checkpoint"
            )
        copy = copies.get(step) or Copy(step)
        before, after = (own_rank - 1) % self._world_size, (own_rank + 1) % self._world_size
        # a new rank gets its own state from the next rank, and the state that it must hold
        sent = {before: copy.held} if before in new_ranks else {}
        received = send_and_receive(sent, after if is_new else own_rank, wait)
        copy.own_state = copy.own_state if received is None else received
        sent = {after: copy.own_state} if after in new_ranks else {}
        received = send_and_receive(sent, before if is_new else own_rank, wait)
        copy.held = copy.held if received is None else received
        unpack(self._under_old_paths(copy, objects, new_ranks), copy.own_state)
        self._start_again()
        self._copies = [copy]
        counts.set_total(first, step)
        made = max(made for _, made in gathered)
        self._notify(f"the models are back at step {step} of {made}")

    def _under_old_paths(self, copy: Copy, objects: Objects, new_ranks: Set[int]) -> Objects:
        """Return all objects by their paths in the copy. All ranks call this.

        A new rank has never seen the old paths, and learns them from another rank.
        """
        late = late_companions(objects, self._namespace, self._group.bound_objects)
        found = objects | companions(self._namespace) | late
        gathered = gather_objects(copy.old_paths(found))
        survivors = [paths for rank, paths in enumerate(gathered) if rank not in new_ranks]
        paths = survivors[0] if self._rank in new_ranks else gathered[self._rank]
        renamed = {paths.get(path, path): each for path, each in found.items()}
        copy.references = _references(renamed)
        return renamed

    def begin_again(self, objects: Objects) -> None:
        """Drop the copies after a heal, because a new rank lacks them.

        All ranks call this. They count the same steps from now on, and make a copy in the next one.
        """
        first, counts = _optimizers(objects)[0], self._group.step_counts
        counts.set_total(first, max(gather_objects(counts.total(first))))
        self._start_again()
        self._copies, self._is_due = [], True

    # ---- on the thread

    def _start_again(self) -> None:
        """Leave the thread after a heal: it may wait for the dead rank for minutes."""
        self._heals += 1
        self._problem = ""  # the death that was healed may have been the reason
        self._jobs.put(("", None))  # ends it if it does not wait
        self._jobs, self._busy, self._has_thread = SimpleQueue(), threading.Lock(), False

    def _run(self, store: dist.Store, jobs: Any, busy: threading.Lock, heals: int) -> None:
        # On the nbddp-copies thread.
        while True:
            key, copy = jobs.get()
            if heals != self._heals:
                return
            store_of_copy = dist.PrefixStore(key, store)
            try:
                self._exchange(store_of_copy, copy, heals)
            except Exception as error:  # noqa: BLE001 - the training goes on with the copy of before
                if copy is not None and heals == self._heals:
                    reason = str(error).partition("\n")[0]
                    self._problem = f"the copy of shards of step {copy.step} failed: {reason}"
                    with suppress(dist.DistError):
                        self._leave_out(store_of_copy, f"{reason} (rank {self._rank})")
            finally:
                if copy is not None:
                    busy.release()

    def _exchange(self, store: dist.Store, copy: Copy | None, heals: int) -> None:
        """Exchange a copy, if no rank leaves it out, and forget the copy of before.

        Args:
            store: a store for this copy.
            copy: the copy; None to leave it out.
            heals: the number of heals when the thread began.
        """
        # On the nbddp-copies thread.
        if copy is None:
            self._leave_out(store)
        if copy is None or not self._wait_for_all(store, "here"):
            return
        group = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), self._rank, self._world_size, timeout=TIMEOUT
        )
        copy.held = _pass_on(copy.own_state, group, self._rank, self._world_size)
        if heals == self._heals:  # else the models are back at an earlier step
            # a rank whose exchange failed does not know which copy all ranks have
            self._copies = [*self._copies[-2:], copy]
        if self._wait_for_all(store, "has it") and heals == self._heals:
            self._copies = [copy]

    def _leave_out(self, store: dist.Store, reason: str = "") -> None:
        """End the waits of the other ranks for a copy that this rank has not, and say why."""
        store.compare_set(_LEFT_OUT, "", reason)
        for what in ("here", "has it"):  # last: whoever wakes looks for the reason
            store.set(f"all {what}", "")

    def _wait_for_all(self, store: dist.Store, what: str) -> bool:
        """Wait for all ranks. Return false if one leaves out the copy.

        Raises:
            RuntimeError: the copy has failed on another rank.
        """
        # On the nbddp-copies thread.
        if store.add(what, 1) == self._world_size:
            store.set(f"all {what}", "")
        store.wait([f"all {what}"], TIMEOUT)
        is_left_out = store.check([_LEFT_OUT])
        if is_left_out and (reason := store.get(_LEFT_OUT).decode()):
            raise RuntimeError(reason)
        return not is_left_out


def _optimizers(objects: Objects) -> list[Optimizer]:
    return [each for each in objects.values() if isinstance(each, Optimizer)]


def _references(objects: Objects) -> dict[str, Any]:
    return {path: ref(each) for path, each in objects.items()}


def _pass_on(packed: torch.Tensor, group: Any, rank: int, world_size: int) -> torch.Tensor:
    """Send a packed state to the next rank, and return that of the rank before."""

    def transfer(sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        for work in (group.send([sent], after, 0), group.recv([received], before, 0)):
            work.wait(TIMEOUT)
        return received

    size = transfer(torch.tensor([packed.numel()]), torch.empty(1, dtype=torch.int64))
    return transfer(packed, torch.empty(int(size), dtype=torch.uint8))


def newest_checkpoint() -> str:
    """Return the newest checkpoint as the end of a sentence; "" if there is none."""
    paths = [path for each in checkpoints if (path := each.newest()) is not None]
    return f"; the last one is {max(paths, key=lambda path: path.stat().st_mtime)}" if paths else ""
