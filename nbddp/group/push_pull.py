"""Push values into the namespaces of ranks, and pull values from them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from nbddp.controller.rank_requests import ask_all, resolve_ranks
from nbddp.controller.session import Session
from nbddp.errors import ArgumentError, RequestError
from nbddp.lifecycle.refusals import not_ready
from nbddp.record.push_store import PushRecord, pickle_values
from nbddp.record.replay_log import SET_IN_EACH_RANK
from nbddp.ui.frontend import StreamTarget
from nbddp.wire.request_messages import Pull, Push


def push(session: Session, values: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
    """Send values to ranks, or to all if none are named, and keep them for a replay.

    Raises:
        ArgumentError: a rank does not exist, or a name is refused.
        RequestError: a value cannot be pickled, or the ranks are not idle.
    """
    check_names(values)
    # before pickling, so that the death of a rank from here on is an error
    chosen = resolve_ranks(session, ranks)
    if not session.life.state.is_ready:
        raise RequestError(not_ready(session.life))
    data = pickle_values(values, prompt_numbers())
    _send(session, session.store_push(tuple(values), ranks, data), data, chosen)


def check_names(names: Iterable[Any]) -> None:
    """Refuse names that no variable can have, and names that nbddp sets on each rank.

    Raises:
        ArgumentError: a name is refused.
    """
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ArgumentError(f"cannot push {name!r}: it is not a valid name of a variable")
        if name in SET_IN_EACH_RANK:
            raise ArgumentError(
                f"{name} is set by nbddp in each rank, and a push would overwrite it on all of "
                "them: push it under another name"
            )


def repeat_push(session: Session, pushed: PushRecord) -> None:
    """Send the values of an earlier push again, even if this process has changed them since."""
    _send(session, pushed, pushed.data(), resolve_ranks(session, pushed.ranks))


def _send(session: Session, pushed: PushRecord, data: bytes, ranks: Sequence[int]) -> None:
    link = session.require_link()
    payload = link.store_payload(data)
    try:
        ask_all(session, ranks, Push(payload=payload), what=", ".join(pushed.names))
        session.record_push(pushed)
    finally:
        link.discard_payload(payload)


def pull(session: Session, expression: str, ranks: Sequence[int] | None = None) -> list[Any]:
    """Return the value of an expression on each rank, or on all living ranks if none are named.

    Raises:
        ArgumentError: a rank does not exist.
        RequestError: a rank cannot evaluate the expression or pickle its value.
    """
    link = session.require_link()
    answers = ask_all(session, resolve_ranks(session, ranks), Pull(expression=expression))
    for note in dict.fromkeys(each.payload.get("note", "") for each in answers.values()):
        StreamTarget().write(f"nbddp: {note}\n" if note else "")
    payloads, values = [answer.payload for answer in answers.values()], []
    try:
        while payloads:
            values.append(link.load_payload(payloads.pop(0)))
    finally:
        for payload in payloads:  # after an error, discard the other payloads
            link.discard_payload(payload)
    return values


def prompt_numbers() -> Mapping[str, int]:
    """Return the prompt numbers of cells by their file names in code objects.

    The mapping is empty without IPython, and with IPython 7.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(getattr(shell, "compile", None), "_filename_map", {})
