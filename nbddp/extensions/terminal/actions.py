"""What a terminal may do with the ranks of a session."""

from __future__ import annotations

from typing import Any

from nbddp.controller.rank_requests import check_ranks
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.lifecycle.refusals import NO_GROUP, way_out


def act(session: Session, request: dict[str, Any]) -> str:
    """Carry out a request; return what was done.

    Raises:
        RequestError: it is refused; nothing has changed.
    """
    match request:
        case {"act": "interrupt"}:
            if not session.life.state.is_interruptible:
                raise RequestError("no cell is running")
            session.interrupt()
            return "the cell is being interrupted; all variables are kept"
        case {"act": "stop"}:
            if not session.life.state.is_live:
                raise RequestError(NO_GROUP)
            session.stop()
            return "all ranks are stopped and their variables are lost"
        case {"act": "kill", "rank": int(rank)}:
            check_ranks(session, [rank])
            session.kill(rank)
            return f"rank {rank} was killed; {way_out(session.life)}"
    raise RequestError("this request is not known")
