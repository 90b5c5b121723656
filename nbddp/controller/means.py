"""What an executor works with: the link to the ranks, and the threads that act and bring news."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbddp.controller.actor import Actor
from nbddp.controller.exits import ExitWatcher

if TYPE_CHECKING:
    from nbddp.controller.link import StoreLink  # imports torch: not before it is needed
    from nbddp.wire.letters import Letter

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that a thread gets to end when all is closed


@dataclass(frozen=True, slots=True)
class Means:
    """What there is while there are, or may be, processes.

    Attributes:
        link: to and from the ranks.
        actor: the session's thread, which does everything else.
        launching: starts processes, and may have to wait for a helper that still imports.
        watcher: tells when a process has ended.
        collectors: bring what cells say, and what does not wait for that.
    """

    link: StoreLink
    actor: Actor
    launching: Actor
    watcher: ExitWatcher
    collectors: list[threading.Thread] = field(default_factory=list)

    def listen(self, read: Callable[[Letter], Any], lose: Callable[[Exception], Any]) -> None:
        """Have the actor read what comes from the ranks, or be told that nothing can be read."""
        for name, collect, tell in (
            ("mail", self.link.collect, self.actor.tell),
            ("news", self.link.collect_urgent, self.actor.tell_first),
        ):

            def read_on(collect: Any = collect, tell: Any = tell) -> None:
                try:
                    while (letter := collect()) is not None:
                        for part in letter.parts:
                            tell(read, part)
                except Exception as error:
                    logger.exception("nbddp cannot read what the ranks say")
                    self.actor.tell_first(lose, error)

            self.collectors.append(
                threading.Thread(target=read_on, name=f"nbddp-{name}", daemon=True)
            )
            self.collectors[-1].start()

    def close(self) -> None:
        """End the threads, those first that bring something to the others."""
        self.launching.close(patience=PATIENCE)
        try:
            self.link.close()
        except Exception:
            logger.exception("nbddp could not close its end of the store")
        for collector in self.collectors:
            collector.join(PATIENCE)
        self.actor.call(lambda: None)  # what was launched late is watched by now
        self.watcher.close()
        self.actor.close()


def open_means(make_link: Callable[[], StoreLink] | None = None) -> Means:
    """Return a link, by default one that serves a store on this machine, and the threads."""
    if make_link is None:
        from nbddp.controller.link import StoreLink

        make_link = StoreLink
    return Means(make_link(), Actor("nbddp-session"), Actor("nbddp-launch"), ExitWatcher())
