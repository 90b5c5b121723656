"""What a rank is asked between cells: to take values, to send one, which names fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch.distributed as dist
from IPython.utils.tokenutil import token_at_cursor

from nbddp.errors import RequestError
from nbddp.wire import parcels
from nbddp.wire.heal_messages import Give, Meet
from nbddp.wire.messages import Answer, Pull, Push, Request
from nbddp.wire.name_messages import Complete, Inspect, Survey
from nbddp.wire.sources import loads_with_sources
from nbddp.wire.trace_messages import GiveTrace, Traced
from nbddp.worker import values
from nbddp.worker.cell.failure import error_text
from nbddp.worker.shorten import MAX_MESSAGE, TOO_LONG, shorten
from nbddp.worker.survey import survey
from nbddp.worker.watch.profiler import GONE

if TYPE_CHECKING:
    from torch.distributed import Store

    from nbddp.worker.healing import Healing
    from nbddp.worker.shell import RankShell

EXPRESSION = "<pulled>"  # the file name of what is pulled, as the interrupter knows it
NO_GROUP = (
    "there is no process group now: what ran last has left none; a cell gets one, unless it says "
    "--no-init: `%%ddp --out NAME` fetches its last value"
)
_TORCHS_WORDS = "process group has not been initialized"
UNWANTED = "nobody waits for this any more"


class Answers:
    """Answers one request after the other, unless nobody waits for the answer any more.

    Args:
        shell: where the names live.
        store: what values travel through.
        key: where in it this rank may put what is called so.
        post: sends an answer.
        answering: within it the answer to this request is made, and may be interrupted; if the
            ranks meet for it, their waits are ended, too.
        healing: does what is asked while the group heals.
    """

    def __init__(
        self,
        shell: RankShell,
        store: Store,
        key: Callable[[str], str],
        post: Callable[[Answer], None],
        answering: Callable[[int, bool], AbstractContextManager[None]],
        healing: Healing,
    ) -> None:
        self._shell = shell
        self._store = store
        self._key = key
        self._post = post
        self._answering = answering
        self._healing = healing
        self._unwanted: frozenset[int] = frozenset()  # replaced as a whole: two threads look at it

    def drop(self, request: int) -> None:
        """Nobody waits for this one any more, which may be under way, or still to come."""
        self._unwanted |= {request}

    def give(self, command: Request) -> None:
        """Do what was asked and say what came of it; an error belongs to the answer."""
        request = command.request
        try:
            with self._answering(request, isinstance(command, Meet)):
                if isinstance(command, Meet) and request in self._unwanted:
                    # the others have given up waiting for it
                    answer = Answer(request=request, error=UNWANTED, payload={"was_left": True})
                else:
                    answer = self._act(command)
        except RequestError as error:
            answer = Answer(request=request, error=str(error))
        except BaseException as error:  # noqa: BLE001 - the user's own code may even exit
            what = f"{type(error).__name__}: {error_text(error)}"
            answer = Answer(request=request, error=shorten(what, TOO_LONG, limit=MAX_MESSAGE))
        self._unwanted = frozenset(each for each in self._unwanted if each > request)
        self._post(answer)

    def _act(self, command: Request) -> Answer:
        match command:
            case Push():
                return self._push(command)
            case Pull():
                return self._pull(command)
            case Complete():
                return self._complete(command)
            case Inspect():
                return self._inspect(command)
            case Survey():
                payload = survey(self._shell.user_ns).json()
                return Answer(request=command.request, payload=payload)
            case GiveTrace():
                return self._give_trace(command)
            case Give() | Meet():
                return self._healing.act(command)

    def _push(self, command: Push) -> Answer:
        data = parcels.take(self._store, command.parcel)
        names, sources = parcels.opened(data, loads_with_sources)
        self._shell.compile.add_sources(sources)
        self._shell.push(names)
        return Answer(
            request=command.request, payload={"values": self._shell.plain_values.changes()}
        )

    def _pull(self, command: Pull) -> Answer:
        def check() -> None:
            if command.request in self._unwanted:
                raise RequestError(UNWANTED)

        check()
        code = compile(command.expression.strip(), EXPRESSION, "eval", dont_inherit=True)
        try:
            value = eval(code, self._shell.user_ns)  # the user's own code
        except ValueError as error:
            if dist.is_initialized() or _TORCHS_WORDS not in str(error):
                raise
            raise RequestError(NO_GROUP) from None
        key, name = self._key(f"request{command.request}"), command.expression
        return Answer(
            request=command.request,
            parcel=values.pack(self._store, key, value, name=name, check=check),
        )

    def _give_trace(self, command: GiveTrace) -> Answer:
        profiler = self._shell.profiler
        if profiler is None or profiler.cell != command.cell:
            return Answer(request=command.request, payload=asdict(Traced(why=GONE)))
        traced, files = profiler.give(command)
        key, parcel = self._key(f"request{command.request}"), {}
        if files:
            parcel = values.pack(self._store, key, files, name="the trace")
        return Answer(request=command.request, payload=asdict(traced), parcel=parcel)

    def _complete(self, command: Complete) -> Answer:
        begin = command.code.rfind("\n", 0, command.cursor) + 1
        line = command.code[begin:].partition("\n")[0]
        text, matches = self._shell.complete(None, line, command.cursor - begin)
        return Answer(
            request=command.request, payload={"text": text, "matches": list(matches)[:200]}
        )

    def _inspect(self, command: Inspect) -> Answer:
        name = token_at_cursor(command.code, command.cursor)
        try:
            found = self._shell.object_inspect_mime(name, detail_level=command.detail)
        except KeyError:  # there is no such name
            found = {}
        text = shorten(found.get("text/plain", ""), TOO_LONG, limit=MAX_MESSAGE)
        return Answer(request=command.request, payload={"text": text})
