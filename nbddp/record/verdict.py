"""Find the first cause of a failed cell and its consequences, and describe them for the user."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from nbddp.errors import CellFailedError, CellInterruptedError
from nbddp.formatting import (
    BY_USER,
    cut_text,
    describe_exit,
    format_line,
    format_ranks,
    ranks_by_text,
)
from nbddp.wire.messages import CellEnded, Failure

MAX_HEADLINE = 240  # characters of an error's text; the traceback has the full text
_CPP_SOURCE = re.compile(r"\[[^\]\s]+\.\w+:\d+\] ")  # position in torch's C++ code
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")  # differs between ranks in the same error
_PEER_LOST = re.compile(
    r"closed by peer|connection reset|broken pipe|connection refused|remote process exited|"
    r"socket (?:is )?closed|connection was shut ?down|NCCL communicator was aborted|"
    r"over shared memory cannot end: ranks? [\d, ]+ of its group|"
    # with TORCH_DISTRIBUTED_DEBUG=DETAIL; only rank 0 knows which rank did not come
    r"reached monitoredBarrier, but .* from rank (\d+)",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(
    r"timed out waiting [\d.]+ ?m?s (in|for) |collective operation timeout|"
    r"operation timed out!|failed to pass monitoredBarrier in \d+ ms|wait timeout after \d+ ?ms|"
    r"timed out after \d+ ?(ms while trying to connect|seconds waiting for clients)",
    re.IGNORECASE,
)
_GROUP = re.compile(r" of group (\[[\d, ]+\])$")
_PEER = re.compile(r"\b(?:src|dst)=(\d+)")  # of a send or a recv
# nbddp raises these on the ranks to which another rank's failure was relayed
_RELAYED = re.compile(r"rank \d+ failed in nbddp\.|rank \d+: ")

_FRAME = re.compile(r'^  File "(.+?)", line (\d+) in (.+)$', re.MULTILINE)  # of faulthandler
_GLOO_SIZE_ERROR = "Received data size doesn't match expected size"
SIZE_MISMATCH = (
    "the ranks passed tensors of different sizes or dtypes to one collective, and Gloo aborts "
    "the process in that case: pass tensors of the same size and dtype on all ranks"
)
RESTART_WITH_REPLAY = "restart with a replay"  # as the end of a cell
RESTART_AND_REPLAY = (
    "`%ddp restart --replay` restarts all ranks and runs the successful cells again."
)
REPLAY_WAY_OUT = (
    "Every rank keeps the variables that it had when this cell ended, and no later cell was run "
    "again; the next cell works."
)


class ProcessExit(NamedTuple):
    """The exit of a process during a cell.

    ``final_output`` is the end of its output in this cell, ``hint`` the possible reason of the
    exit.
    """

    exitcode: int | None
    at: float
    final_output: str = ""
    hint: str = ""

    @property
    def position(self) -> str:
        """Call and line from faulthandler's stack: " in all_gather, line 3"; empty without one."""
        stack = _FRAME.findall(self.final_output)  # innermost first, up to the cell
        in_cell = [line for file, line, _ in stack if file == stack[-1][0]]
        calls = [name for file, _, name in stack if file.endswith("/distributed_c10d.py")]
        inside = f" in {calls[-1]}" if calls else ""
        return f"{inside}, line {in_cell[0]}" if in_cell else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a cell failed on one rank.

    Attributes:
        cause: the fault that fired on the rank before, or BY_USER if the user killed it.
        missed_collective: the collective in which other ranks waited for this rank until their
            timeout.
        has_waited: whether this rank is one of the ranks that waited.
        is_quit: whether the user left this rank's debugger.
        started_collectives: number of started collectives by group. A key is the list of the
            group's ranks, or "" for the default group.
        in_group: whether the rank is in the default group.
    """

    rank: int
    at: float
    failure: Failure | None = None
    process_exit: ProcessExit | None = None
    cause: str = ""
    is_interrupted: bool = False
    is_quit: bool = False
    in_group: bool = False
    started_collectives: Mapping[str, int] = field(default_factory=dict)
    missed_collective: str = ""
    has_waited: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether the failure must have its cause on another rank."""
        if self.failure is None or self.missed_collective:
            return False
        is_freed = self.is_interrupted or self.has_waited
        return is_freed or self._has_lost_peer or self._is_relayed(self.failure)

    @property
    def _has_lost_peer(self) -> bool:
        return self._find_in_torch_error(_PEER_LOST) is not None

    @property
    def has_timed_out(self) -> bool:
        """Whether the rank waited for other ranks until a timeout."""
        failure = self.failure
        if failure is not None and failure.name == "DistStoreError" and not failure.collective:
            return False  # the user's code waits for a key: the rank that must set it is unknown
        return self._find_in_torch_error(_TIMED_OUT) is not None

    @property
    def did_not_wait(self) -> bool:
        """Whether the rank ended the cell, or was interrupted outside of a collective."""
        if self.failure is None:
            return self.process_exit is None
        return self.is_interrupted and not self.failure.collective

    def is_missing_in(self, call: str, started: Mapping[str, int]) -> bool:
        """Return whether another rank waited in ``call`` for this rank.

        ``started``: the other rank's number of started collectives, by group.
        """
        if peer := _PEER.search(call):
            return self.rank == int(peer[1])
        if call == "init_process_group":
            return not self.in_group
        if ".wait(" in call:
            return False  # the code of a wait for a send or a receive with an unknown peer
        group = _GROUP.search(call)
        key = call if call in started else group[1] if group else ""
        is_member = not key.startswith("[") or self.rank in json.loads(key)
        return is_member and self.started_collectives.get(key, 0) < started.get(key, 0)

    def _find_in_torch_error(self, words: re.Pattern[str]) -> re.Match[str] | None:
        return words.search(self.failure.torch_text) if self.failure is not None else None

    def _is_relayed(self, failure: Failure) -> bool:
        found = _RELAYED.match(failure.text) if failure.is_from_nbddp else None
        prefixes = f"rank {self.rank} ", f"rank {self.rank}:"
        return found is not None and not found.group().startswith(prefixes)

    @property
    def call(self) -> str:
        """The collective that the rank was in; empty without one."""
        called = self.failure.collective if self.failure else ""
        is_private = called.startswith("_") and "#" not in called  # a step of FSDP
        return "" if is_private else called

    @property
    def exitcode(self) -> int | None:
        """Exit code of the rank's process, if it exited."""
        return self.process_exit.exitcode if self.process_exit else None

    def headline(self) -> str:
        """Return what happened, in one line, without the rank."""
        if self.failure is None and not self.missed_collective:
            position = self.process_exit.position if self.process_exit else ""
            return describe_exit(self.exitcode, self.cause) + position
        what = self._describe_failure()
        is_other = self.cause == BY_USER or self._has_lost_peer or self.cause in what
        return what if is_other else f"{what}, after the fault {self.cause}"

    def _describe_failure(self) -> str:
        if self.failure is None:
            return f"did not come to {self.missed_collective}: it had already finished the cell"
        line = format_line(self.failure.line, self.failure.file)
        where = f", {line}" if self.failure.line else ""
        if self.missed_collective:
            return f"did not come to {self.missed_collective}{where.replace(',', ': it was in', 1)}"
        if self.is_quit:
            return f"left the debugger{where}"
        inside = f" in {self.call}" if self.call else ""
        if self.is_interrupted:
            is_interrupt = self.failure.name == KeyboardInterrupt.__name__ and self.failure.text
            how = f" {self.failure.text}" if is_interrupt else ""
            return f"interrupted{how}{inside}{where}"
        lost = self._find_in_torch_error(_PEER_LOST)
        if lost and self.failure.torch_text.startswith(self.failure.text or " "):
            what = f"waited for rank {lost[1]}" if lost[1] else "connection to a peer lost"
            return f"{what}{inside}{where}"
        first_line = self.failure.text.strip().partition("\n")[0]
        text, because = (
            cut_text(_ADDRESS.sub("", _CPP_SOURCE.sub("", line, count=1)), MAX_HEADLINE, " ...")
            for line in (first_line, self.failure.because)
        )
        text = re.sub(r"(?<!\.)\.$", "", text) if because or inside or where else text
        because = f" ({because})" if because else ""
        return f"{self.failure.name}{': ' if text else ''}{text}{because}{inside}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """First cause and consequences of a cell that did not succeed.

    Attributes:
        first: the first cause.
        causes: the ranks with that failure.
        others: all other failures, each with its ranks.
        exited_ranks: the ranks that exited.
        is_interrupt: whether the user interrupted or ended the cell.
        has_survivors: whether other ranks are alive.
        is_heal_refused: whether the ranks that died cannot be healed.
        ended_by: how the user ended the ranks: "restart", "stop" or RESTART_WITH_REPLAY; empty if
            they did not.
        is_script: whether the ranks ran only a script.
        is_replay: whether a replay ran the cell.
        lost: the variables that were lost with earlier ranks; see ReplayLog.
        hint: how to get a missing name from the notebook.
        different_calls: the collective of each rank, if they waited in different ones until a
            timeout.
    """

    first: RankFailure
    causes: tuple[int, ...]
    others: tuple[tuple[tuple[int, ...], RankFailure], ...]
    exited_ranks: tuple[int, ...]
    is_interrupt: bool
    has_survivors: bool = True
    is_heal_refused: bool = False
    ended_by: str = ""
    is_script: bool = False
    is_replay: bool = False
    lost: Mapping[str, int] = field(default_factory=dict)
    hint: str = ""
    different_calls: str = ""

    def for_rank(self, rank: int) -> RankFailure | None:
        """Return the failure of a rank, or an equal one of another rank; None if it succeeded."""
        if rank in self.causes:
            return self.first
        return next((failure for ranks, failure in self.others if rank in ranks), None)

    def facts(self) -> list[dict[str, Any]]:
        """Return the failures with their ranks, for the event log."""
        how = f"ended by the {self.ended_by}" if self.ended_by else ""
        return [
            {
                "ranks": ranks,
                "what": how or failure.headline(),
                "consequence": bool(how) or failure.is_consequence,
            }
            for ranks, failure in ((self.causes, self.first), *self.others)
        ]

    def is_error_of(self, rank: int) -> bool:
        """Return whether the first cause is an error that this rank raised."""
        return self.first.failure is not None and not self.is_interrupt and rank in self.causes

    def error(self) -> CellFailedError:
        """Return the exception for the user."""
        kind = CellInterruptedError if self.is_interrupt else CellFailedError
        return kind(self.summary(), rank=self.first.rank, report=self.report())

    def summary(self) -> str:
        """Return the first cause in one line."""
        if self.ended_by:
            return f"the cell was ended by a {self.ended_by}"
        first = self.first
        is_verb_phrase = first.failure is None or self.is_interrupt or bool(first.missed_collective)
        separator = " " if is_verb_phrase else ": "
        headline = first.headline()
        if len(self.causes) > 1 and headline.startswith("was "):
            headline = "were " + headline.removeprefix("was ")
        calls = f"{self.different_calls}; " if self.different_calls else ""
        return f"{calls}{format_ranks(self.causes)}{separator}{headline}"

    def report(self, *, advises: bool = True) -> str:
        """Return the report: first cause, traceback, consequences, and what to do next."""
        is_chain = self.others and not (self.is_interrupt or self.ended_by or self.different_calls)
        lines = [("first cause: " if is_chain else "") + self.summary()]
        if self.first.failure is not None and not self.is_interrupt:
            traceback = self.first.failure.traceback.strip("\n")
            lines += ["", traceback, ""] if traceback else []
            lines += self.first.failure.memory.splitlines()
        if self.first.process_exit is not None and not self.ended_by:
            lines += _exit_details(self.first.process_exit, format_ranks([self.first.rank]))
        for ranks, other in () if self.ended_by else self.others:
            is_obvious = other.is_interrupted or not other.is_consequence
            suffix = "" if is_obvious else f" (a consequence of {format_ranks(self.causes)})"
            lines.append(f"  {format_ranks(ranks)}: {other.headline()}{suffix}")
        return "\n".join([*lines, self.way_out()] if advises else lines)

    def way_out(self) -> str:
        """Return what the user can do next."""
        if self.is_script:
            return self._way_out_of_script()
        if self.ended_by == RESTART_WITH_REPLAY:
            return (
                "The variables of this cell are lost with the ranks. The replay sets those of "
                "earlier cells again."
            )
        if self.ended_by:
            next_cell = "runs on the" if self.ended_by == "restart" else "starts"
            return f"All variables are lost with the ranks. The next cell {next_cell} new ranks."
        if not self.exited_ranks:
            failure = self.first.failure
            if failure is not None and failure.missing_name in self.lost:
                return self._way_out_without(failure.missing_name)
            keeps = "Every rank keeps its variables; the next cell works."
            way_out = REPLAY_WAY_OUT if self.is_replay else keeps
            hint = self.hint or (failure.hint if failure else "")
            return f"{way_out}\n{hint}" if hint else way_out
        lost = format_ranks(self.exited_ranks)
        if not self.has_survivors:
            return f"{lost.capitalize()} lost all variables. {RESTART_AND_REPLAY}"
        heal = f" `%ddp heal` replaces {lost} and copies the variables."
        return (
            f"{lost.capitalize()} lost all variables, the other ranks keep theirs."
            f"{'' if self.is_heal_refused else heal} {RESTART_AND_REPLAY}"
        )

    def _way_out_without(self, name: str) -> str:
        """Return what to do about a variable that was lost with earlier ranks."""
        number = self.lost[name]
        if not number:
            return f"`{name}` was lost with the earlier ranks: set it again."
        run_again = f"`{name}` was lost with the earlier ranks: run cell [{number}] again."
        return f"{run_again} Next time use `%ddp restart --replay`: it runs such cells by itself."

    def _way_out_of_script(self) -> str:
        """Return what to do after a script: its ranks hold no variables of cells."""
        if self.ended_by or not self.has_survivors:
            return "The ranks of the script are gone. Cells keep their variables."
        if self.exited_ranks:
            return (
                "Cells keep their variables: no `%ddp heal` is needed, `%ddp run` starts new ranks."
            )
        return (
            "Cells keep their variables. `%ddp debug` works until the next cell or script. Until "
            "then, archives that the script left open, such as gzip and zip files, are incomplete."
        )


def find_first_cause(
    ranks: Sequence[int],
    reports: Mapping[int, CellEnded],
    exits: Mapping[int, ProcessExit],
    *,
    causes: Mapping[int, str] = MappingProxyType({}),
    ended_by: str = "",
    ended_at: float = 0.0,
    has_other_ranks: bool = False,
) -> Verdict | None:
    """Find the first cause among the reports and exits of ranks; None if all succeeded.

    ``causes``: the ``cause`` of each failure, by rank, as far as it is known.
    ``ended_by``: the user ended the ranks by a "restart", a "stop" or RESTART_WITH_REPLAY, at
    ``ended_at``. That is the cause, unless a rank failed or died before. ``has_other_ranks``: ranks
    that did not run the cell are alive.

    The first cause is not always the first report: the controller notices the exit of a rank later
    than other ranks notice the closed connection. A rank that waited for a failed rank until an
    interrupt is no cause.
    """
    by_rank = (
        failure_of(rank, reports.get(rank), exits.get(rank), causes.get(rank, "")) for rank in ranks
    )
    failures = [*filter(None, by_rank)]
    if not failures:
        return None
    done = {rank: report for rank, report in reports.items() if report.is_ok and rank not in exits}
    succeeded = [
        replace(_failure_from_report(rank, report), cause=causes.get(rank, ""))
        for rank, report in done.items()
    ]
    failures = _mark_missing_ranks(failures, succeeded)
    failures.sort(key=lambda failure: (failure.is_consequence, failure.at, failure.rank))
    first = failures[0]
    groups = _group_equal(failures)
    follows_user_end = first.is_consequence or (first.failure is None and first.at >= ended_at)
    was_ended_by_user = bool(ended_by) and follows_user_end
    return Verdict(
        first=first,
        causes=groups[0][0],
        others=tuple(groups[1:]),
        exited_ranks=tuple(sorted(exits)),
        is_interrupt=first.is_interrupted or was_ended_by_user,
        has_survivors=has_other_ranks or set(exits) < set(ranks),
        ended_by=ended_by if was_ended_by_user else "",
        different_calls=_describe_calls(failures) if first.has_timed_out else "",
    )


def _describe_calls(failures: Sequence[RankFailure]) -> str:
    """Return which ranks failed in which collective; empty if all failed in the same one."""
    calls = {each.rank: each.call for each in failures if each.call}
    groups = ranks_by_text(dict(sorted(calls.items())))
    texts = [f"{format_ranks(ranks)} {call}" for call, ranks in groups.items()]
    texts[:1] = [f"{format_ranks(ranks)} called {call}" for call, ranks in [*groups.items()][:1]]
    return ", ".join(texts) if len(texts) > 1 else ""


def _mark_missing_ranks(
    failures: list[RankFailure], succeeded: list[RankFailure]
) -> list[RankFailure]:
    """Mark as the cause the ranks that did not reach a collective in which others timed out.

    If a rank died by the user or after a fault, the others waited for it.
    ``succeeded``: the ranks that ended the cell without an error.
    """
    waited = [each for each in failures if each.has_timed_out and not each.is_interrupted]
    calls = {each.failure.collective: each.started_collectives for each in waited if each.failure}
    absent = [
        report
        for report in (*failures, *succeeded)
        if report.did_not_wait and any(report.is_missing_in(*call) for call in calls.items())
    ]
    if any(failure.process_exit and failure.cause for failure in failures):
        return [replace(failure, has_waited=failure in waited) for failure in failures]
    if not absent or any(failure.process_exit for failure in failures):
        return failures
    missed = next(iter(calls)) or "the collective in which the other ranks waited"
    return [
        replace(failure, missed_collective=missed, is_interrupted=False)
        if failure in absent
        else replace(failure, has_waited=failure in waited)
        for failure in (*failures, *(failure for failure in succeeded if failure in absent))
    ]


def _exit_details(process_exit: ProcessExit, rank_name: str) -> list[str]:
    """Return the possible reason of an exit, and the last output of the process."""
    hint = process_exit.hint or (
        SIZE_MISMATCH if _GLOO_SIZE_ERROR in process_exit.final_output else ""
    )
    lines = [f"  {hint}"] if hint else []
    if process_exit.final_output:
        lines += [f"  last output of {rank_name}:"]
        lines += [f"  | {line}" for line in process_exit.final_output.splitlines()]
    return lines


def failure_of(
    rank: int, report: CellEnded | None, process_exit: ProcessExit | None, cause: str = ""
) -> RankFailure | None:
    """Return how a cell failed on one rank, by its report or its process exit; None on success."""
    if report is not None and not report.is_ok:
        return replace(_failure_from_report(rank, report), cause=cause)
    if process_exit is not None:
        return RankFailure(rank=rank, at=process_exit.at, process_exit=process_exit, cause=cause)
    return None


def _failure_from_report(rank: int, report: CellEnded) -> RankFailure:
    failure = None if report.is_ok else Failure(**report.failure)
    return RankFailure(
        rank=rank,
        at=failure.at if failure else 0.0,
        failure=failure,
        is_interrupted=report.is_interrupted,
        is_quit=report.is_quit,
        in_group=report.in_group,
        started_collectives={"": report.sequence, **report.groups},
    )


def _group_equal(failures: Sequence[RankFailure]) -> list[tuple[tuple[int, ...], RankFailure]]:
    """Group the ranks with equal failures, in the order of the first rank of each."""
    groups: dict[tuple[str, int | None], list[RankFailure]] = {}
    for failure in failures:
        groups.setdefault((failure.headline(), failure.exitcode), []).append(failure)
    return [(tuple(sorted(each.rank for each in group)), group[0]) for group in groups.values()]
