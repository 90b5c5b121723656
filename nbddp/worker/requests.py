"""Answer requests between cells: push and pull values, complete code, collect facts."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

import cloudpickle
import torch.distributed as dist
from IPython.utils.tokenutil import token_at_cursor
from torch import nn
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import RequestError
from nbddp.extension.rank_half import EndedCell
from nbddp.wire import payloads, request_messages
from nbddp.wire.function_sources import Pickler, loads_with_sources
from nbddp.wire.messages import JsonDict
from nbddp.wire.request_messages import (
    Answer,
    ExtensionMessage,
    JoinedGroup,
    JoinGroup,
    Pull,
    Push,
    Request,
)
from nbddp.worker.cell.display import MAX_MESSAGE, TOO_LONG, truncate
from nbddp.worker.cell.interrupt import CellInterrupter
from nbddp.worker.cell.shell import RankShell
from nbddp.worker.heal.healing import HealHandler
from nbddp.worker.heal.reported_values import ReportedValues
from nbddp.worker.rank_halves import RankHalves
from nbddp.worker.tracebacks import error_text

PULL_FILENAME = "<pulled>"  # file name of pulled expressions; the interrupter knows it
NO_PROCESS_GROUP = (
    "there is no process group now: the last cell has destroyed it, or ran with --no-init. To "
    "fetch the value of a cell that has a group, use `%%ddp --out NAME`"
)
CANCELLED = "the request was cancelled"


@dataclass(eq=False, repr=False)
class RequestHandler:
    """Answers requests one after the other, but not cancelled ones.

    Args:
        shell: has the namespace.
        store: store for payloads.
        payload_key: returns the store key for a name.
        post: sends an answer.
        interrupter: interrupts a request that is cancelled. If the ranks form a group for it, their
            waits are ended too.
        extensions: the halves of extensions on this rank.
        reported_values: reports the values that a push has changed.
        heal_handler: answers the requests of a heal.
    """

    _shell: RankShell
    _store: Store
    _payload_key: Callable[[str], str]
    _post: Callable[[Answer], None]
    _interrupter: CellInterrupter
    _extensions: RankHalves
    _reported_values: ReportedValues
    _heal_handler: HealHandler
    # two threads use it: only add() and discard()
    _cancelled: set[int] = field(init=False, default_factory=set)

    def cancel(self, request: int) -> None:
        """Cancel a request, which may be running or still in the queue."""
        # On the control thread.
        self._cancelled.add(request)  # first: the request may begin before the interrupt
        self._interrupter.cancel(request)

    def answer(self, command: Request) -> None:
        """Carry out a request and send the answer; an error becomes part of the answer."""
        request = command.request
        try:
            joins_group = isinstance(command, JoinGroup)
            with self._interrupter.interruptible(request, joins_group=joins_group):
                if joins_group and request in self._cancelled:
                    # the other ranks no longer wait for this one
                    content = asdict(JoinedGroup(is_consequence=True))
                    answer = Answer(request=request, error=CANCELLED, content=content)
                else:
                    answer = self._handle(command)
        except RequestError as error:
            answer = Answer(request=request, error=str(error))
        except BaseException as error:  # noqa: BLE001 - the user's code may even call exit()
            what = f"{type(error).__name__}: {error_text(error)}"
            answer = Answer(request=request, error=truncate(what, TOO_LONG, limit=MAX_MESSAGE))
        for number in [*self._cancelled]:
            if number <= request:
                self._cancelled.discard(number)
        self._post(answer)

    def _handle(self, command: Request) -> Answer:
        match command:
            case Push():
                content = self._push(command)
            case request_messages.Complete():
                content = self._complete(command)
            case request_messages.Inspect():
                content = self._inspect(command)
            case request_messages.CollectFacts():
                content = self._extensions.facts(EndedCell(names=self._shell.user_ns))
            case Pull():
                return self._pull(command)
            case ExtensionMessage():
                return self._answer_for_extension(command)
            case request_messages.PickleNamespace():
                content = asdict(self._heal_handler.pickle_namespace(command))
            case JoinGroup():
                return self._heal_handler.join_group(command)
        return Answer(request=command.request, content=content)

    def _push(self, command: Push) -> JsonDict:
        data = payloads.get(self._store, command.payload)
        names, sources = payloads.unpickle(data, loads_with_sources)
        self._shell.compile.add_sources(sources)
        self._shell.push(names)
        return {"values": self._reported_values.changes()}

    def _pull(self, command: Pull) -> Answer:
        def check() -> None:
            if command.request in self._cancelled:
                raise RequestError(CANCELLED)

        check()
        code = compile(command.expression.strip(), PULL_FILENAME, "eval", dont_inherit=True)
        try:
            value = eval(code, self._shell.user_ns)  # runs the user's code
        except ValueError as error:
            if dist.is_initialized() or "group has not been initialized" not in str(error):
                raise
            raise RequestError(NO_PROCESS_GROUP) from None
        payload_key, name = self._payload_key(f"request{command.request}"), command.expression
        payload = store_pickled(self._store, payload_key, value, name=name, check=check)
        return Answer(request=command.request, payload=payload)

    def _answer_for_extension(self, command: ExtensionMessage) -> Answer:
        name, payload = command.extension, JsonDict()
        answer = self._extensions.answer(name, command.content)
        if answer.value is not None:
            key, what = self._payload_key(f"request{command.request}"), f"the answer of {name}"
            payload = store_pickled(self._store, key, answer.value, name=what)
        return Answer(request=command.request, content={name: answer.content}, payload=payload)

    def _complete(self, command: request_messages.Complete) -> JsonDict:
        line_start = command.code.rfind("\n", 0, command.cursor) + 1
        line = command.code[line_start:].partition("\n")[0]
        text, matches = self._shell.complete(None, line, command.cursor - line_start)
        return {"text": text, "matches": list(matches)[:200]}

    def _inspect(self, command: request_messages.Inspect) -> JsonDict:
        name = token_at_cursor(command.code, command.cursor)
        try:
            found = self._shell.object_inspect_mime(name, detail_level=command.detail)
        except KeyError:  # unknown name
            found = {}
        text = truncate(found.get("text/plain", ""), TOO_LONG, limit=MAX_MESSAGE)
        return {"text": text}


class ValuePickler(Pickler):
    """Pickles the module of a DistributedDataParallel model instead of the model.

    torch can pickle the model, but unpickling fails in a process without a process group.
    """

    has_unwrapped = False

    def reducer_override(self, obj: Any) -> Any:
        """Pickle a DDP model as its module, and a cell's class without a random id."""
        if isinstance(obj, DistributedDataParallel):
            self.has_unwrapped = True
            return itemgetter(0), ((obj.module,),)  # every process can import this function
        if isinstance(obj, type) and obj.__module__ == "__main__":
            _track_by_content(obj)
        return super().reducer_override(obj)


def _track_by_content(kind: type) -> None:
    """Derive the id of a cell's class from its content: equal classes get equal ids on all ranks.

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
    """Pickles classes without the ids that cloudpickle adds."""

    def reducer_override(self, obj: Any) -> Any:
        """Pickle a class without the id that cloudpickle adds."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            make, arguments, *more = reduced  # the last two arguments are the id and its extra
            return make, (*arguments[:-2], None, None), *more
        return reduced


def store_pickled(
    store: Store,
    payload_key: str,
    value: Any,
    *,
    name: str,
    check: Callable[[], None] = lambda: None,
) -> JsonDict:
    """Store a pickled value and return the reference that a signed message must hold.

    The reference may have a ``note`` for the user. ``check`` is called before each piece; an error
    that it raises stops the transfer.

    Raises:
        pickle.PicklingError: the value cannot be pickled; the message says why and what to do.
    """
    data, note = dumps(value, name=name)
    payload = payloads.put(store, payload_key, data, check=check)
    return {**payload, "note": note} if note else payload


def dumps(value: Any, *, name: str) -> tuple[bytes, str]:
    """Pickle a value. Return it with a note about omitted parts, which is empty if there are none.

    Raises:
        pickle.PicklingError: the value cannot be pickled; the message says why and what to do.
    """
    written = io.BytesIO()
    pickler = ValuePickler(written, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001 - the value's own code may raise anything
        raise pickle.PicklingError(_describe_unpicklable(name, value, error)) from None
    note = f"{name}: sent without its DistributedDataParallel wrapper, which stays on the ranks"
    return written.getvalue(), note if pickler.has_unwrapped else ""


def _describe_unpicklable(name: str, value: Any, error: Exception) -> str:
    kind = type(value).__name__
    problem = f"{name} is of type {kind} and cannot be sent to the notebook"
    if isinstance(value, nn.Module):
        return (
            f"{problem}; send its parameters: `from torch.distributed.checkpoint.state_dict import "
            f"*`, then `get_model_state_dict({name}, options=StateDictOptions("
            "full_state_dict=True))` on every rank"
        )
    return f"{problem} ({type(error).__name__}: {error_text(error)}); send parts of it instead"
