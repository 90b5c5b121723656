"""A backend of an extension for process groups, which ``--backend`` chooses by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from nbddp.extension.installed import own_backends
from nbddp.topology import Topology


class LastingGroup(Protocol):
    """A ``ProcessGroup`` of an extension's backend, which lives on after an interrupt.

    Attributes:
        started: the number of collectives that this rank has started since it was connected.
        has_failed: whether the ranks may not be at the same collective any more.
        timeout: its timeout.
    """

    @property
    def started(self) -> int: ...
    @property
    def has_failed(self) -> bool: ...
    @property
    def timeout(self) -> timedelta: ...
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the next collectives."""

    def connect(self, store: dist.Store, timeout: timedelta) -> None:
        """Connect to the other ranks again; nothing may remain of earlier collectives."""

    def abort(self) -> None:
        """End all waits with an error, on another thread. The group needs a new connection."""


class Backend(ABC):
    """Made on a rank that starts with this backend, and registered in torch."""

    name: str

    def refusal(self, topology: Topology) -> str:
        """Return why a rank in this place cannot use the backend; "" if it can."""
        del topology
        return ""

    @abstractmethod
    def create_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a new ``ProcessGroup`` that is a :class:`LastingGroup`."""

    @abstractmethod
    def groups(self) -> Iterator[LastingGroup]:
        """Yield all groups that are in use, also those that are not yet connected."""

    @abstractmethod
    def entries(self) -> list[dict[str, Any]]:
        """Return the last collectives, oldest first, with the keys of torch's flight recorder.

        In addition they have the keys of :func:`~nbddp.worker.watch.flight_recorder.read_entries`,
        and "is_synchronizing": whether it ends on no rank before all ranks have started it.
        """


def registered() -> Iterator[Backend]:
    """Yield the backends of extensions that this process has registered in torch."""
    backends: Any = dist.Backend
    for plugin in backends._plugins.values():
        owner = getattr(plugin.creator_fn, "__self__", None)
        if isinstance(owner, Backend):
            yield owner


def lasting(group: Any) -> LastingGroup | None:
    """Return a group as one of an extension's backend; None if it has another backend."""
    found: LastingGroup | None = next(
        (group for each in registered() if any(group is other for other in each.groups())), None
    )
    return found


def refuse_missing(name: str, *, used: str) -> None:
    """Refuse the backend of an extension, if these ranks use another one and do not have it.

    Raises:
        RuntimeError: they do not have it.
    """
    if name in own_backends() and not dist.is_backend_available(name):
        raise RuntimeError(
            f"these ranks started with {used}, and cannot use {name}: start them with "
            f"`--backend {name}`"
        )
