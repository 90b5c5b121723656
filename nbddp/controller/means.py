"""What an executor works with: the link to the ranks, and the threads that act and bring news."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.controller.actor import Actor
from nbddp.controller.exits import ExitWatcher

if TYPE_CHECKING:
    from nbddp.controller.link import StoreLink  # imports torch: not before it is needed


@dataclass(frozen=True, slots=True)
class Means:
    """What there is while there are, or may be, processes.

    Attributes:
        link: to and from the ranks.
        actor: the session's thread, which does everything else.
        launching: starts processes, and may have to wait for a helper that still imports.
        watcher: tells when a process has ended.
    """

    link: StoreLink
    actor: Actor
    launching: Actor
    watcher: ExitWatcher


def open_means(make_link: Callable[[], StoreLink] | None = None) -> Means:
    """Return a link, by default one that serves a store on this machine, and the threads."""
    if make_link is None:
        from nbddp.controller.link import StoreLink

        make_link = StoreLink
    return Means(make_link(), Actor("nbddp-session"), Actor("nbddp-launch"), ExitWatcher())
