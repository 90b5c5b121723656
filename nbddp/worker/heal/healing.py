"""A rank's part in a heal: send its variables, receive them, or only join the new process group.

A signature covers the pickle of the variables. The process group carries only bytes of tensors.
So a rank unpickles only data that another rank of the group has signed.
"""

from __future__ import annotations

import gc
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import UntypedStorage, nn
from torch.optim import Optimizer

from nbddp.errors import RequestError
from nbddp.formatting import format_ranks
from nbddp.reporting.this_rank import communication_device
from nbddp.wire import payloads
from nbddp.wire.request_messages import (
    LOST_PART,
    Answer,
    JoinedGroup,
    JoinGroup,
    PickledNames,
    PickleNamespace,
)
from nbddp.worker.heal.environment import ProcessEnvironment
from nbddp.worker.heal.namespace_transfer import UnpickleError, load_namespace, pickle_namespace
from nbddp.worker.heal.rank_attributes import (
    find_rank_attributes,
    set_rank_attributes,
    set_sampler_ranks,
)
from nbddp.worker.heal.reported_values import SHELL_NAMES, ReportedValues
from nbddp.worker.heal.shard_copies import ShardCopies, newest_checkpoint
from nbddp.worker.heal.shard_recovery import copy_from_replicas, ranks_without_replica
from nbddp.worker.heal.spread_state import Objects, dtensors_in, spread_objects
from nbddp.worker.process_group import unfinished_steps
from nbddp.worker.process_group.bound_objects import BoundObjects, is_sharded, sharded_modules
from nbddp.worker.process_group.object_collectives import (
    gather_objects,
    split_into_batches,
    wait_for_message,
)
from nbddp.worker.process_group.unfinished_steps import StepReport, spread_optimizers
from nbddp.worker.torch_errors import is_backend_error
from nbddp.worker.tracebacks import error_text

if TYPE_CHECKING:
    from nbddp.worker.cell.shell import RankShell
    from nbddp.worker.process_group.process_group import ProcessGroup
    from nbddp.worker.process_group.regroup import Regrouper

REPLICAS, COPIES = "replicas", "copies"  # from where a new rank gets its shards
MAX_IN_FLIGHT = 8  # messages to replacements at the same time
MAX_LISTED = 20  # variables and parts that are not carried; the rest is counted
MAX_REASON = 300  # characters of the reason

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class HealHandler:
    """Answers the requests of a heal.

    Args:
        shell: has the cells and the variables. The variables that it has now are the rank's own
            and are not replaced.
        reported_values: restores the values of a replacement.
        group: the process group.
        regrouper: connects the process group, and moves models to it.
        shard_copies: has earlier states of sharded models.
        store: store for the pickled variables.
        payload_key: returns the store key for a name.
    """

    _shell: RankShell
    _reported_values: ReportedValues
    _group: ProcessGroup
    _regrouper: Regrouper
    _shard_copies: ShardCopies
    _store: dist.Store
    _payload_key: Callable[[str], str]

    def __post_init__(self) -> None:
        self._namespace = self._shell.user_ns
        self._preset_names = {*self._namespace}
        self._environment = ProcessEnvironment()
        self._storages: Sequence[UntypedStorage] = ()

    def pickle_namespace(self, command: PickleNamespace) -> PickledNames:
        """Pickle all variables. Their tensors stay here until the ranks have joined the group."""
        spread, shards = self._check_sharded(command.replacements)
        for replacement in command.replacements if command.checks else ():
            if part := self._group.group_without(replacement):
                # only the user knows which rank has the right values
                outside = "this rank is" if replacement in part else f"rank {replacement} was"
                raise RequestError(
                    f"{format_ranks(part)} have a subgroup, and {outside} not in it: rank "
                    f"{replacement} may have had different values. `%ddp heal --from R` copies "
                    "them from a rank with the same values, `%ddp restart --replay` restarts all "
                    "ranks and runs the cells again"
                )
        shell_names = filter(SHELL_NAMES.fullmatch, self._namespace)
        exclude = [*self._preset_names, *shell_names, *command.exclude]
        extra = self._shell.compile.sources, self._environment.capture()
        groups = self._group.lasting_names(command.replacements)
        restored = {*map(id, dtensors_in(spread))}
        pickled = pickle_namespace(self._namespace, exclude, extra, groups, restored)
        for path in spread:  # its state would have no object on the new rank
            name = re.split(r"\W", path)[0]
            if name not in pickled.names:
                reason = {**pickled.not_carried, **command.exclude}.get(name, "it is preset")
                raise RequestError(f"{name} cannot be copied to a new process: {reason}")
        self._storages = pickled.storages
        key = self._payload_key(f"names{command.request}")
        reasons = pickled.not_carried.items()
        # variables before parts of objects, because their whole value is missing
        not_carried = sorted(reasons, key=lambda each: not each[0].isidentifier())
        return PickledNames(
            payload=payloads.put(self._store, key, pickled.data),
            size=len(pickled.data),
            names=list(pickled.names),
            not_pickled={name: reason[:MAX_REASON] for name, reason in not_carried[:MAX_LISTED]},
            more=max(0, len(not_carried) - MAX_LISTED),
            storages=[[each.nbytes(), each.device.type] for each in self._storages],
            shards=shards,
        )

    def join_group(self, command: JoinGroup) -> Answer:
        """Form the process group, transfer the variables in it, and move the models to it."""
        reason = ""
        try:
            joined = self._join(command)
        except Exception as error:  # noqa: BLE001 - the answer reports it; the rank lives on
            reason = f"{type(error).__name__}: {error_text(error)}".partition("\n")[0]
            is_refused = isinstance(error, RequestError)
            joined = JoinedGroup(is_consequence=is_backend_error(error), is_refused=is_refused)
            if isinstance(error, UnpickleError):
                reason = str(error)
                joined = replace(joined, not_loaded={error.name: reason})
        if reason:  # here, because the error refers to the groups
            self._regrouper.leave(has_lost_connection=joined.is_consequence, is_heal=True)
        self._storages = ()
        return Answer(request=command.request, error=reason, content=asdict(joined))

    def _join(self, command: JoinGroup) -> JoinedGroup:
        connected = self._regrouper.connect(command.generation, command.replacements)
        joined = self._transfer_namespace(command, connected.steps)
        has_state = bool(command.shards)
        self._regrouper.move_models(connected, source=command.donor, has_state=has_state)
        return joined

    def _transfer_namespace(self, command: JoinGroup, steps: Sequence[StepReport]) -> JoinedGroup:
        """Send or receive the memory of tensors first: unpickled objects may read it at once."""
        if command.shards and not steps:
            raise RequestError(
                f"the process groups are new ones, and {LOST_PART}: run `%ddp restart --replay` "
                "and load a checkpoint"
            )
        rank, device = dist.get_rank(), self._group.device
        if rank == command.donor:
            self._send(command.replacements)
        elif rank in command.replacements:
            data = payloads.get(self._store, command.payload)
            storages = [
                torch.empty(
                    size, dtype=torch.uint8, device=device if kind == device.type else kind
                ).untyped_storage()
                for size, kind in command.storages
            ]
            self._receive(storages, command.donor)
            load_namespace(data, self._namespace, storages, self._apply_extra, self._group.find)
            self._group.bound_objects.add_existing()
        joined = self._restore_own_values(command)
        objects = spread_objects(self._namespace, self._group.bound_objects)
        new_ranks, wait = {*command.replacements}, self._wait_for_message
        has_state = not command.shards
        if command.shards == REPLICAS:
            has_state = copy_from_replicas(objects, steps, new_ranks, wait)
        if not has_state:
            self._shard_copies.restore(objects, new_ranks, wait)
        elif command.shards and any(isinstance(each, Optimizer) for each in objects.values()):
            self._shard_copies.begin_again(objects)
        return joined

    def _restore_own_values(self, command: JoinGroup) -> JoinedGroup:
        """On replacements, restore values and attributes that are different on each rank.

        An attribute gets this rank's number if it holds the rank's own number on all surviving
        ranks.
        """
        is_new = dist.get_rank() in command.replacements
        attributes = None if is_new else find_rank_attributes(self._namespace, self._preset_names)
        gathered = [each for each in gather_objects(attributes) if each is not None]
        if not is_new:
            return JoinedGroup()
        own_values = self._reported_values.restore(command.own_values, self._preset_names)
        agreed = {*gathered[0]}.intersection(*gathered[1:]) - command.own_values.keys()
        places = set_rank_attributes(self._namespace, self._preset_names, agreed)
        if set_sampler_ranks(command.donor):
            places.append("a DistributedSampler")
        differing = self._reported_values.differing(command.own_values)
        return JoinedGroup(places=places, own_values=own_values, differing=differing)

    def _apply_extra(self, extra: Any) -> None:
        sources, environment = extra
        self._shell.compile.add_sources(sources)
        self._environment.apply(environment)

    # ---- memory of tensors

    def _send(self, replacements: Sequence[int]) -> None:
        device = communication_device()

        def start_messages() -> Iterator[tuple[Any, None]]:
            for batch in split_into_batches(self._storages, UntypedStorage.nbytes):
                parts = [_storage_bytes(each).to(device) for each in batch]
                bytes_ = parts[0] if len(parts) == 1 else torch.cat(parts)
                for replacement in replacements:
                    yield dist.isend(bytes_, replacement), None

        for _ in self._complete_in_order(start_messages()):
            pass

    def _receive(self, storages: Sequence[UntypedStorage], donor: int) -> None:
        device = communication_device()

        def start_messages() -> Iterator[
            tuple[Any, tuple[torch.Tensor, list[UntypedStorage]] | None]
        ]:
            for batch in split_into_batches(storages, UntypedStorage.nbytes):
                if len(batch) == 1 and batch[0].device == device:
                    yield dist.irecv(_storage_bytes(batch[0]), donor), None
                    continue
                size = sum(each.nbytes() for each in batch)
                received = torch.empty(size, dtype=torch.uint8, device=device)
                yield dist.irecv(received, donor), (received, batch)

        for message in self._complete_in_order(start_messages()):
            if message is not None:
                received, batch = message
                parts = received.split([each.nbytes() for each in batch])
                for storage, part in zip(batch, parts, strict=True):
                    _storage_bytes(storage).copy_(part)

    def _complete_in_order(self, started: Iterable[tuple[Any, T]]) -> Iterator[T]:
        """Keep several messages in flight. Yield the data of each one when it is complete.

        One at a time takes twice as long, because Gloo announces each message before sending it:
        0.13 s instead of 0.07 s for 64 tensors of 1.2 MB.
        """
        waiting = iter(started)
        in_flight = deque(islice(waiting, MAX_IN_FLIGHT))
        while in_flight:
            in_flight.extend(islice(waiting, 1))
            work, data = in_flight.popleft()
            self._wait_for_message(work)
            yield data

    def _wait_for_message(self, work: Any) -> None:
        wait_for_message(work, lambda: self._group.is_broken)

    # ---- sharded models

    def _check_sharded(self, new_ranks: Sequence[int]) -> tuple[Objects, str]:
        """Return the sharded models and optimizers, and from where new ranks get their shards.

        Raises:
            RequestError: a part of a sharded model died with its rank, and no rank has it.
        """
        bound = self._group.bound_objects
        spread, kind = _find_sharded(self._namespace, bound)
        if kind:  # the sharded object may be garbage
            gc.collect()
            spread, kind = _find_sharded(self._namespace, bound)
        if not spread and not kind:
            return spread, ""
        reason = ""
        if not kind and self._group.lasting_names(new_ranks):
            unfinished_steps.reset(bound)
            lost = ranks_without_replica(spread, dist.get_world_size(), {*new_ranks})
            reason = self._shard_copies.why_not(spread, new_ranks) if lost else ""
            if not reason:
                return spread, COPIES if lost else REPLICAS
        names = "the sharded state" if kind else ", ".join(spread)
        kind = kind or ("FSDP" if sharded_modules() else "DTensor")
        raise RequestError(
            f"a part of {names} ({kind}) died with {format_ranks(new_ranks)}{reason}: "
            f"run `%ddp restart --replay` and load a checkpoint{newest_checkpoint()}"
        )


def _find_sharded(namespace: dict[str, Any], bound: BoundObjects) -> tuple[Objects, str]:
    """Return the sharded models and optimizers, and the kind of one that cannot be restored."""
    spread = spread_objects(namespace, bound)
    models = [each for each in spread.values() if isinstance(each, nn.Module)]
    ids = {id(part) for model in models for part in model.modules()} | {*map(id, spread.values())}
    lost = [type(each).__name__ for each in bound.optimizers if is_sharded(each)]
    lost += ["FSDP" for each in sharded_modules() if id(each) not in ids]
    lost += ["pipeline" for each in spread_optimizers(bound) if id(each) not in ids]
    return spread, next(iter(lost), "")


def _storage_bytes(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
