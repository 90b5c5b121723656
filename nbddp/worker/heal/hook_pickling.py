"""Pickle the hooks of tensors, which torch's own pickling omits, and find hooks that stay behind.

Without the user's hooks, such as one that clips gradients, a new rank would train differently from
the others, without an error.
"""

from __future__ import annotations

import pickle
import warnings
from itertools import chain
from typing import Any

import torch
from torch.nn.modules import module
from torch.optim import optimizer

from nbddp.worker.heal.sharded_pickling import reduce_sharded


def reduce_with_hooks(obj: Any) -> Any:
    """Return how to pickle a tensor that has hooks; None for all other objects.

    Its dicts of hooks are pickled as they are, so that the handles of the hooks can remove them.
    """
    if not issubclass(type(obj), torch.Tensor):
        return None
    hooks = obj._backward_hooks, obj._post_accumulate_grad_hooks
    if not any(hooks):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it omits the hooks
        reduced = reduce_sharded(obj) or obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    make, arguments = reduced[:2]  # torch's state of tensors, if any, is in the arguments
    return make, arguments, hooks, None, None, _set_hooks


def _set_hooks(tensor: Any, hooks: Any) -> None:
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


def describe_global_hooks() -> dict[str, str]:
    """Return which of the user's hooks belong to no object, and why they are not carried."""
    # no variable can be called "global": the report looks for the cell that made the first word
    sources = {"global hook of optimizers": optimizer, "global hook of modules": module}
    return {
        name: "it belongs to its process"
        for name, source in sources.items()
        if any(map(_is_of_user, _global_hooks(source)))
    }


def _global_hooks(source: Any) -> Any:
    tables = [each for name, each in vars(source).items() if "global_" in name]
    return chain.from_iterable(each.values() for each in tables if isinstance(each, dict))


def _is_of_user(hook: Any) -> bool:
    package = str(getattr(hook, "__module__", "torch")).partition(".")[0]
    return package not in {"torch", "nbddp"}  # next to hooks, torch stores flags
