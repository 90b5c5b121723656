"""Every message that crosses the border, as frozen dataclasses, and their bytes.

Fields hold JSON values only. Commands go down to a rank, reports come up from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from nbddp.errors import WireError
from nbddp.wire.collective import Collective
from nbddp.wire.request_messages import Answer, Request
from nbddp.wire.timing_messages import CollectiveArrivals

JsonDict = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCell:
    """Run this source; ``first_line`` is the notebook line that it begins on.

    ``is_replay``: not because the user asks, but because it was done before a restart;
    ``needs_group``: whether it needs the process group, as ``CellRequest`` has it.
    ``ranks``: which ranks run it.
    ``script``: a :class:`~nbddp.wire.rank_start.Script` as a dict, to run in the source's place.
    ``break_ranks``: whom ``breakpoint()`` stops; the first that comes to one if it is empty.
    ``answers``: what is typed before anybody is asked.
    ``trace``: a :class:`~nbddp.wire.trace_messages.TraceSteps` as a dict; empty: nothing is traced.
    """

    cell: int
    source: str
    first_line: int = 1
    execution_count: int = 1
    wants_value: bool = False
    is_replay: bool = False
    needs_group: bool | None = True
    ranks: list[int] = field(default_factory=list)
    script: JsonDict = field(default_factory=dict)
    break_ranks: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    trace: JsonDict = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Leave the process group; with ``form``, meet again in a new one under a fresh prefix."""

    generation: int
    form: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End the process in good order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Raise KeyboardInterrupt in the cell and free it from any wait; if it is to come, skip it.

    ``rank_died``: whether a rank has died, so that who waits waits for nothing.
    """

    cell: int
    rank_died: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Nobody waits for the answer to this request any more."""

    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The rank has its shell, and its process group; ``cell`` is the newest that it has begun."""

    pid: int
    device: str
    backend: str
    host: str
    cell: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The rank could not get ready."""

    reason: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Bytes ``start`` to ``end`` of the rank's log, decoded.

    ``is_omitted``: too much to mail; there is no text here, and the file has it.
    """

    start: int
    end: int
    text: str
    is_omitted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """Something rich: a MIME bundle, as IPython's display publisher has it."""

    cell: int
    data: JsonDict
    metadata: JsonDict
    display_id: str = ""
    is_update: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """A sign of life: where the main thread is, and what the process uses.

    ``line`` is the innermost line in the cell (0: none runs), or in the script or other cell whose
    ``file`` is named, ``code`` what stands there and ``function`` what it is in there.
    ``collective`` is what it waits in; where torch has no record of it, its name is all there is.
    ``thread`` names the thread that waits if it is not the main thread. ``last`` is the newest
    collective of ``last_cell``, which is the running cell or, between cells, the previous one.
    ``seconds`` is how long it has stayed where it is, 0 if anything of it moves. ``cpu`` is in
    percent of one core, below 0 while it is not known; memory in bytes. ``gpu`` is the UUID of the
    GPU that the cells have touched, empty without one; ``gpu_memory`` is what tensors hold there,
    ``gpu_reserved`` what torch has taken for them. ``steps`` has the last reported step of each
    loop, by the first name that the loop reports.
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
    cpu: float = 0.0
    memory: int = 0
    gpu: str = ""
    gpu_name: str = ""
    gpu_memory: int = 0
    gpu_reserved: int = 0
    asks: str = ""
    steps: JsonDict = field(default_factory=dict)

    def __post_init__(self) -> None:  # JSON has lists
        for name in ("collective", "last"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, Collective(*value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Numbers that a cell reported: rows of ``[time, step, {name: value}]``.

    The step is None where none was given: each name counts by itself. ``missed`` counts rows that
    were left out here for being too many; the file has them.
    """

    rows: list[Any]
    missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The loops that a cell is in, outermost first: ``[label, done, total, seconds]`` of each.

    ``total`` is 0 where it is not known.
    """

    bars: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventReported:
    """Something for the record that a rank did, such as writing a checkpoint."""

    kind: str
    facts: JsonDict = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptAcknowledged:
    """The rank has heard of an interrupt: it cleans up, computes or sends, and will end."""

    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception that ended a cell, or a collective it waited in, on one rank.

    ``line`` is the cell's, or that of the script or other cell that ``file`` names.
    ``because`` is what else belongs to it: the error that it came from, the process it was in.
    ``memory`` tells in a few lines what filled a GPU, where that was the failure.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnded:
    """The rank is through with a cell.

    ``failure`` is a :class:`Failure` as a dict, empty when the cell succeeded; ``is_interrupted``
    tells that it ended because it was asked to. ``sequence`` counts the collectives of the
    default process group; ``in_group`` tells whether there is one and it was not broken open.
    ``groups`` counts the collectives of each other group, by the group's ranks, such as "[0, 2]".
    Its key "new_group" counts the groups that the rank has begun to form.
    ``is_quit`` tells that its debugger was left by ``q``, which ends the cell on all ranks.
    ``facts`` are :class:`~nbddp.checks.facts.RankFacts` of the cell's names, as a dict.
    ``values``: the marks that are ``new`` since the last report, and the paths that are ``gone``;
    ``late``: those of the new ones that an earlier cell may have set; ``is_all`` tells that earlier
    reports do not count.
    ``armed``: the faults that have yet to strike this rank, as ``str()`` writes them.
    """

    cell: int
    seconds: float
    in_group: bool
    sequence: int = 0
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
        """Whether the cell ran to its end."""
        return not self.failure


INPUT = "input()"
GETPASS = "getpass()"
DEBUGGER = "the debugger"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequested:
    """A rank asks whoever sits at the notebook; ``what`` is it that asks, such as ``INPUT``."""

    question: int
    prompt: str
    is_secret: bool = False
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCancelled:
    """What the rank had asked needs no answer any more."""

    question: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReply:
    """The answer to a question of a rank.

    ``is_end`` is the end of file: nobody will answer. ``refusal`` is why nobody can.
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
    | InterruptAcknowledged
    | InputRequested
    | InputCancelled
    | CellEnded
    | Answer
)
URGENT_MESSAGES = (
    Ready,
    StartFailed,
    RankStatus,
    InterruptAcknowledged,
    Answer,
)  # reports that do not wait behind output


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeMessage:
    """In the place of a message that is too large for the store: what ``payloads.put`` returned.

    Made and taken away by the queue's two ends.
    """

    payload: JsonDict


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBatch:
    """What a rank reports at one moment, in its order, in one letter.

    A letter costs its reader two threads that wake up, however short it is.
    """

    messages: list[MessageFromRank]


Message = MessageToRank | MessageFromRank | LargeMessage | MessageBatch

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (*get_args(MessageToRank), *get_args(MessageFromRank), LargeMessage)
}


def encode(message: Message) -> bytes:
    """Turn a message into bytes a store can hold.

    >>> decode(encode(Shutdown()))
    Shutdown()
    """
    return json.dumps(_plain(message)).encode()


def _plain(message: Message) -> list[Any]:
    if isinstance(message, MessageBatch):
        return [MessageBatch.__name__, [_plain(each) for each in message.messages]]
    values = {item.name: getattr(message, item.name) for item in fields(message)}
    return [type(message).__name__, values]


def decode(data: bytes) -> Message:
    """Turn bytes back into the message they were.

    Raises:
        WireError: when they are no message of ours.
    """
    try:
        name, values = json.loads(data)
        if name == MessageBatch.__name__:
            return MessageBatch(messages=[_KINDS[kind](**its) for kind, its in values])
        return _KINDS[name](**values)  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"not a message of nbddp: {error!r}") from None
