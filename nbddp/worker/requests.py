"""What a rank is asked between cells: to take values, to send one, which names fit."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import cloudpickle
import torch.distributed as dist
from IPython.utils.tokenutil import token_at_cursor
from torch import nn
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import RequestError
from nbddp.wire import payloads
from nbddp.wire.function_sources import Pickler, loads_with_sources
from nbddp.wire.messages import JsonDict
from nbddp.wire.request_messages import (
    Answer,
    CollectFacts,
    Complete,
    Inspect,
    JoinGroup,
    Pull,
    Push,
    Request,
    SendNamespace,
)
from nbddp.wire.trace_messages import SendTrace, TraceSent
from nbddp.worker.cell.display import MAX_MESSAGE, TOO_LONG, truncate
from nbddp.worker.cell.failure import error_text
from nbddp.worker.cell.shell import RankShell
from nbddp.worker.check_facts import collect_facts
from nbddp.worker.heal.healing import HealHandler
from nbddp.worker.watch.profiler import CELL_GONE

PULL_FILENAME = "<pulled>"  # the file name of what is pulled, as the interrupter knows it
NO_GROUP = (
    "there is no process group now: what ran last has left none; a cell gets one, unless it says "
    "--no-init: `%%ddp --out NAME` fetches its last value"
)
CANCELLED = "nobody waits for this any more"


class RequestHandler:
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
        payload_key: Callable[[str], str],
        post: Callable[[Answer], None],
        interruptible: Callable[[int, bool], AbstractContextManager[None]],
        heal_handler: HealHandler,
    ) -> None:
        self._shell = shell
        self._store = store
        self._payload_key = payload_key
        self._post = post
        self._interruptible = interruptible
        self._heal_handler = heal_handler
        self._cancelled: frozenset[int] = frozenset()  # replaced as a whole: two threads look at it

    def cancel(self, request: int) -> None:
        """Nobody waits for this one any more, which may be under way, or still to come."""
        self._cancelled |= {request}

    def answer(self, command: Request) -> None:
        """Do what was asked and say what came of it; an error belongs to the answer."""
        request = command.request
        try:
            with self._interruptible(request, isinstance(command, JoinGroup)):
                if isinstance(command, JoinGroup) and request in self._cancelled:
                    # the others have given up waiting for it
                    answer = Answer(request=request, error=CANCELLED, content={"was_left": True})
                else:
                    answer = self._handle(command)
        except RequestError as error:
            answer = Answer(request=request, error=str(error))
        except BaseException as error:  # noqa: BLE001 - the user's own code may even exit
            what = f"{type(error).__name__}: {error_text(error)}"
            answer = Answer(request=request, error=truncate(what, TOO_LONG, limit=MAX_MESSAGE))
        self._cancelled = frozenset(each for each in self._cancelled if each > request)
        self._post(answer)

    def _handle(self, command: Request) -> Answer:
        match command:
            case Push():
                content = self._push(command)
            case Complete():
                content = self._complete(command)
            case Inspect():
                content = self._inspect(command)
            case CollectFacts():
                content = collect_facts(self._shell.user_ns).to_json()
            case Pull():
                return self._pull(command)
            case SendTrace():
                return self._send_trace(command)
            case SendNamespace():
                return self._heal_handler.send_namespace(command)
            case JoinGroup():
                return self._heal_handler.join_group(command)
        return Answer(request=command.request, content=content)

    def _push(self, command: Push) -> JsonDict:
        data = payloads.get(self._store, command.payload)
        names, sources = payloads.unpickle(data, loads_with_sources)
        self._shell.compile.add_sources(sources)
        self._shell.push(names)
        return {"values": self._shell.plain_values.changes()}

    def _pull(self, command: Pull) -> Answer:
        def check() -> None:
            if command.request in self._cancelled:
                raise RequestError(CANCELLED)

        check()
        code = compile(command.expression.strip(), PULL_FILENAME, "eval", dont_inherit=True)
        try:
            value = eval(code, self._shell.user_ns)  # the user's own code
        except ValueError as error:
            if dist.is_initialized() or "group has not been initialized" not in str(error):
                raise
            raise RequestError(NO_GROUP) from None
        payload_key, name = self._payload_key(f"request{command.request}"), command.expression
        payload = pack_value(self._store, payload_key, value, name=name, check=check)
        return Answer(request=command.request, payload=payload)

    def _send_trace(self, command: SendTrace) -> Answer:
        profiler = self._shell.profiler
        if profiler is None or profiler.cell != command.cell:
            return Answer(request=command.request, content=asdict(TraceSent(reason=CELL_GONE)))
        traced, files = profiler.export(command)
        payload_key = self._payload_key(f"request{command.request}")
        payload = pack_value(self._store, payload_key, files, name="the trace") if files else {}
        return Answer(request=command.request, content=asdict(traced), payload=payload)

    def _complete(self, command: Complete) -> JsonDict:
        begin = command.code.rfind("\n", 0, command.cursor) + 1
        line = command.code[begin:].partition("\n")[0]
        text, matches = self._shell.complete(None, line, command.cursor - begin)
        return {"text": text, "matches": list(matches)[:200]}

    def _inspect(self, command: Inspect) -> JsonDict:
        name = token_at_cursor(command.code, command.cursor)
        try:
            found = self._shell.object_inspect_mime(name, detail_level=command.detail)
        except KeyError:  # there is no such name
            found = {}
        text = truncate(found.get("text/plain", ""), TOO_LONG, limit=MAX_MESSAGE)
        return {"text": text}


class ValuePickler(Pickler):
    """Pickles a DistributedDataParallel model as the module in it.

    torch pickles the wrapper too, and fails where it is opened: there is no process group.
    """

    has_unwrapped = False

    def reducer_override(self, obj: Any) -> Any:
        """Reduce what cannot be opened in the kernel to what can."""
        if isinstance(obj, DistributedDataParallel):
            self.has_unwrapped = True
            return itemgetter(0), ((obj.module,),)  # a function that any process has
        if isinstance(obj, type) and obj.__module__ == "__main__":
            _track_by_content(obj)
        return super().reducer_override(obj)


def _track_by_content(kind: type) -> None:
    """Give a cell's class an id made from its content: equal classes of all ranks get the same id.

    The kernel then makes one class of them, and equal values of two ranks are equal there.
    cloudpickle's own id is random in each process (``class_tracker_id`` in cloudpickle 3.1).
    """
    module: Any = cloudpickle.cloudpickle
    written = io.BytesIO()
    _ContentPickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(kind)
    tracker = hashlib.sha256(written.getvalue()).hexdigest()
    with module._DYNAMIC_CLASS_TRACKER_LOCK:
        module._DYNAMIC_CLASS_TRACKER_BY_CLASS[kind] = tracker
        module._DYNAMIC_CLASS_TRACKER_BY_ID[tracker] = kind


class _ContentPickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    """Pickles classes without the ids by which cloudpickle tells them apart."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a class to its content, without its id."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            make, arguments, *more = reduced  # the arguments end with the id and one more
            return make, (*arguments[:-2], None, None), *more
        return reduced


def pack_value(
    store: Store,
    payload_key: str,
    value: Any,
    *,
    name: str,
    check: Callable[[], None] = lambda: None,
) -> JsonDict:
    """Put a value into the store and return what a signed message must say about it.

    Its ``note``, if it has one, is for the user to read. ``check`` is called before each piece is
    stored; an error that it raises ends this.

    Raises:
        pickle.PicklingError: the value cannot be pickled; the text says why, and the way out.
    """
    data, note = dumps(value, name=name)
    payload = payloads.put(store, payload_key, data, check=check)
    return {**payload, "note": note} if note else payload


def dumps(value: Any, *, name: str) -> tuple[bytes, str]:
    """Pickle a value, and say what was left out of it, if anything was.

    Raises:
        pickle.PicklingError: the value cannot be pickled; the text says why, and the way out.
    """
    written = io.BytesIO()
    pickler = ValuePickler(written, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001 - whatever a value's own pickling raises
        raise pickle.PicklingError(_describe_unpicklable(name, value, error)) from None
    note = f"{name}: without its DistributedDataParallel, which stays with the ranks"
    return written.getvalue(), note if pickler.has_unwrapped else ""


def _describe_unpicklable(name: str, value: Any, error: Exception) -> str:
    kind = type(value).__name__
    begin = f"{name} is of type {kind} and cannot be sent to the notebook"
    if isinstance(value, nn.Module):
        return (
            f"{begin}; take its parameters: `from torch.distributed.checkpoint.state_dict import "
            f"*`, then `get_model_state_dict({name}, options=StateDictOptions("
            "full_state_dict=True))` on every rank"
        )
    return f"{begin} ({type(error).__name__}: {error_text(error)}); take parts of it that can"
