"""What goes back to an earlier step with sharded models: schedules, loaders, random state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nbddp import accelerator
from nbddp.reporting import state_providers
from nbddp.reporting.state_providers import StateProvider
from nbddp.worker.heal.spread_state import Objects
from nbddp.worker.process_group.bound_objects import BoundObjects, instances
from nbddp.worker.watch.namespace import paths_of


class RandomState:
    """The random states of this process: of torch, NumPy and Python."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states as numbers and tensors."""
        numpy_state: Any = np.random.get_state(legacy=False)
        key = torch.from_numpy(numpy_state["state"]["key"].astype("int64"))
        module = accelerator.current().module
        return {
            "torch": torch.get_rng_state(),
            "device": module.get_rng_state() if module.is_initialized() else None,
            "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
            "python": random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states."""
        torch.set_rng_state(state["torch"])
        if state["device"] is not None:
            accelerator.current().module.set_rng_state(state["device"])
        inner = state["numpy"]["state"]
        inner = {**inner, "key": inner["key"].numpy().astype("uint32")}
        np.random.set_state({**state["numpy"], "state": inner})
        random.setstate(state["python"])


state_providers.register(StateProvider("random state", RandomState))
_RANDOM = RandomState()


def companions(namespace: Mapping[str, Any]) -> Objects:
    """Return what belongs to the end of an optimizer's step: loaders and random state, by path."""
    found = instances(state_providers.kinds())
    paths = paths_of(found, namespace)
    return {paths[id(each)]: each for each in found if id(each) in paths} | {"random": _RANDOM}


def late_companions(
    objects: Objects, namespace: Mapping[str, Any], bound_objects: BoundObjects
) -> Objects:
    """Return what a loop changes after an optimizer's step, by path.

    Args:
        objects: sharded models and optimizers.
        namespace: the user's variables.
        bound_objects: the schedules and scalers of this process.
    """
    owners = {*map(id, objects.values())}
    found = [each for each in bound_objects.schedules if id(each.optimizer) in owners]
    found += [each for each in bound_objects.scalers if each.is_enabled()]
    paths = paths_of(found, namespace)
    return {paths[id(each)]: each for each in found if id(each) in paths}
