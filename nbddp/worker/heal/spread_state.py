"""The state of sharded models on one rank: find it, pack it into bytes, and set it from bytes.

Each rank has other shards. So a heal packs the state of a rank that has the same shards as the dead
rank, or a copy of the dead rank's own state. The bytes hold only JSON and numbers, because nothing
that comes over a process group is unpickled.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from nbddp.sharding import has_dtensors
from nbddp.worker.process_group import object_state
from nbddp.worker.process_group.bound_objects import BoundObjects
from nbddp.worker.process_group.unfinished_steps import fsdp_groups_of
from nbddp.worker.watch.namespace import paths_of, walk

_FSDP_STATE = "_get_fsdp_state"  # of an FSDP2 module
_LENGTH = struct.Struct("<q")
Objects = dict[str, Any]  # by path
Parts = list[list[Any]]  # of each DTensor, the part that each rank has


def spread_objects(namespace: Mapping[str, Any], bound_objects: BoundObjects) -> Objects:
    """Return the sharded models and their optimizers that a variable leads to, by path."""
    found: Objects = {}
    inner: set[int] = set()
    for path, _, _, value in walk(namespace):
        if issubclass(type(value), nn.Module) and id(value) not in inner and _is_spread(value):
            inner.update(map(id, value.modules()))
            found[path] = value
    optimizers = [*filter(has_dtensors, bound_objects.optimizers)]
    paths = paths_of(optimizers, namespace)
    found |= {paths[id(each)]: each for each in optimizers if id(each) in paths}
    return found


def _is_spread(module: nn.Module) -> bool:
    if "_modules" not in vars(module):  # its __init__ has not finished
        return False
    return has_dtensors(module) or any(hasattr(each, _FSDP_STATE) for each in module.modules())


def dtensors_in(objects: Objects) -> Iterator[Any]:
    """Yield the DTensors of sharded models and optimizers."""
    for state in map(_state_of, objects.values()):
        yield from object_state.tensors_in(state, _is_dtensor)


def parts_of(objects: Objects, rank: int) -> Parts:
    """Return which part of each sharded tensor a rank has; ranks with equal parts are replicas."""
    parts: Parts = []
    for tensor in dtensors_in(objects):
        placed = zip(_coordinate(tensor.device_mesh, rank), tensor.placements, strict=False)
        parts.append([at for at, placement in placed if not placement.is_replicate()])
    return parts


def _coordinate(mesh: Any, rank: int) -> list[int]:
    """Return the coordinate of a rank on a mesh, or on its slice of the same mesh."""
    root = root_mesh(mesh)
    names, of_root = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    is_slice = mesh is not root and {*names} <= {*of_root}
    whole = (root if is_slice else mesh).mesh
    [coordinate] = (whole == rank).nonzero().tolist() or [[-1]]
    return [coordinate[of_root.index(name)] for name in names] if is_slice else coordinate


def root_mesh(mesh: Any) -> Any:
    """Return the mesh of which a mesh is a slice; the mesh itself if it is none."""
    if hasattr(mesh, "_get_root_mesh"):  # not in torch 2.9
        return mesh._get_root_mesh()
    return sys.modules["torch.distributed.device_mesh"]._mesh_resources.get_root_mesh(mesh)


def pack(objects: Objects, *before: torch.Tensor) -> torch.Tensor:
    """Return the states of objects as bytes: a length, a description as JSON, and all tensors.

    ``before``: states that were packed earlier, and come first.
    """
    states = {path: _localize(_state_of(each)) for path, each in objects.items()}
    text = json.dumps(object_state.describe(states)).encode()
    head = torch.frombuffer(bytearray(_LENGTH.pack(len(text)) + text), dtype=torch.uint8)
    tensors = object_state.tensors_in(states)
    parts = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors]
    return torch.cat([*before, head, *(part.cpu() for part in parts)])


def unpack(objects: Objects, packed: torch.Tensor) -> None:
    """Set the states of objects to packed ones.

    Raises:
        KeyError: there is no such object.
    """
    position = 0

    def take(count: int) -> torch.Tensor:
        nonlocal position
        position += count
        return packed[position - count : position]

    def fill_tensor(description: list[Any], held: Any) -> torch.Tensor:
        dtype, sizes = getattr(torch, description[1]), description[2]
        part = take(torch.Size(sizes).numel() * dtype.itemsize).clone()  # is aligned
        value = part.view(dtype).view(sizes)
        local: Any = _localize(held)
        if not isinstance(local, torch.Tensor) or [*local.shape] != sizes or local.dtype != dtype:
            return value
        local.copy_(value)
        return cast("torch.Tensor", held)

    with torch.no_grad():
        while position < packed.numel():
            [length] = _LENGTH.unpack(take(_LENGTH.size).numpy().tobytes())
            for path, described in json.loads(take(length).numpy().tobytes())[1]:
                state = object_state.fill(described, _state_of(objects[path]), fill_tensor)
                if not isinstance(objects[path], nn.Module):
                    object_state.load_state(objects[path], state)


def _state_of(obj: Any) -> Any:
    if isinstance(obj, nn.Module):
        return {"parameters": _shards_of(obj), "buffers": [*obj.buffers()]}
    return object_state.state_of(obj)


def _shards_of(module: nn.Module) -> list[Any]:
    """Return the parameters of a model, also while FSDP2 has replaced its shards by whole ones.

    FSDP2 shards the root again in its backward pass. So a generator, for example, is still whole
    when the discriminator's optimizer steps.
    """
    parts: Iterator[Any] = module.modules()
    states = [each._get_fsdp_state() for each in parts if hasattr(each, _FSDP_STATE)]
    shards = {
        id(getattr(part, "_unsharded_param", part)): part.sharded_param
        for state in states
        for group in fsdp_groups_of(state)
        for part in group.fsdp_params
    }
    return [shards.get(id(each), each) for each in module.parameters()]


def _localize(value: Any) -> Any:
    """Replace each DTensor by this rank's part of it."""
    if type(value) is dict:
        return {key: _localize(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_localize, value))
    return value.to_local() if _is_dtensor(value) else value


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")
