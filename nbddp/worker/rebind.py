"""DDP models go on with a new process group: an interrupt must not cost the user the model.

Nothing here is fatal: what cannot go on is named, with the way out, and the rest goes on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbddp.errors import say_ranks
from nbddp.worker.exchange import equal_on_all, exchange, take_over
from nbddp.worker.in_common import Plan, is_clear, pair, signature
from nbddp.worker.optimizer_state import (
    layout_of,
    make_room,
    parameters_of,
    plain_values,
    take_values,
    unsendable,
)
from nbddp.worker.registry import Registry, is_sharded, loaders, sharded_modules
from nbddp.worker.watch.namespace import names_of

OF_THE_GROUP = ("process_group", "reducer", "logger")
_ANEW = "make it again"
_TAKEN_ALONG = "on the new process group, as rank {} has them"
_ALL_ELSE = "; all else (an EMA copy, a counter) is as each rank left it"
_DIFFER = ("the ranks do not have the same", "make it again in a cell that all ranks run")


class Rebinding:
    """Binds models of an old default group to the new one, and makes the ranks agree again.

    The ranks may have been interrupted on either side of an optimizer's step. So parameters,
    buffers and the state of the models' optimizers are sent around from one rank: from rank 0, as
    DDP does with the parameters when it is made, or from one that has lived on. Called on every
    rank at the same place.

    Where the ranks cannot agree on what they have, nothing is sent: first all that may fail on one
    rank alone is done and told, then come only collectives that all ranks know to be the same.

    Args:
        registry: the models and optimizers of this process.
        namespace: the user's names, to call them by.
        device: where the backend can send from.
        source: the rank whose parameters and states the others take over.
        is_heal: whether ranks are new. Then loaders, too, go on where the source's are.
    """

    def __init__(
        self,
        registry: Registry,
        namespace: Mapping[str, Any],
        device: torch.device,
        *,
        source: int = 0,
        is_heal: bool = False,
    ) -> None:
        self._registry = registry
        self._source = source
        self._is_heal = is_heal
        self._namespace = namespace
        self._device = device
        self._look()

    def _look(self) -> None:
        """See what there is."""
        self._bound: list[Any] = []
        self._left: list[tuple[Any, str, str]] = []
        self._models = self._movable()
        gone = [each for each in self._sharded_optimizers() if not _lives(each.process_group)]
        self._sharded = [each for each in gone if _was_default(each.process_group)]
        self._loaders = loaders() if self._is_heal else []
        self._others = [*self._sharded_of_other_groups(), *self._others_of_old_groups()]

    def _let_go(self) -> None:
        """Of what nobody has any more; one rank may have let go of it already and another not yet.

        In a rank that has imported all that DDP needs it takes 0.07 s.
        """
        self._models, self._sharded, self._loaders = [], [], []
        self._others, self._left = [], []
        gc.collect()

    def rebind(self, *, tries: bool = True) -> list[str]:
        """Do it; without ``tries`` on any rank, only say what is left behind.

        Returns:
            What the user should know, a line for each piece of news; the same on every rank.
        """
        told = self._tell(self._facts(tries=tries))
        if not any(each["has any"] for each in told):
            return []
        if not is_clear(told):
            self._let_go()
            self._look()
            told = self._tell(self._facts(tries=tries))
        if all(each["tries"] for each in told):
            self._plan = Plan([each["signatures"] for each in told])
            self._bind_models(self._agreed("models", self._models))
            self._bind_optimizers()
            self._send_schedules()
            self._send_positions()
        else:
            self._left += [(each, "it failed before", _ANEW) for each in self._models]
        self._left += self._others
        return self._lines()

    def _facts(self, *, tries: bool) -> dict[str, Any]:
        """What the others must know before anything can be done."""
        optimizers = self._optimizers_of(self._models)
        schedules = self._schedules_of([*optimizers, *self._sharded])
        kinds: dict[str, Sequence[Any]] = {
            "models": self._models,
            "optimizers": optimizers,
            "schedules": schedules,
            "loaders": self._loaders,
        }
        left = [each for each, *_ in [*self._left, *self._others]]
        mine = [*self._models, *optimizers, *self._sharded, *schedules, *left]
        return {
            "tries": tries,
            "has any": bool(mine or self._loaders),
            # what nobody can reach by name may be garbage
            "is named": len(names_of(mine, self._namespace)) == len({id(each) for each in mine}),
            "signatures": {
                kind: [signature(each) for each in some] for kind, some in kinds.items()
            },
        }

    def _tell(self, value: Any) -> list[Any]:
        return exchange(value, self._device)

    # ---- models

    def _movable(self) -> list[DistributedDataParallel]:
        """Models whose group is gone and was the default one."""
        movable = []
        for model in self._registry.models:
            group = model.__dict__.get("process_group")
            if _lives(group):
                continue
            if group is None or _was_default(group):
                movable.append(model)
            else:
                why = f"it was on a group of {_count(group.size())}"
                self._left.append((model, why, "make that group and the model again"))
        return movable

    def _agreed(self, kind: str, mine: list[Any]) -> list[Any]:
        """Those of mine that every rank has, in the order of rank 0."""
        everyone = self._plan.told(kind)
        if everyone is None:
            everyone = self._tell([signature(each) for each in mine])
        chosen = pair(everyone, dist.get_rank())
        self._left += [(each, *_DIFFER) for index, each in enumerate(mine) if index not in chosen]
        return [mine[index] for index in chosen]

    def _bind_models(self, models: list[DistributedDataParallel]) -> None:
        failures = [_attempt(_bind, model) for model in models]
        for model in self._well(models, failures):
            _send_model(model, self._device, self._source)
            self._bound.append(model)

    def _well(self, mine: list[Any], failures: list[str]) -> list[Any]:
        """What went well on every rank; the others are left behind."""
        everyone = self._tell(failures)
        self._plan.holds &= not any(map(any, everyone))
        well = []
        for index, each in enumerate(mine):
            why = next((said[index] for said in everyone if said[index]), "")
            if why:
                self._left.append((each, why, _ANEW))
            else:
                well.append(each)
        return well

    # ---- optimizers

    def _bind_optimizers(self) -> None:
        self._bind_sharded()
        models = [each for each in self._bound if isinstance(each, DistributedDataParallel)]
        self._send_states(self._agreed("optimizers", self._optimizers_of(models)))

    def _optimizers_of(self, models: list[DistributedDataParallel]) -> list[Optimizer]:
        """Those that update them, each on every rank in the same way."""
        owned = {id(each) for model in models for each in model.parameters()}
        sharded = self._sharded_optimizers()
        apart = {id(each) for one in sharded for each in (one, getattr(one, "optim", None))}
        return [
            each
            for each in self._registry.optimizers
            if id(each) not in apart and any(id(one) in owned for one in parameters_of(each))
        ]

    def _sharded_optimizers(self) -> list[Any]:
        return [each for each in self._registry.optimizers if is_sharded(each)]

    def _bind_sharded(self) -> None:
        """ZeroRedundancyOptimizer: each rank keeps its own part of the state."""
        for optimizer in self._sharded:
            optimizer.process_group = dist.group.WORLD
            self._bound.append(optimizer)

    def _sharded_of_other_groups(self) -> list[tuple[Any, str, str]]:
        way = "make that group and the optimizer again"
        return [
            (each, f"it was on a group of {_count(each.process_group.size())}", way)
            for each in self._sharded_optimizers()
            if not _lives(each.process_group) and not _was_default(each.process_group)
        ]

    def _send_states(self, optimizers: list[Optimizer]) -> None:
        everyone = self._tell([layout_of(each) for each in optimizers])
        sendable = []
        for index, optimizer in enumerate(optimizers):
            layouts = [said[index] for said in everyone]
            kind = unsendable(layouts)
            if kind:
                why = f"the ranks' states differ, and a {kind} in it cannot be sent"
                self._left.append((optimizer, why, _ANEW))
                self._plan.holds = False
            else:
                sendable.append((optimizer, layouts[self._source]))
        rooms: dict[int, list[torch.Tensor]] = {}

        def prepare(told: tuple[Optimizer, Any]) -> None:
            rooms[id(told[0])] = make_room(*told)

        failures = [_attempt(prepare, each) for each in sendable]
        for optimizer in self._well([each for each, _ in sendable], failures):
            tensors = rooms[id(optimizer)]
            equal = equal_on_all(tensors, self._device, self._source)
            differ = [each for each, is_equal in zip(tensors, equal, strict=True) if not is_equal]
            take_over(differ, self._device, self._source)
            self._bound.append(optimizer)

    def _schedules_of(self, optimizers: Sequence[Any]) -> list[Any]:
        owners = {id(each) for each in optimizers}
        return [each for each in self._registry.schedules if id(each.optimizer) in owners]

    def _send_schedules(self) -> None:
        """One rank may have counted a step that another had not come to."""
        schedules = self._agreed("schedules", self._schedules_of(self._bound))
        for schedule, values in self._told_of(schedules, lambda one: plain_values(vars(one))):
            take_values(vars(schedule), values)
        self._bound += schedules

    def _send_positions(self) -> None:
        """One rank may have come to a batch that another had not; an epoch goes on where it was."""
        mine = self._agreed("loaders", self._loaders)
        for loader, position in self._told_of(mine, lambda one: one.state_dict()):
            loader.load_state_dict(position)
        self._bound += mine

    def _told_of(self, agreed: list[Any], ask: Callable[[Any], Any]) -> Iterable[tuple[Any, Any]]:
        """Things that every rank has, each with what the source says of its own."""
        if not agreed:  # and so it is on every rank
            return ()
        told = self._tell([ask(each) for each in agreed])[self._source]
        return zip(agreed, told, strict=True)

    # ---- words

    def _others_of_old_groups(self) -> list[tuple[Any, str, str]]:
        """What else of the user's lived on groups that are gone."""
        why = "FSDP cannot change its process group"
        way = "make it again and load a checkpoint"
        others = [(module, why, way) for module in sharded_modules()]
        for name, value in self._namespace.items():
            is_group = isinstance(value, dist.ProcessGroup) and not _lives(value)
            if is_group and name[:1] != "_" and not _was_default(value):
                others.append((value, "a group ends with the default one", _ANEW))
        return others

    def _lines(self) -> list[str]:
        names = names_of([*self._bound, *(each for each, *_ in self._left)], self._namespace)
        left = [each for each in self._left if id(each[0]) in names or each[1:] != _DIFFER]
        everyone = self._tell([f"{_name(each, names)}: {why}; {way}" for each, why, way in left])
        lines = []
        if self._bound:
            bound = ", ".join(dict.fromkeys(_name(each, names) for each in self._bound))
            trained = any(hasattr(each, "param_groups") for each in self._bound)
            lines.append(
                f"{bound}: {_TAKEN_ALONG.format(self._source)}{_ALL_ELSE if trained else ''}"
            )
        for said in dict.fromkeys(line for each in everyone for line in each):
            ranks = [rank for rank, each in enumerate(everyone) if said in each]
            who = "" if len(ranks) == len(everyone) else f" ({say_ranks(ranks)})"
            lines.append(f"not on the new process group: {said}{who}")
        return lines


def _lives(group: Any) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def _was_default(group: Any) -> bool:
    return bool(group.group_desc == "default_pg" and group.size() == dist.get_world_size())


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def _attempt(act: Any, argument: Any) -> str:
    """Why it failed, in one line; empty when it went well."""
    try:
        act(argument)
    except Exception as error:  # noqa: BLE001 - a model's own code; the line names it
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _name(value: Any, names: Mapping[int, str]) -> str:
    """What the user calls it, or what it is."""
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, DistributedDataParallel):
        return f"a DDP model ({type(value.module).__name__})"
    kind = type(value).__name__
    return f"an {kind}" if kind[:1] in "AEIOU" else f"a {kind}"


def unbind(model: DistributedDataParallel) -> None:
    """Take a model off its process group; the reducer takes its hooks along."""
    for key in OF_THE_GROUP:
        model.__dict__.pop(key, None)


def _bind(model: DistributedDataParallel) -> None:
    """As torch does when it unpickles a model, but in place; nothing is sent."""
    state = {key: value for key, value in model.__dict__.items() if key not in OF_THE_GROUP}
    old = model.__dict__.get("process_group")
    unbind(model)
    model.zero_grad(set_to_none=True)  # half a backward pass may have left some
    model.__setstate__(state)
    for hook, hook_state in getattr(model, "_comm_hooks", []):  # which torch leaves out there
        if old is not None and getattr(hook_state, "process_group", None) is old:
            hook_state.process_group = model.process_group
        dist._register_comm_hook(model.reducer, hook_state, hook)  # type: ignore[attr-defined, unused-ignore]
    if model.mixed_precision is not None:
        reducer: Any = model.reducer
        reducer._set_mixed_precision_param_dtype(model.mixed_precision.param_dtype)


def _send_model(model: DistributedDataParallel, device: torch.device, source: int) -> None:
    states = dict([*model.module.named_parameters(), *model.module.named_buffers()])
    equal = zip(states, equal_on_all([*states.values()], device, source), strict=True)
    _sync_module_states(
        module=model.module,
        process_group=model.process_group,
        broadcast_bucket_size=model.broadcast_bucket_size,
        src=source,
        params_and_buffers_to_ignore={
            *model.parameters_to_ignore,
            *(name for name, is_equal in equal if is_equal),
        },
        broadcast_buffers=getattr(model, "forward_sync_buffers", True),  # not in torch 2.9
    )
