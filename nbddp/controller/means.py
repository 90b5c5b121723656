"""What an executor works with: the link to the ranks, and the threads that act and bring news."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nbddp.controller.actor import Actor
from nbddp.controller.exits import ExitWatcher

if TYPE_CHECKING:
    from nbddp.wire.letters import Letter
    from nbddp.wire.messages import Command, JsonDict


class Link(Protocol):
    """How ranks are told something, and how what they say is collected."""

    @property
    def secret(self) -> bytes:
        """What messages are signed with."""

    @property
    def port(self) -> int:
        """Where the ranks find it, on 127.0.0.1."""

    @property
    def prefix(self) -> str:
        """What the ranks' keys begin with there."""

    def second(self) -> Link:
        """Return a link to other ranks over the same store."""

    @property
    def free_port(self) -> int:
        """A port of this machine where a script's own processes may meet."""

    @property
    def refused(self) -> int:
        """How many messages came that were not ours."""

    def take_secret(self, secret: bytes) -> None:
        """Sign with that of ranks which another notebook has started."""

    def open_attempt(self, attempt: int, world_size: int) -> None:
        """Be ready to send to the ranks of an attempt."""

    def open_again(self, attempt: int, rank: int, incarnation: int) -> None:
        """Be ready to send to a rank's new process."""

    def send(self, rank: int, command: Command) -> None:
        """Hand a command to a rank of this attempt."""

    def collect(self) -> Letter | None:
        """Wait for what a cell says next, in its order; None when the link is closed."""

    def collect_urgent(self) -> Letter | None:
        """Wait for the next news that do not wait for output; None when the link is closed."""

    def put(self, data: bytes) -> JsonDict:
        """Lay a pickled value out for the ranks."""

    def unpack(self, parcel: JsonDict) -> Any:
        """Take a Python value of a rank."""

    def discard(self, parcel: JsonDict) -> None:
        """Forget a value that nobody will collect any more."""

    def close(self) -> None:
        """Wake whoever collects, for the last time."""


@dataclass(frozen=True, slots=True)
class Means:
    """What there is while there are, or may be, processes.

    Attributes:
        link: to and from the ranks.
        actor: the session's thread, which does everything else.
        launching: starts processes, and may have to wait for a helper that still imports.
        watcher: tells when a process has ended.
    """

    link: Link
    actor: Actor
    launching: Actor
    watcher: ExitWatcher


def open_means(make_link: Callable[[], Link] | None = None) -> Means:
    """Return a link, by default one that serves a store on this machine, and the threads."""
    if make_link is None:
        from nbddp.controller.link import StoreLink  # imports torch: not before it is needed

        make_link = StoreLink
    return Means(make_link(), Actor("nbddp-session"), Actor("nbddp-launch"), ExitWatcher())
