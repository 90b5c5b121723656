"""``%ddp heal``: new ranks in the places of those that died."""

from __future__ import annotations

from argparse import Namespace

from nbddp.errors import RequestError
from nbddp.magics.desk import Desk

MAGIC = "%ddp heal"
OF_SCRIPT = (
    "no rank of the cells is gone: the dead ranks ran a script, which gets new ones each time"
)


def heal(desk: Desk, args: Namespace) -> None:
    """Heal, and say what came of it: nothing else keeps that for a page that is loaded again.

    Raises:
        RequestError: it cannot be done.
    """
    if desk.group.scripts.lost and not desk.group.life.gone:
        desk.views.say_outcome(MAGIC, OF_SCRIPT)
        return
    try:
        healed = desk.heal(args.rank or (), donor=args.donor)
    except RequestError as error:
        desk.views.say_outcome(MAGIC, str(error), is_said=False)
        raise
    desk.views.say_outcome(MAGIC, str(healed))
