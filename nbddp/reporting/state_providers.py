"""The kinds of training state, besides models and optimizers, that go back to an earlier step.

Each module registers its own kind when it is imported. So code that moves state needs no names of
modules, and imports none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any


@dataclass(frozen=True, slots=True)
class StateProvider:
    """A kind of state.

    Attributes:
        name: the kind, such as "loaders".
        kind: the class of the objects that have it.
        take: returns the state of an object: numbers, texts and tensors, in dicts and lists.
        restore: sets the state of an object.
    """

    name: str
    kind: type
    take: Callable[[Any], Any] = methodcaller("state_dict")
    restore: Callable[[Any, Any], None] = lambda obj, state: obj.load_state_dict(state)


_providers: dict[str, StateProvider] = {}


def register(provider: StateProvider) -> None:
    """Add a kind of state."""
    _providers[provider.name] = provider


def kinds(name: str = "") -> list[type]:
    """Return the class of one kind, or of all.

    A kind whose module is not imported has no class, and no object.

    >>> kinds("unknown")
    []
    """
    return [each.kind for each in _providers.values() if name in ("", each.name)]


def take(obj: Any) -> Any:
    """Return the state of an object of any kind, also of torch's kinds."""
    return _provider_of(obj).take(obj)


def restore(obj: Any, state: Any) -> None:
    """Set the state of an object."""
    _provider_of(obj).restore(obj, state)


def _provider_of(obj: Any) -> StateProvider:
    found = (each for each in _providers.values() if isinstance(obj, each.kind))
    return next(found, StateProvider("", object))
