"""A rank's part when one that died is replaced: it gives its names, is given them, or only meets.

The pickle of the names is signed for; what comes over the process group are bytes of tensors alone,
so that nothing is unpickled that a rank of ours did not sign.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import UntypedStorage

from nbddp.errors import RequestError, format_ranks
from nbddp.train.checkpoint.sharded import has_dtensors
from nbddp.wire import payloads
from nbddp.wire.messages import JsonDict, Regroup
from nbddp.wire.request_messages import Answer, JoinGroup, SendNamespace
from nbddp.worker.heal.environment import ProcessEnvironment
from nbddp.worker.heal.namespace_transfer import UnpickleError, open_names, pack_names
from nbddp.worker.heal.plain_values import HISTORY
from nbddp.worker.heal.rank_attributes import own_attributes, set_attributes, set_samplers
from nbddp.worker.process_group.bound_objects import is_sharded, sharded_modules
from nbddp.worker.process_group.object_collectives import await_message, batches, gather_objects

if TYPE_CHECKING:
    from nbddp.worker.cell.shell import RankShell
    from nbddp.worker.process_group.process_group import ProcessGroup
    from nbddp.worker.process_group.regroup import Regrouper

AT_ONCE = 8  # messages on their way to replacements
NAMED = 20  # names and parts that are not carried: the others are counted
LONGEST = 300  # characters of the reason

T = TypeVar("T")


class HealHandler:
    """Answers what a rank is asked while the group heals.

    Args:
        shell: has the cells and the names; all that it has now are the rank's own, and stay so.
        group: the process group.
        regrouper: takes models along to a new one.
        store: what the pickle travels through.
        key: where in it this rank may put something.
    """

    def __init__(
        self,
        shell: RankShell,
        group: ProcessGroup,
        regrouper: Regrouper,
        store: dist.Store,
        key: Callable[[str], str],
    ) -> None:
        self._namespace = shell.user_ns
        self._own = {*shell.user_ns}
        self._surroundings = ProcessEnvironment()
        self._cells = shell.compile
        self._group = group
        self._regrouper = regrouper
        self._store = store
        self._key = key
        self._values = shell.plain_values
        self._storages: Sequence[UntypedStorage] = ()
        self._report: JsonDict = {}

    def give(self, command: SendNamespace) -> Answer:
        """Pack all names; their tensors stay here until the ranks meet."""
        _refuse_sharded(self._namespace, self._group.registry.optimizers)
        for replacement in command.replacements:
            if part := self._group.part_without(replacement):  # only the user knows whose are right
                outside = "this rank is" if replacement in part else f"rank {replacement} was"
                raise RequestError(
                    f"{format_ranks(part)} have a subgroup, and {outside} not in it: rank "
                    f"{replacement} may have had different values. `%ddp heal --from R` copies "
                    "them from a rank with the same values, `%ddp restart --replay` restarts all "
                    "ranks and runs the cells again"
                )
        leave = [*self._own, *filter(HISTORY.fullmatch, self._namespace), *command.exclude]
        beside = self._cells.sources, self._surroundings.told()
        carried = pack_names(self._namespace, leave=leave, beside=beside)
        self._storages = carried.storages
        payload = payloads.put(self._store, self._key(f"names{command.request}"), carried.data)
        # names first: each of them is lost as a whole
        left = sorted(carried.left.items(), key=lambda each: not each[0].isidentifier())
        content: JsonDict = {
            "names": list(carried.names),
            "bytes": len(carried.data),
            "left": {name: why[:LONGEST] for name, why in left[:NAMED]},
            "more": {"": len(left) - NAMED} if len(left) > NAMED else {},
            "storages": [[each.nbytes(), each.device.type] for each in self._storages],
        }
        return Answer(request=command.request, payload=payload, content=content)

    def meet(self, command: JoinGroup) -> Answer:
        """Form the process group, hand the names over in it, take the models along."""
        self._report = {"places": [], "taken": [], "unlike": []}
        error = self._regrouper.regroup(
            Regroup(generation=command.generation),
            source=command.donor,
            is_heal=True,
            before=lambda: self._hand_over(command),
        )
        self._storages = ()
        self._report["was_left"] = bool(error) and self._regrouper.was_left
        error = next(iter(self._report.get("unopened", {}).values()), error)
        return Answer(request=command.request, error=error, content=self._report)

    def _hand_over(self, command: JoinGroup) -> None:
        """Memory first: what is opened may look into its tensors at once."""
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
            try:
                open_names(data, self._namespace, storages, take=self._take_beside)
            except UnpickleError as error:
                self._report["unopened"] = {error.name: str(error)}
                raise
            self._group.registry.find()
        self._take_places(command)

    def _take_places(self, command: JoinGroup) -> None:
        """Where all that live keep their own rank, the new ones keep theirs."""
        is_new = dist.get_rank() in command.replacements
        mine = None if is_new else own_attributes(self._namespace, self._own)
        told = [each for each in gather_objects(mine, self._group.device) if each is not None]
        if is_new:
            self._report["taken"] = self._values.take(command.own_values, self._own)
            agreed = {*told[0]}.intersection(*told[1:]) - command.own_values.keys()
            places = set_attributes(self._namespace, self._own, agreed)
            if set_samplers(command.donor):
                places.append("a DistributedSampler")
            self._report |= {"places": places, "unlike": self._values.unlike(command.own_values)}

    def _take_beside(self, beside: Any) -> None:
        sources, surroundings = beside
        self._cells.add_sources(sources)
        self._surroundings.take(surroundings)

    # ---- memory of tensors

    def _send(self, replacements: Sequence[int]) -> None:
        def begin() -> Iterator[tuple[Any, None]]:
            for batch in batches(self._storages, UntypedStorage.nbytes):
                parts = [_bytes(each).to(self._group.device) for each in batch]
                bytes_ = parts[0] if len(parts) == 1 else torch.cat(parts)
                for replacement in replacements:
                    yield dist.isend(bytes_, replacement), None

        for _ in self._in_flight(begin()):
            pass

    def _receive(self, storages: Sequence[UntypedStorage], donor: int) -> None:
        device = self._group.device

        def begin() -> Iterator[tuple[Any, tuple[torch.Tensor, list[UntypedStorage]] | None]]:
            for batch in batches(storages, UntypedStorage.nbytes):
                if len(batch) == 1 and batch[0].device == device:
                    yield dist.irecv(_bytes(batch[0]), donor), None
                    continue
                size = sum(each.nbytes() for each in batch)
                came = torch.empty(size, dtype=torch.uint8, device=device)
                yield dist.irecv(came, donor), (came, batch)

        for together in self._in_flight(begin()):
            if together is not None:
                came, batch = together
                parts = came.split([each.nbytes() for each in batch])
                for storage, part in zip(batch, parts, strict=True):
                    _bytes(storage).copy_(part)

    def _in_flight(self, begun: Iterable[tuple[Any, T]]) -> Iterator[T]:
        """Keep several messages on their way; yield what belongs to each when it has come.

        One after the other takes twice as long, as Gloo announces each before it sends it: 0.13 s
        instead of 0.07 s for 64 tensors of 1.2 MB.
        """
        waiting = iter(begun)
        under_way = deque(islice(waiting, AT_ONCE))
        while under_way:
            under_way.extend(islice(waiting, 1))
            work, belongs = under_way.popleft()
            await_message(work, self._group.device, lambda: self._group.is_broken)
            yield belongs


def _refuse_sharded(namespace: dict[str, Any], optimizers: Iterable[Any]) -> None:
    """What is cut up among the ranks died in part with the dead one."""
    cut = _what_is_sharded(namespace, optimizers)
    if cut:  # it may be what nobody has any more
        gc.collect()
        cut = _what_is_sharded(namespace, optimizers)
    if cut:
        raise RequestError(
            f"a part of what is sharded ({cut}) died with its rank: `%ddp restart --replay`, and "
            "load a checkpoint"
        )


def _what_is_sharded(namespace: dict[str, Any], optimizers: Iterable[Any]) -> str:
    if sharded_modules():
        return "FSDP"
    kinds = (type(each).__name__ for each in optimizers if is_sharded(each))
    return next(kinds, "DTensor" if any(map(has_dtensors, namespace.values())) else "")


def _bytes(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
