"""Move DDP models, and what trains them, to a new process group.

A stopped cell must not cost the user the model. So an object that cannot be moved is reported, with
the way out, and the others are moved.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbddp.errors import format_ranks
from nbddp.formatting import plural, with_article
from nbddp.worker.process_group.bound_objects import (
    BoundObjects,
    accumulations,
    is_sharded,
    loaders,
    sharded_modules,
)
from nbddp.worker.process_group.object_collectives import equal_on_all, gather_objects, take_over
from nbddp.worker.process_group.object_state import (
    described,
    load_state,
    parameters_of,
    state_like,
    tensors_in,
)
from nbddp.worker.watch.namespace import paths_of

OF_THE_GROUP = ("process_group", "reducer", "logger")
_ANEW = "make it again"
_TAKEN_ALONG = "moved to the new process group, with the values of rank {}"
_ALL_ELSE = "; everything else (an EMA copy, a counter) keeps the values of each rank"
_DIFFER = ("the ranks do not have the same", "make it again in a cell that all ranks run")
_UNWANTED = "-"  # instead of why an object fails: its model is not moved

Objects = dict[str, list[Any]]  # by kind, in the order in which they were made
Left = tuple[Any, str, str]  # an object that is not moved, why, and the way out


class Migration:
    """Moves the objects of an old default group to the new one, with the same state on all ranks.

    The ranks may have stopped on either side of an optimizer's step. So one rank sends parameters,
    buffers and the state of optimizers, schedules and gradient scalers to the others: rank 0, as
    for a new DDP model, or after a heal the donor. All ranks call this at the same place.

    Each rank first tells what it has, and what failed there. So every collective that follows is
    the same on all ranks.

    Args:
        registry: the models and optimizers of this process.
        namespace: the user's names.
        device: the device that the backend can send from.
        source: the rank whose state the others get.
        is_heal: whether ranks are new. Then loaders also get the source's position.
    """

    def __init__(
        self,
        registry: BoundObjects,
        namespace: Mapping[str, Any],
        device: torch.device,
        *,
        source: int = 0,
        is_heal: bool = False,
    ) -> None:
        self._registry = registry
        self._namespace = namespace
        self._device = device
        self._source = source
        self._is_heal = is_heal
        self._moved: list[Any] = []
        self._left: list[Left] = []

    def run(self, *, tries: bool = True) -> list[str]:
        """Move the objects; without ``tries`` on any rank, only report what is not moved.

        Returns:
            Lines for the user, the same on every rank.
        """
        mine = self._find()
        has_any = bool(any(mine.values()) or self._left)
        signatures = {kind: [*map(signature, some)] for kind, some in mine.items()}
        told = self._tell({"tries": tries, "has any": has_any, "signatures": signatures})
        if not any(each["has any"] for each in told):
            return []
        others, self._left = self._left, []
        if all(each["tries"] for each in told):
            for kind, some in mine.items():  # what all ranks have, in the order of rank 0
                chosen = pair([each["signatures"][kind] for each in told], dist.get_rank())
                self._left += [(each, *_DIFFER) for at, each in enumerate(some) if at not in chosen]
                mine[kind] = [some[index] for index in chosen]
            self._move(mine)
        else:
            self._left += [(each, "it failed before", _ANEW) for each in mine["models"]]
        self._left += others
        return self._lines()

    def _tell(self, value: Any) -> list[Any]:
        return gather_objects(value, self._device)

    # ---- what there is

    def _find(self) -> Objects:
        """List what this rank has on groups that are gone.

        An object that no name leads to may be garbage, which other ranks have freed already. Then
        collect it first: 0.07 s in a rank that has imported what DDP needs.
        """
        mine = self._look()
        known = [each for some in mine.values() for each in some]
        known += [each for each, *_ in self._left]
        if len(paths_of(known, self._namespace)) < len({*map(id, known)}):
            del known
            mine.clear()
            self._left.clear()
            gc.collect()
            mine = self._look()
        return mine

    def _look(self) -> Objects:
        models = [each for each in self._registry.models if self._is_movable(each)]
        sharded = [*filter(self._is_movable, filter(is_sharded, self._registry.optimizers))]
        optimizers = self._optimizers_of(models)
        owners = {*map(id, [*optimizers, *sharded])}
        schedules = [each for each in self._registry.schedules if id(each.optimizer) in owners]
        scalers = [each for each in self._registry.scalers if each.is_enabled()]
        why, way = "FSDP cannot change its process group", "make it again and load a checkpoint"
        self._left += [(module, why, way) for module in sharded_modules()]
        for name, value in self._namespace.items():
            is_group = isinstance(value, dist.ProcessGroup) and not _lives(value)
            if is_group and name[:1] != "_" and not _was_default(value):
                self._left.append((value, "a group ends with the default one", _ANEW))
        return {
            "models": models,
            "sharded": sharded,
            "optimizers": optimizers,
            "schedules": schedules,
            "scalers": scalers if owners else [],
            "loaders": loaders() if self._is_heal else [],
        }

    def _is_movable(self, one: Any) -> bool:
        """Return whether a model or an optimizer was on the default group, which is gone."""
        group = vars(one).get("process_group")
        if group is None or _was_default(group):
            return not _lives(group)
        if not _lives(group):
            size, kind = group.size(), "optimizer" if isinstance(one, Optimizer) else "model"
            why = f"it was on a group of {plural(size, 'rank')}"
            self._left.append((one, why, f"make that group and the {kind} again"))
        return False

    def _optimizers_of(self, models: Iterable[DistributedDataParallel]) -> list[Optimizer]:
        """Return the optimizers that update these models in the same way on every rank."""
        owned = {id(each) for model in models for each in model.parameters()}
        sharded = [each for each in self._registry.optimizers if is_sharded(each)]
        apart = {id(each) for one in sharded for each in (one, getattr(one, "optim", None))}
        return [
            each
            for each in self._registry.optimizers
            if id(each) not in apart and not owned.isdisjoint(map(id, parameters_of(each)))
        ]

    # ---- moving it

    def _move(self, mine: Objects) -> None:
        tried = [_attempt(_bind, model) for model in mine["models"]]
        models = self._well(mine["models"], [why for _, why in tried])
        for optimizer in mine["sharded"]:  # each rank keeps its own part of the state
            optimizer.process_group = dist.group.WORLD
        self._moved += [*models, *mine["sharded"]]
        trained = self._optimizers_of(models)
        for accumulation in accumulations(trained):
            accumulation._drop_accumulation()
        for scaler in mine["scalers"]:  # one that was stopped between unscale_() and update()
            scaler._per_optimizer_states.clear()
        owners = {*map(id, [*trained, *mine["sharded"]])}
        wanted = [id(each) in owners for each in mine["optimizers"]]
        wanted += [id(each.optimizer) in owners for each in mine["schedules"]]
        others = [*mine["scalers"], *mine["loaders"]]
        objects = [*mine["optimizers"], *mine["schedules"], *others]
        self._bring_states(models, objects, [*wanted, *(True for _ in others)])

    def _bring_states(
        self, models: Iterable[DistributedDataParallel], objects: list[Any], wanted: list[bool]
    ) -> None:
        """Give all ranks what the source has: parameters, buffers, and the states of objects.

        What is not ``wanted`` on every rank is not sent, and no line tells of it.
        """
        mine = [_attempt(described, each) for each in objects]
        told = self._tell(mine if dist.get_rank() == self._source else [])[self._source]
        tried = [
            (None, why) if why else _attempt(state_like, one, text, self._device)
            for one, (text, why) in zip(objects, told, strict=True)
        ]
        states = {id(one): state for one, (state, _) in zip(objects, tried, strict=True)}
        whys = [why for _, why in tried]
        failures = [why if is_ok else _UNWANTED for why, is_ok in zip(whys, wanted, strict=True)]
        well = self._well(objects, failures)
        tensors = [each for model in models for each in _sent_tensors(model)]
        tensors += [each for one in well for each in tensors_in(states[id(one)])]
        equal = equal_on_all(tensors, self._device, self._source)
        differ = [each for each, is_equal in zip(tensors, equal, strict=True) if not is_equal]
        take_over(differ, self._device, self._source)
        for one in well:
            _, why = _attempt(load_state, one, states[id(one)])
            if why:
                self._left.append((one, why, _ANEW))
            else:
                self._moved.append(one)

    def _well(self, mine: list[Any], failures: list[str]) -> list[Any]:
        """Return those without a failure on any rank; leave the others."""
        everyone = self._tell(failures)
        well = []
        for index, each in enumerate(mine):
            whys = [said[index] for said in everyone if said[index]]
            if not whys:
                well.append(each)
            elif _UNWANTED not in whys:
                self._left.append((each, whys[0], _ANEW))
        return well

    # ---- the report

    def _lines(self) -> list[str]:
        names = paths_of([*self._moved, *(each for each, *_ in self._left)], self._namespace)
        left = [each for each in self._left if id(each[0]) in names or each[1:] != _DIFFER]
        everyone = self._tell([f"{_name(each, names)}: {why}; {way}" for each, why, way in left])
        lines = []
        if self._moved:
            moved = ", ".join(dict.fromkeys(_name(each, names) for each in self._moved))
            trained = any(hasattr(each, "param_groups") for each in self._moved)
            lines.append(
                f"{moved}: {_TAKEN_ALONG.format(self._source)}{_ALL_ELSE if trained else ''}"
            )
        for said in dict.fromkeys(line for each in everyone for line in each):
            ranks = [rank for rank, each in enumerate(everyone) if said in each]
            who = "" if len(ranks) == len(everyone) else f" ({format_ranks(ranks)})"
            lines.append(f"not on the new process group: {said}{who}")
        return lines


def _name(value: Any, names: Mapping[int, str]) -> str:
    """Return the expression by which the user reaches an object, or what it is."""
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, DistributedDataParallel):
        return f"a DDP model ({type(value.module).__name__})"
    return with_article(type(value).__name__)


def _attempt(act: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Call a function. Return its result, and why it failed, in one line."""
    try:
        return act(*arguments), ""
    except Exception as error:  # noqa: BLE001 - a class of the user's; the line names the object
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]


# ---- process groups


def _lives(group: Any) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def _was_default(group: Any) -> bool:
    return bool(group.group_desc == "default_pg" and group.size() == dist.get_world_size())


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


def _sent_tensors(model: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters and buffers that DDP sends when it is made."""
    named = [*model.module.named_parameters()]
    if getattr(model, "forward_sync_buffers", True):  # not in torch 2.9
        named += model.module.named_buffers()
    return [each for name, each in named if name not in model.parameters_to_ignore]


# ---- matching


def pair(everyone: Sequence[Sequence[str]], rank: int) -> list[int]:
    """Return which of this rank's objects all others have too, in the order of rank 0.

    Objects of one signature belong together in their order, if every rank has as many of them.

    >>> pair([["a", "b"], ["b", "a"]], rank=1)
    [1, 0]
    >>> pair([["a", "a", "b"], ["a", "b"]], rank=0)
    [2]
    """
    counts = [Counter(each) for each in everyone]
    common = {sign for sign in counts[0] if all(each[sign] == counts[0][sign] for each in counts)}
    places = {
        sign: iter([index for index, each in enumerate(everyone[rank]) if each == sign])
        for sign in common
    }
    return [next(places[sign]) for sign in everyone[0] if sign in common]


def signature(value: Any) -> str:
    """Return what must be equal on all ranks for two objects to be the same."""
    facts: list[Any]
    if isinstance(value, Optimizer):
        groups = [[_facts(each) for each in group["params"]] for group in value.param_groups]
        facts = [type(value).__name__, groups]
    elif isinstance(value, DistributedDataParallel):
        parts = [*value.module.named_parameters(), *value.module.named_buffers()]
        facts = [type(value.module).__name__, [[name, *_facts(each)] for name, each in parts]]
    else:
        facts = [type(value).__name__, str(getattr(value, "seed", ""))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _facts(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype)]
