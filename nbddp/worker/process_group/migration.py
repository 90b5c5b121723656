"""Make DDP models, and the objects that train them, usable after an interrupt or a heal.

Their process group has new connections, or is a new one. An interrupted cell must not cost the user
the model. So objects that cannot be used again are reported, with what to do.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbddp.formatting import format_ranks, plural, with_article
from nbddp.reporting.this_rank import communication_device
from nbddp.sharding import is_sharded_over_all_ranks, parameters_of
from nbddp.worker.process_group import object_state
from nbddp.worker.process_group.bound_objects import (
    BoundObjects,
    is_sharded,
    is_stale_mesh,
    is_stale_tensor,
    sharded_modules,
    stale_modules,
    training_loaders,
)
from nbddp.worker.process_group.kept_references import is_alive, was_default
from nbddp.worker.process_group.object_collectives import broadcast_tensors, gather_objects
from nbddp.worker.process_group.revival import Connected
from nbddp.worker.process_group.unfinished_steps import drop_gradients
from nbddp.worker.watch.namespace import paths_of

GROUP_ATTRIBUTES = ("process_group", "reducer", "logger")
_MAKE_AGAIN = "make it again"
_MAKE_AGAIN_AND_LOAD = "make it again and load a checkpoint"
_MOVED = "set to the values of rank {}, because the ranks differed"
_HALF = "; rank {} stopped in an iteration, and may have updated only some parameters"
_FSDP_CANNOT_CHANGE = "FSDP cannot change its process group"
_ALL_ELSE = "; everything else (an EMA copy, a counter) keeps the values of each rank"
_RANKS_DIFFER = ("it is not the same on all ranks", "make it again in a cell that all ranks run")

Objects = dict[str, list[Any]]  # by kind, in order of creation
NotMoved = tuple[Any, str, str]  # an object that is not moved, the reason, and what to do


@dataclass(eq=False, repr=False)
class Migration:
    """Moves objects to a new or a revived process group, with the same state on all ranks.

    The ranks may have stopped on either side of an optimizer's step. So they compare fingerprints
    of the parameters, and of the states of optimizers, schedules and gradient scalers. Where these
    differ, one rank sends its values to the others: after a heal the donor, or else the lowest of
    the ranks with the most frequent values. Buffers are not compared, because they differ between
    two forward passes of DDP. All ranks call this at the same line.

    First the ranks exchange lists of their objects and failures. So all later collectives are the
    same on all ranks.

    Args:
        bound_objects: the models, optimizers, schedules and scalers of this process.
        namespace: the user's variables.
        connected: the groups. After a heal, loaders get the position of the source too.
        source: after a heal, the rank in the group whose state the others get.
        group: the process group; None for the default group.
    """

    _bound_objects: BoundObjects
    _namespace: Mapping[str, Any]
    _connected: Connected
    _source: int
    _group: Any = None
    _moved: list[Any] = field(init=False, default_factory=list)
    _not_moved: list[NotMoved] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._is_default = self._group is None
        self._group = dist.group.WORLD if self._group is None else self._group
        self._is_inside_step = self._connected.is_inside_step
        self._is_heal = bool(self._connected.new_ranks)

    def run(self, *, may_migrate: bool = True) -> list[str]:
        """Move the objects. Without ``may_migrate`` on any rank, only report them.

        Returns:
            Lines about objects that differed between the ranks, or were not moved. They are the
            same on every rank.
        """
        found = self._find()
        has_any = bool(any(found.values()) or self._not_moved)
        signatures = {kind: [*map(signature, objects)] for kind, objects in found.items()}
        report = {"tries": may_migrate, "has any": has_any, "signatures": signatures}
        gathered = self._gather(report)
        # From here on, branch only on what all ranks have gathered: each _gather and broadcast is a
        # collective, and a rank that skips one leaves the others waiting in it.
        if not any(each["has any"] for each in gathered):
            return []
        others, self._not_moved = self._not_moved, []
        if all(each["tries"] for each in gathered):
            # keep the objects that all ranks have, in the order of rank 0
            for kind, objects in found.items():
                of_kind = [each["signatures"][kind] for each in gathered]
                chosen = match_across_ranks(of_kind, dist.get_rank(self._group))
                unmatched = [each for at, each in enumerate(objects) if at not in chosen]
                self._not_moved += [(each, *_RANKS_DIFFER) for each in unmatched]
                found[kind] = [objects[index] for index in chosen]
            self._move(found)
        else:
            self._not_moved += [(each, "it failed before", _MAKE_AGAIN) for each in found["models"]]
        self._not_moved += others
        return self._report()

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self._group)

    # ---- finding objects

    def _find(self) -> Objects:
        """List the objects of this rank that are on destroyed groups.

        An object that no name refers to may be garbage, which other ranks have freed already. Then
        run the garbage collector first: 0.07 s in a rank that has imported what DDP needs.
        """
        listed = self._list_objects()
        all_objects = [each for objects in listed.values() for each in objects]
        all_objects += [each for each, *_ in self._not_moved]
        if len(paths_of(all_objects, self._namespace)) < len({*map(id, all_objects)}):
            del all_objects
            listed.clear()
            self._not_moved.clear()
            gc.collect()
            listed = self._list_objects()
        return listed

    def _list_objects(self) -> Objects:
        models = [each for each in self._bound_objects.models if self._is_movable(each)]
        sharded = [*filter(self._is_movable, filter(is_sharded, self._bound_objects.optimizers))]
        optimizers = self._optimizers_of(models)
        owners = {*map(id, [*optimizers, *sharded])}
        all_schedules = self._bound_objects.schedules
        schedules = [each for each in all_schedules if self._is_made_equal(each, owners)]
        scalers = [each for each in self._bound_objects.scalers if each.is_enabled()]
        if self._is_default:
            self._not_moved += [(*each, _MAKE_AGAIN_AND_LOAD) for each in self._connected.not_reset]
            self._not_moved += self._on_destroyed_groups()
        return {
            "models": models,
            "sharded": sharded,
            "optimizers": optimizers,
            "schedules": schedules,
            "scalers": scalers if owners else [],
            "loaders": training_loaders() if self._is_heal else [],
        }

    def _on_destroyed_groups(self) -> Iterator[NotMoved]:
        subgroups = self._connected.subgroups
        lives_on = subgroups is not None
        if subgroups is not None and not subgroups.dropped:
            return
        why = "because some ranks do not have it" if lives_on else "together with the default group"
        reason = "its process groups were destroyed" if lives_on else _FSDP_CANNOT_CHANGE
        for module in sharded_modules():
            if not lives_on or any(map(is_stale_tensor, module.parameters())):
                yield module, reason, _MAKE_AGAIN_AND_LOAD
        reason = "its parameters are on a mesh of destroyed groups"
        for module in stale_modules(self._namespace):
            yield module, reason, _MAKE_AGAIN_AND_LOAD
        for name, value in self._namespace.items():
            if name[:1] != "_" and (reason := _why_stale(value, why)):
                yield value, reason, _MAKE_AGAIN

    def _is_movable(self, obj: Any) -> bool:
        """Return whether to move a model or an optimizer.

        Its group has new connections, or was the destroyed default group.
        """
        group = vars(obj).get("process_group")
        if is_alive(group):
            return self._connected.subgroups is not None and group is self._group
        if group is None or was_default(group):
            return self._is_default
        if self._is_default:
            size, kind = group.size(), "optimizer" if isinstance(obj, Optimizer) else "model"
            reason = f"it was on a group of {plural(size, 'rank')}"
            self._not_moved.append((obj, reason, f"make that group and the {kind} again"))
        return False

    def _optimizers_of(self, models: Iterable[DistributedDataParallel]) -> list[Optimizer]:
        """Return the optimizers that update these models in the same way on every rank."""
        owned = {id(each) for model in models for each in model.parameters()}
        sharded = [each for each in self._bound_objects.optimizers if is_sharded(each)]
        excluded = {id(each) for obj in sharded for each in (obj, getattr(obj, "optim", None))}
        others = [each for each in self._bound_objects.optimizers if id(each) not in excluded]
        return [each for each in others if not owned.isdisjoint(map(id, parameters_of(each)))]

    def _is_made_equal(self, schedule: Any, owners: Set[int]) -> bool:
        """Return whether a schedule must be equal on all ranks.

        ``owners``: the ids of the optimizers of the moved models.
        """
        optimizer = schedule.optimizer
        is_on_all = self._is_default and is_sharded_over_all_ranks(optimizer)
        return id(optimizer) in owners or is_on_all

    # ---- moving objects

    def _move(self, objects: Objects) -> None:
        tried = [_attempt(_bind, model) for model in objects["models"]]
        models = self._without_failures(objects["models"], [reason for _, reason in tried])
        for optimizer in objects["sharded"]:  # each rank keeps its own shard of the state
            optimizer.process_group = self._group
        trained = self._optimizers_of(models)
        if self._connected.drops_gradients:
            for model in models:
                model.zero_grad(set_to_none=True)
            drop_gradients(self._bound_objects, [*trained, *objects["sharded"]])
        owners = {*map(id, [*trained, *objects["sharded"]])}
        owned = [each for each in objects["optimizers"] if id(each) in owners]
        owned += [each for each in objects["schedules"] if self._is_made_equal(each, owners)]
        # with a state that was loaded, the next loop over a loader continues in the same epoch
        tried = [
            _attempt(lambda obj: obj.load_state_dict(obj.state_dict()), loader)
            for loader in objects["loaders"]
        ]
        loaders = self._without_failures(objects["loaders"], [reason for _, reason in tried])
        self._make_equal([*models, *owned, *objects["scalers"], *loaders])

    def _make_equal(self, objects: list[Any]) -> None:
        """Copy the models and states that differ between the ranks from one rank to the others."""
        fingerprints = [_attempt(object_state.fingerprint, each)[0] for each in objects]
        optimizers = {at for at, each in enumerate(objects) if isinstance(each, Optimizer)}
        steps = [self._connected.steps_of(objects[at]) for at in sorted(optimizers)]
        reports = self._gather([fingerprints, self._is_inside_step, steps])
        prints = [numbers for numbers, *_ in reports]
        differing = {
            at
            for at, of_ranks in enumerate(zip(*prints, strict=True))
            if any(of_rank != of_ranks[0] for of_rank in of_ranks)
        }
        models_differ = any(isinstance(objects[at], DistributedDataParallel) for at in differing)
        are_whole = all(begun == finished for begun, finished in steps)
        has_same_steps = are_whole and all(others == steps for *_, others in reports)
        if has_same_steps and not models_differ and not self._is_heal:
            differing -= optimizers  # each rank may have its own part of the state
        if not self._is_heal:
            texts = [json.dumps([numbers[at] for at in sorted(differing)]) for numbers in prints]
            self._source = choose_source(texts, [is_inside for _, is_inside, _ in reports])
        self._is_inside_step = reports[self._source][1]
        if differing:
            self._copy_states([objects[at] for at in sorted(differing)])

    def _copy_states(self, differing: list[Any]) -> None:
        models = [each for each in differing if isinstance(each, DistributedDataParallel)]
        objects = differing[len(models) :]
        described = [_attempt(object_state.describe_state, each) for each in objects]
        is_source = dist.get_rank(self._group) == self._source
        gathered = self._gather(described if is_source else [])[self._source]
        make = object_state.state_from_description
        tried = [
            (None, reason) if reason else _attempt(make, obj, text, communication_device())
            for obj, (text, reason) in zip(objects, gathered, strict=True)
        ]
        states = {id(obj): state for obj, (state, _) in zip(objects, tried, strict=True)}
        succeeded = self._without_failures(objects, [reason for _, reason in tried])
        tensors = [each for model in models for each in object_state.sent_tensors(model)]
        tensors += [each for obj in succeeded for each in object_state.tensors_in(states[id(obj)])]
        broadcast_tensors(tensors, self._source, self._group)
        self._moved += models
        for obj in succeeded:  # after the broadcast: if one rank fails here, no other rank waits
            _, reason = _attempt(object_state.load_state, obj, states[id(obj)])
            if reason:
                self._not_moved.append((obj, reason, _MAKE_AGAIN))
            else:
                self._moved.append(obj)

    def _without_failures(self, objects: list[Any], failures: list[str]) -> list[Any]:
        """Return the objects without a failure on any rank, and record the others as not moved."""
        all_ranks = self._gather(failures)  # also without any failure: it is a collective
        succeeded = []
        for index, obj in enumerate(objects):
            reasons = [failures[index] for failures in all_ranks if failures[index]]
            if reasons:
                self._not_moved.append((obj, reasons[0], _MAKE_AGAIN))
            else:
                succeeded.append(obj)
        return succeeded

    # ---- the report

    def _report(self) -> list[str]:
        names = paths_of([*self._moved, *(each for each, *_ in self._not_moved)], self._namespace)
        shown = [x for x in self._not_moved if id(x[0]) in names or x[1:] != _RANKS_DIFFER]
        texts = [_describe(_name(each, names), reason, remedy) for each, reason, remedy in shown]
        all_ranks = self._gather(texts)
        lines = []
        if self._moved:
            moved = ", ".join(dict.fromkeys(_name(each, names) for each in self._moved))
            source = dist.get_global_rank(self._group, self._source)
            half = _HALF.format(source) if self._is_inside_step else ""
            lines.append(f"{moved}: {_MOVED.format(source)}{half}{_ALL_ELSE}")
        for line in dict.fromkeys(line for each in all_ranks for line in each):
            ranks = [rank for rank, each in enumerate(all_ranks) if line in each]
            ranks = [dist.get_global_rank(self._group, rank) for rank in ranks]
            which_ranks = "" if len(ranks) == len(all_ranks) else f" ({format_ranks(ranks)})"
            lines.append(f"no longer usable: {line}{which_ranks}")
        return lines


def _name(value: Any, names: Mapping[int, str]) -> str:
    """Return the expression by which the user reaches an object, or a description of it."""
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, DistributedDataParallel):
        return f"a DDP model ({type(value.module).__name__})"
    return with_article(type(value).__name__)


def _describe(name: str, reason: str, remedy: str) -> str:
    """Describe the fault of an object, and name the variable that the user must make again.

    >>> _describe("trainer.optimizer", "it differs", "make it again")
    'trainer.optimizer: it differs; make `trainer` again'
    """
    variable = re.match(r"(\w+)[.]", name)
    thing = f"`{variable[1]}`" if variable else "it"
    return f"{name}: {reason}; {remedy.replace('make it', f'make {thing}')}"


def _attempt(act: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Call a function. Return its result, and the error in one line."""
    try:
        return act(*arguments), ""
    except Exception as error:  # noqa: BLE001 - the user's class may raise anything; the line names the object
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]


# ---- process groups


def _why_stale(value: Any, why: str) -> str:
    """Return why the user must make a group or something on groups again; else ""."""
    is_group = isinstance(value, dist.ProcessGroup) and not is_alive(value)
    if is_group and not was_default(value):
        return f"it was destroyed {why}"
    if is_stale_mesh(value):
        return f"its groups were destroyed {why}".replace(" have it", " have them")
    pipelines = sys.modules.get("torch.distributed.pipelining")
    if pipelines is not None and issubclass(type(value), pipelines.PipelineStage):
        is_stale = value.group is not None and not is_alive(value.group)
        return f"its group was destroyed {why}" if is_stale else ""
    return "it is on a mesh of destroyed groups" if is_stale_tensor(value) else ""


def unbind(model: DistributedDataParallel) -> None:
    """Remove a model from its process group; the reducer removes its hooks."""
    for key in GROUP_ATTRIBUTES:
        model.__dict__.pop(key, None)


def _bind(model: DistributedDataParallel) -> None:
    """Rebuild the DDP reducer of a model on its living process group, without any communication.

    A model whose group was destroyed gets the default group. Torch does the same when it unpickles
    a DDP model.
    """
    state = {key: value for key, value in model.__dict__.items() if key not in GROUP_ATTRIBUTES}
    old = model.__dict__.get("process_group")
    if is_alive(old):
        state["process_group"] = old  # __setstate__ begins with the default group
    if model.static_graph:  # the new reducer records the graph in its first iteration
        state["_static_graph_delay_allreduce_enqueued"] = False
    unbind(model)  # frees the old reducer, which removes its hooks
    model.__setstate__(state)
    # __setstate__ does not register them
    hooks: list[Any] = model._comm_hooks
    for hook, hook_state in hooks:
        if old is not None and getattr(hook_state, "process_group", None) is old:
            hook_state.process_group = model.process_group
        dist._register_comm_hook(model.reducer, hook_state, hook)  # type: ignore[attr-defined, unused-ignore]
    if model.mixed_precision is not None:
        reducer: Any = model.reducer
        reducer._set_mixed_precision_param_dtype(model.mixed_precision.param_dtype)


def choose_source(prints: Sequence[str], inside: Sequence[bool]) -> int:
    """Return the rank whose values the others get: the lowest one with the most frequent values.

    Avoid ranks that are ``inside`` a step.

    >>> choose_source(["old", "new", "new"], [False, False, False])
    1
    >>> choose_source(["half", "old", "new"], [True, False, False])
    1
    """
    counts = Counter(prints)
    return min(range(len(prints)), key=lambda rank: (inside[rank], -counts[prints[rank]], rank))


# ---- matching


def match_across_ranks(all_ranks: Sequence[Sequence[str]], rank: int) -> list[int]:
    """Return the indices of this rank's objects that all ranks have, in the order of rank 0.

    Objects with equal signatures are matched in order, if every rank has the same number of them.

    >>> match_across_ranks([["a", "b"], ["b", "a"]], rank=1)
    [1, 0]
    >>> match_across_ranks([["a", "a", "b"], ["a", "b"]], rank=0)
    [2]
    >>> everyone = [["a", "b", "a", "c"], ["c", "a", "b", "b", "a"]]
    >>> [match_across_ranks(everyone, rank) for rank in (0, 1)]
    [[0, 2, 3], [1, 4, 0]]
    """
    counts = [Counter(each) for each in all_ranks]
    common = {sign for sign in counts[0] if all(each[sign] == counts[0][sign] for each in counts)}
    indices = {
        sign: iter([index for index, each in enumerate(all_ranks[rank]) if each == sign])
        for sign in common
    }
    return [next(indices[sign]) for sign in all_ranks[0] if sign in common]


def signature(value: Any) -> str:
    """Return a hash of what must be equal on all ranks for two objects to match."""
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
