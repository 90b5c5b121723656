"""All messages between the controller and the ranks, and their encoding.

Messages are frozen dataclasses, and their fields hold JSON values only. Messages to a rank are
commands; messages from a rank report what happened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field, fields, is_dataclass
from typing import Any, get_args

from nbddp.errors import WireError
from nbddp.formatting import plural
from nbddp.wire.collective import Collective
from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.cell_spec import CellSpec
from nbddp.wire.rank_start import Script
from nbddp.wire.request_messages import Answer, Request

JsonDict = dict[str, Any]
_JSON_KINDS: Mapping[str, type[Any]] = {"script": Script}


class RunCell(CellSpec):
    """Run a cell, or a script.

    Attributes:
        cell: number of the cell.
        is_again: whether the cell runs again after a restart, instead of at the user's request.
        is_replay: whether it had succeeded, and runs again only for its variables.
        ranks: the ranks that run the cell.
    """

    cell: int
    is_again: bool = False
    is_replay: bool = False
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:  # JSON has lists and dicts
        for item in fields(self):
            value, kind = getattr(self, item.name), _JSON_KINDS.get(item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))
            elif isinstance(value, dict) and kind is not None:
                object.__setattr__(self, item.name, kind(**value))


class Regroup(Frozen):
    """Destroy the process group; with ``form``, form a new one under a new prefix."""

    generation: int
    form: bool = True


class Shutdown(Frozen):
    """Run the exit hooks and end the process."""


class Interrupt(Frozen):
    """Raise KeyboardInterrupt in a cell and end its waits; skip the cell if it has not started.

    Attributes:
        rank_died: whether a rank has died, so that waits for it cannot end by themselves.
        ranks: the ranks of the cell, if they try to stop after the same step.
    """

    cell: int
    rank_died: bool = False
    ranks: list[int] = field(default_factory=list)


class CancelRequest(Frozen):
    """Tell a rank that the answer to a request is no longer needed."""

    request: int


class Ready(Frozen):
    """The rank has its shell and process group.

    Attributes:
        cores: the cores of its machine.
        threads: the threads that torch uses for its operators.
        cell: the last cell that it has started.
    """

    pid: int
    device: str
    backend: str
    host: str
    cores: int
    threads: int
    cell: int = 0


class StartFailed(Frozen):
    """The rank could not start."""

    reason: str
    traceback: str


class Output(Frozen):
    """Bytes ``start`` to ``end`` of the rank's log, decoded.

    ``is_omitted`` tells that there was too much output: ``text`` is empty, and the file has it. If
    ``start`` and ``end`` are equal, the file does not have the text, because the disk is full.
    """

    start: int
    end: int
    text: str
    is_omitted: bool = False


class Display(Frozen):
    """Rich output: a MIME bundle, as IPython's display publisher gets it."""

    data: JsonDict
    metadata: JsonDict
    display_id: str = ""
    is_update: bool = False


class ResourceUsage(Frozen):
    """The resources that a process uses.

    Attributes:
        cpu: percent of one core; negative while it is not known.
        memory: bytes.
        gpu: UUID of the GPU that the cells have used; empty without one.
        gpu_name: name of that GPU.
        gpu_memory: bytes of tensors on it.
        gpu_reserved: bytes that torch has reserved on it.
    """

    cpu: float = 0.0
    memory: int = 0
    gpu: str = ""
    gpu_name: str = ""
    gpu_memory: int = 0
    gpu_reserved: int = 0


class RankStatus(ResourceUsage):
    """Where the main thread is and which resources the process uses, sent once a second.

    Attributes:
        cell: number of the cell.
        line: the innermost line of the cell; 0 if no cell runs.
        function: name of the function that the line has called.
        file: the script or other cell that has this line; empty if it is the running cell.
        code: source text of the line.
        collective: the collective in which the thread waits. If torch has no record of it, only its
            name is set.
        thread: name of the waiting thread; empty for the main thread.
        last: the newest collective of ``last_cell``.
        last_cell: the running cell or, between cells, the previous one.
        seconds: how long nothing has moved in the rank.
        asks: what the rank waits for the user to enter; empty if it does not wait.
        importing: the module that the line imports; empty if it imports none.
        steps: the last reported step of each loop, by the first name that the loop reports.
    """

    cell: int
    line: int
    function: str
    file: str = ""
    code: str = ""
    collective: Collective | None = None
    thread: str = ""
    last: Collective | None = None
    last_cell: int = 0
    seconds: float = 0.0
    asks: str = ""
    importing: str = ""
    steps: JsonDict = field(default_factory=dict)

    def __post_init__(self) -> None:  # JSON has lists
        for name in ("collective", "last"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, Collective(*value))


class Metrics(Frozen):
    """Numbers that a cell has reported: rows of ``[time, step, {name: value}]``.

    The step is None if the cell gave none; then each name has its own count. ``missed`` counts rows
    that were too many to send; ``metrics.jsonl`` has them.
    """

    rows: list[Any]
    missed: int = 0


class Progress(Frozen):
    """The running loops of a cell, outermost first: ``[label, done, total, seconds]`` of each.

    ``total`` is 0 if it is not known.
    """

    bars: list[Any]


class EventReported(Frozen):
    """An entry for the event log, such as a checkpoint that was written."""

    kind: str
    facts: JsonDict = field(default_factory=dict)


class ConfigReported(EventReported):
    """An entry of ``nbddp.config``; a rank may merge it with the one before."""


class InterruptAcknowledged(Frozen):
    """The rank has received an interrupt.

    The cell will end after cleanup, computation or sending.
    """

    cell: int


class StepAwaited(Frozen):
    """An interrupted cell goes on to the end of an optimizer's step, for at most some seconds."""

    cell: int
    seconds: float


class Failure(Frozen):
    """An exception that ended a cell on one rank.

    Attributes:
        name: name of the exception's class.
        text: message of the exception.
        traceback: formatted traceback.
        line: line of the cell, or of the script or other cell that ``file`` names.
        file: empty if the line is the cell's own.
        collective: the collective in which the rank waited.
        at: time of the failure.
        because: more about the cause, such as the original exception or the process that raised it.
        memory: a few lines about what filled a GPU, if that was the failure.
        torch_text: message of the exception, or of one that caused it, if C++ code or
            torch.distributed raised it; see :mod:`nbddp.worker.torch_errors`.
        missing_name: the name that a NameError is about, if a cell or script uses it itself.
        hint: the suggestion of a similar name that is defined.
        is_from_nbddp: whether nbddp raised the exception.
    """

    name: str
    text: str
    traceback: str
    line: int = 0
    file: str = ""
    collective: str = ""
    at: float = 0.0
    because: str = ""
    memory: str = ""
    torch_text: str = ""
    missing_name: str = ""
    hint: str = ""
    is_from_nbddp: bool = False


class CellEnded(Frozen):
    """The rank has finished a cell.

    Attributes:
        cell: number of the cell.
        in_group: whether the rank is in an intact default process group.
        sequence: number of collectives of the default process group.
        steps: number of optimizer steps in the cell.
        groups: number of collectives of each other group, by its ranks, as "[0, 2]". The key
            "new_group" counts the groups that the rank has begun to form.
        is_interrupted: whether the cell ended because of an interrupt.
        is_quit: whether the user left the debugger with ``q``, which ends the cell on all ranks.
        failure: a :class:`Failure` as a dict; empty if the cell succeeded.
        result: MIME bundle of the last value.
        payload: reference to the pickled last value.
        facts: what the halves of extensions tell of the cell, by extension.
        values: changes of values since the last report. ``new`` maps paths such as ``trainer.rank``
            to texts that are equal if the values are; see :mod:`nbddp.wire.value_texts`. ``gone``
            lists deleted paths. ``late`` lists paths in ``new`` that an earlier cell may have set.
            ``is_all``: this report replaces all earlier ones.
        armed: the faults that have not fired yet on this rank, in the form of ``str()``.
    """

    cell: int
    in_group: bool
    sequence: int = 0
    steps: int = 0
    groups: JsonDict = field(default_factory=dict)
    is_interrupted: bool = False
    is_quit: bool = False
    failure: JsonDict = field(default_factory=dict)
    result: JsonDict = field(default_factory=dict)
    payload: JsonDict = field(default_factory=dict)
    facts: JsonDict = field(default_factory=dict)
    values: JsonDict = field(default_factory=dict)
    armed: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether the cell ran without a failure."""
        return not self.failure


INPUT = "input()"
GETPASS = "getpass()"
DEBUGGER = "the debugger"


class InputRequested(Frozen):
    """A rank asks the user for input; ``what`` names the function, such as ``INPUT``."""

    question: int
    prompt: str
    is_secret: bool = False
    what: str = ""


class InputCancelled(Frozen):
    """The rank no longer needs a reply to its input request."""

    question: int


class InputReply(Frozen):
    """The reply to an input request of a rank.

    ``is_end`` is end of file: no input will come. ``refusal`` is why the user cannot be asked.
    """

    question: int
    text: str = ""
    is_end: bool = False
    refusal: str = ""


MessageToRank = RunCell | Regroup | Request | Shutdown | Interrupt | CancelRequest | InputReply
MessageFromRank = (
    Ready
    | StartFailed
    | Output
    | Display
    | RankStatus
    | CollectiveArrivals
    | Metrics
    | Progress
    | EventReported
    | ConfigReported
    | InterruptAcknowledged
    | StepAwaited
    | InputRequested
    | InputCancelled
    | CellEnded
    | Answer
)
# these do not wait behind output
URGENT_MESSAGES = (Ready, StartFailed, RankStatus, InterruptAcknowledged, StepAwaited, Answer)


class LargeMessage(Frozen):
    """A reference to a message that is too large for the store, as returned by ``payloads.put``.

    The queue's writer creates it, and the reader replaces it with the message.
    """

    payload: JsonDict


class MessageBatch(Frozen):
    """Messages that a rank sends at the same moment, in order, in one envelope.

    Each envelope wakes two threads of the reader, however short it is.
    """

    messages: list[MessageFromRank]


Message = MessageToRank | MessageFromRank | LargeMessage | MessageBatch

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (*get_args(MessageToRank), *get_args(MessageFromRank), LargeMessage)
}


def missing_messages(number: int, which: str) -> str:
    """Describe messages that did not arrive.

    >>> missing_messages(2, "of rank 1")[:38]
    '2 messages of rank 1 did not arrive: a'
    """
    return (
        f"{plural(number, 'message')} {which} did not arrive: another process has removed "
        "them from the store, or a connection was lost. Output or values may be missing"
    )


def encode(message: Message) -> bytes:
    """Encode a message as bytes.

    >>> decode(encode(Shutdown()))
    Shutdown()
    """
    return json.dumps(_plain(message), default=_plain_value).encode()


def _plain_value(value: Any) -> Any:
    """Return the fields of a dataclass, or the value of a number of NumPy, such as a seed."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if not hasattr(value, "item"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.item()


def _plain(message: Message) -> list[Any]:
    if isinstance(message, MessageBatch):
        return [MessageBatch.__name__, [_plain(each) for each in message.messages]]
    values = {item.name: getattr(message, item.name) for item in fields(message)}
    return [type(message).__name__, values]


def decode(data: bytes) -> Message:
    """Decode a message.

    Raises:
        WireError: the bytes are not a message of nbddp.
    """
    try:
        name, values = json.loads(data)
        if name == MessageBatch.__name__:
            return MessageBatch(messages=[_KINDS[kind](**its) for kind, its in values])
        return _KINDS[name](**values)  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"not a message of nbddp: {error!r}") from None
