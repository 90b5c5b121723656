"""Pickle sharded models for a new process: meshes, DTensors and FSDP2 models without their values.

Each rank has another shard of them. So the new rank makes its own part of each mesh and each
DTensor, of the right size, and shards the models with ``fully_shard()`` as they were sharded. This
needs no communication. The values follow; see :mod:`nbddp.worker.heal.spread_state`.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Container, Iterable, Sequence
from operator import getitem
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from nbddp.wire.request_messages import LOST_PART
from nbddp.worker.heal.spread_state import root_mesh
from nbddp.worker.process_group.unfinished_steps import fsdp_groups_of

# FSDP2 adds its hooks again; a fault is injected on one rank only
_HOOK_MODULES = ("torch.distributed.fsdp._fully_shard", "nbddp.extensions.faults")
_STATE_KEYS = "__composable_api_state_key"  # differ in each process


def why_not_restored(obj: Any, restored: Container[int]) -> str:
    """Return why a DTensor has no values on the new rank; "" if it has, and for other objects.

    Args:
        obj: any object.
        restored: the ids of the DTensors whose values the new rank gets.
    """
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    is_lost = tensors is not None and isinstance(obj, tensors.DTensor) and id(obj) not in restored
    return LOST_PART if is_lost else ""


def reduce_sharded(obj: Any) -> Any:
    """Return how to pickle an object of a sharded model; None for all other objects."""
    if isinstance(obj, nn.Module) and hasattr(type(obj), "_get_fsdp_state"):
        state = {key: each for key, each in vars(obj).items() if not key.startswith(_STATE_KEYS)}
        kind: Any = type(obj)
        return _make_plain, (kind.__mro__[2],), state
    if _is_internal_hook(obj):
        return _make_empty_hook, ()
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(obj, tensors.DTensor):
        facts = obj.shape, obj.stride(), obj.dtype, obj.to_local().device.type
        parts = obj.device_mesh, obj.placements, facts
        if isinstance(obj, nn.Parameter):
            return _make_parameter, (parts, obj.requires_grad)
        return _make_dtensor, parts
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if meshes is not None and isinstance(obj, meshes.DeviceMesh):
        return _reduce_mesh(obj)
    return None


def _make_plain(kind: Any) -> Any:
    """Create a module of the class that it had before it was sharded."""
    return kind.__new__(kind)


def _is_internal_hook(obj: Any) -> bool:
    if isinstance(obj, MethodType):
        return type(obj.__self__).__module__.startswith(_HOOK_MODULES)
    is_inner = isinstance(obj, FunctionType) and "<locals>" in obj.__qualname__
    return is_inner and (obj.__module__ or "").startswith(_HOOK_MODULES)


def _make_empty_hook() -> Any:
    return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a hook of FSDP2 or of a fault."""


def _make_dtensor(mesh: Any, placements: Any, facts: tuple[Any, ...]) -> Any:
    """Return this rank's part of a DTensor.

    Args:
        mesh: its mesh.
        placements: its placements on the mesh.
        facts: the shape, the stride and the type of the whole tensor, and the device.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, stride, dtype, device = facts
    sizes, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = torch.zeros(sizes, dtype=dtype, device=device)
    options = {"run_check": False, "shape": shape, "stride": stride}
    return DTensor.from_local(local, mesh, placements, **options).detach()


def _make_parameter(dtensor: Any, requires_grad: bool) -> nn.Parameter:  # noqa: FBT001
    return nn.Parameter(_make_dtensor(*dtensor), requires_grad)


# ---- meshes


def _reduce_mesh(mesh: Any) -> Any:
    root = root_mesh(mesh)
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    if root is not mesh and {*names} <= {*(root.mesh_dim_names or ())}:
        return getitem, (root, names if len(names) > 1 else names[0])
    groups = mesh.get_all_groups()  # the new rank finds its own groups instead
    state = {key: value for key, value in vars(mesh).items() if key not in _OF_ONE_RANK}
    return copyreg.__newobj__, (type(mesh),), (state, groups), None, None, _set_mesh_state  # type: ignore[attr-defined]


_OF_ONE_RANK = ("_rank", "_coordinate_on_dim", "_dim_group_names", "_pg_registry")


def _set_mesh_state(mesh: Any, state_and_groups: Any) -> None:
    state, groups = state_and_groups
    vars(mesh).update(state)
    mesh._rank = dist.get_rank()
    [coordinate] = (mesh.mesh == mesh._rank).nonzero().tolist()
    mesh._coordinate_on_dim = tuple(coordinate)
    mesh._dim_group_names = [group.group_name for group in groups]
    mesh._pg_registry = {group.group_name: group for group in groups}


# ---- FSDP2


def describe_fsdp(modules: Sequence[Any]) -> list[Any]:
    """Return how FSDP2 modules were sharded, for :func:`shard_again`; inner ones come first.

    Args:
        modules: FSDP2 modules, each before its inner ones.

    Raises:
        pickle.PicklingError: a module was sharded in a way that this function does not know.
    """
    states = list(
        {id(each._get_fsdp_state()): each._get_fsdp_state() for each in modules[::-1]}.values()
    )
    meshes = [group.mesh_info.mesh for state in states for group in fsdp_groups_of(state)]
    return [_describe_state(state, meshes[0]) for state in states] if meshes else []


def _describe_state(state: Any, any_mesh: Any) -> Any:
    groups = fsdp_groups_of(state)
    options = {"mesh": any_mesh, "mp_policy": state._mp_policy}
    if not groups:  # all parameters are those of inner modules
        return state._modules, options, [], {}
    [group, *others] = groups
    mesh_info, after_forward = group.mesh_info, group.post_forward_mesh_info
    is_other_mesh = after_forward is not None and after_forward.mesh != mesh_info.mesh
    if others or is_other_mesh or getattr(mesh_info, "dp_mesh_dims", None) is not None:
        raise pickle.PicklingError("a heal cannot shard it again on several meshes")
    options |= {"mesh": mesh_info.mesh, "offload_policy": group.offload_policy}
    if not state._auto_reshard_after_forward:
        options["reshard_after_forward"] = after_forward is not None
    flags = {key: value for key, value in vars(group).items() if type(value) in (bool, int, float)}
    return state._modules, options, [*map(_describe_parameter, group.fsdp_params)], flags


def _describe_parameter(parameter: Any) -> Any:
    info = parameter._module_info
    owners = [(info.module, info.param_name)]
    owners += zip(info.shared_modules, info.shared_param_names, strict=True)
    # torch 2.9 has another name
    spec = getattr(parameter, "_unsharded_dtensor_spec", getattr(parameter, "_tp_spec", None))
    parallel = None if spec is None else (spec.mesh, spec.placements)
    return owners, parameter.sharded_param, parallel, parameter.fsdp_placement


def shard_again(descriptions: Iterable[Any]) -> None:
    """Shard modules that were unpickled with the parameters of this rank."""
    for modules, options, parameters, flags in descriptions:
        from torch.distributed.fsdp import fully_shard  # here: it takes longer than the whole heal

        placements: dict[int, Any] = {}
        for owners, sharded, parallel, placement in parameters:
            unsharded = _make_unsharded(sharded, parallel)
            placements[id(unsharded)] = placement
            for module, name in owners:
                module._parameters[name] = unsharded
        everything = [each for module in modules for each in module.parameters()]
        made: Any = fully_shard(
            modules[0] if len(modules) == 1 else [*modules],
            shard_placement_fn=lambda each, of=placements: of[id(each)],
            ignored_params={each for each in everything if id(each) not in placements},
            **options,
        )
        for owners, sharded, *_ in parameters:
            for module, name in owners:
                module._parameters[name] = sharded  # the optimizer has the same object
        for group in fsdp_groups_of((made if len(modules) == 1 else made[0])._get_fsdp_state()):
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()
            vars(group).update(flags)


def _make_unsharded(sharded: Any, parallel: Any) -> nn.Parameter:
    """Return a parameter as it was before it was sharded, without memory."""
    if parallel is None:
        whole = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    else:
        facts = sharded.shape, sharded.stride(), sharded.dtype, "meta"
        whole = _make_dtensor(parallel[0], parallel[1], facts)
    return nn.Parameter(whole, sharded.requires_grad)


def newest_hook() -> int:
    """Return the number of the next hook, which no later hook of an unpickled module may have."""
    return int(RemovableHandle.next_id)


def number_hooks_from(number: int) -> None:
    """Set the number of the next hook, if it is higher than that of this process."""
    RemovableHandle.next_id = max(RemovableHandle.next_id, number)
