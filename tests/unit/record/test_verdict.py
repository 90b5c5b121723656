"""First cause, not first exit: which rank a failed cell names, and its text."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import CellFailedError, CellInterruptedError
from nbddp.record.verdict import (
    MAX_HEADLINE,
    ProcessExit,
    RankFailure,
    Verdict,
    failure_of,
    find_first_cause,
)
from nbddp.wire.messages import CellEnded, Failure

CLOSED = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:40310"
TRACEBACK = "Traceback ...\nCell In[3], line 9\nValueError: no"
TIMED_OUT = "Timed out waiting 3000ms for recv operation"
STORE = "wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1"
BARRIER = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms"
ABORTED = (
    "terminate called\n  what():  Received data size doesn't match expected size.\n"
    "Fatal Python error: Aborted\nThread 0x7f (most recent call first):\n"
    '  File "/torch/distributed/distributed_c10d.py", line 42 in all_gather\n'
    '  File "/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
    '  File "<cell>", line 3 in meet\n  File "<cell>", line 7 in <module>'
)


def ended(
    name: str = "",
    text: str = "",
    *,
    at: float = 10.0,
    sequence: int = 7,
    groups: dict[str, int] | None = None,
    in_group: bool = True,
    is_interrupted: bool = False,
    **facts: Any,
) -> CellEnded:
    """How a cell ended on a rank: well, unless an error is named."""
    missing = text.split("'")[1] if name == "NameError" else ""
    torch_text = text if name in ("RuntimeError", "DistStoreError", "DistNetworkError") else ""
    found = {"torch_text": torch_text, "missing_name": missing}
    facts = {"traceback": TRACEBACK, "line": 9, **found, **facts}
    failure = Failure(name=name, text=text, at=at, **facts)
    return CellEnded(
        cell=1,
        in_group=in_group,
        sequence=sequence,
        groups=groups or {},
        is_interrupted=is_interrupted,
        failure=asdict(failure) if name else {},
    )


def interrupted(
    collective: str = "all_reduce #7", *, at: float = 12.0, text: str = "", **facts: Any
) -> CellEnded:
    facts = {"sequence": 6, "collective": collective, **facts}
    return ended("KeyboardInterrupt", text, at=at, is_interrupted=True, **facts)


def elsewhere(**facts: Any) -> CellEnded:
    """Interrupted where the rank waited for no other."""
    return interrupted("", **{"at": 13.0, "line": 4, **facts})


def closed(*, at: float = 10.0) -> CellEnded:
    return ended("RuntimeError", CLOSED, at=at, collective="all_reduce #7")


def timed_out(*, at: float = 10.0, collective: str = "all_reduce #7", **facts: Any) -> CellEnded:
    text = f"[/a/b/gloo/transport/tcp/unbound_buffer.cc:78] {TIMED_OUT}"
    return ended("RuntimeError", text, at=at, collective=collective, **facts)


FAILED = ended("ValueError", "no", at=1.0)
FAILED_LATE = ended("ValueError", "no", at=2.0)
Ranks = dict[int, CellEnded | ProcessExit]  # what each rank reported, or how its process ended


def verdict_on(ranks: Ranks, **facts: Any) -> Verdict:
    reports = {rank: each for rank, each in ranks.items() if isinstance(each, CellEnded)}
    endings = {rank: each for rank, each in ranks.items() if isinstance(each, ProcessExit)}
    verdict = find_first_cause(sorted(ranks), reports, endings, **facts)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("ranks", "cause", "summary"),
    [
        ({0: closed(), 1: ProcessExit(-9, 9.0)}, "kill@rank=1,step=5", "1 was killed by SIGKILL"),
        ({0: timed_out(), 1: ProcessExit(-9, 20.0)}, "stop@rank=1", "1 was killed by SIGKILL"),
        ({0: interrupted(), 1: FAILED}, "oom@rank=1,step=5", "1: ValueError: no, line 9,"),
        ({0: timed_out(), 1: ended(sequence=6)}, "skip@rank=1,step=5", "1 did not come to"),
    ],
)
def test_a_fault_that_fired_is_named_with_the_failure_of_its_rank_only(
    ranks: Ranks, cause: str, summary: str
) -> None:
    verdict = verdict_on(ranks, causes={1: cause})
    assert verdict.causes == (1,)
    assert verdict.summary().startswith(f"rank {summary}")
    assert verdict.summary().endswith(f" after the fault {cause}")
    assert "fault" not in "".join(other.headline() for _, other in verdict.others)
    assert "after" not in verdict_on({0: closed(), 1: FAILED}, causes={0: "slow"}).report()
    by_itself = verdict_on({1: ended("FaultError", f"fault: {cause}")}, causes={1: cause})
    assert by_itself.summary().count(cause) == 1


# ---- which rank is the cause

CALL = "all_reduce #2 of group [0, 1]"
IN_GROUP = timed_out(collective=CALL, groups={"[0, 1]": 2})
PEER_FAILED = "rank 0 failed in nbddp.on_main(load): OSError: no"
FULL = "rank 0: the disk is full"
KILLED = ProcessExit(-9, 9.0)
OF_NBDDP: dict[str, Any] = {"torch_text": "", "is_from_nbddp": True}
RELAYED = ended("RuntimeError", PEER_FAILED, at=1.0, **OF_NBDDP)
TOLD = {0: ended("OSError", "no", at=2.0), 1: RELAYED}
SAME_TEXT = {
    0: ended("CheckpointError", FULL, line=8, **OF_NBDDP),
    1: ended("CheckpointError", FULL, at=1.0, **OF_NBDDP),
}
AS_LOST = ended("RuntimeError", "the database: connection refused", at=1.0, torch_text="")
AS_RELAYED = ended("RuntimeError", "rank 0: sent a bad batch", at=1.0, torch_text="")
AS_TIMEOUT = ended("RuntimeError", TIMED_OUT, at=1.0, torch_text="")
WRAPPED = ended("ValueError", "epoch 3", at=1.0, torch_text=CLOSED, because="caused by no peer")
TWO_PLACES = {0: interrupted(), 1: FAILED, 2: interrupted(), 3: interrupted("barrier #8")}
OF_A_FILE_SERVER = ended("RuntimeError", "timeout of the file server")
IN_BARRIER = ended("ValueError", "no", collective="barrier #2")
BLAME: dict[str, Ranks] = {
    "who failed first": {0: ended("E", "b", at=11.0), 1: ended("E", "a")},
    "the lower rank of two": {1: ended("A", "a"), 0: ended("B", "b")},
    "no interrupted rank": {0: interrupted(at=0.5), 1: FAILED},
    "no lost connection": {0: closed(at=1.0), 1: KILLED, 2: closed(at=1.1)},
    "the first of two deaths": {0: KILLED, 1: ProcessExit(-11, 4.0)},
    "the error before a death": {0: FAILED, 1: KILLED},
    "all with the same error": dict.fromkeys(range(4), FAILED),
    "the first, not another text": {0: FAILED, 1: ended("ValueError", "x")},
    "the first, not another type": {0: FAILED, 1: ended("KeyError", "no")},
    "the first, not another line": {0: FAILED, 1: ended("ValueError", "no", line=8)},
    "the first, not another collective": {0: FAILED, 1: IN_BARRIER},
    "who failed, not who waited in two places": TWO_PLACES,
    "deaths of one kind before another": {0: KILLED, 1: KILLED, 2: ProcessExit(3, 9.5)},
    "who told the others in on_main": TOLD,
    "who told the others in a checkpoint": SAME_TEXT,
    "who was elsewhere": {0: timed_out(), 1: elsewhere(), 2: timed_out(at=10.1)},
    "the first timeout where all waited": {0: timed_out(), 1: interrupted("broadcast #7", at=9.0)},
    "the timeout if the other came and went on": {0: timed_out(), 1: elsewhere(sequence=7)},
    "who ended the cell without coming": {0: IN_GROUP, 1: ended(groups={"[0, 1]": 1}), 2: ended()},
    "the timeout if the other came and ended": {0: IN_GROUP, 1: ended(groups={"[0, 1]": 2})},
    "who died and not who was elsewhere": {0: timed_out(), 1: elsewhere(), 2: KILLED},
    "the cell that waited for a key": {0: ended("DistStoreError", STORE), 1: elsewhere()},
    "a timeout of another kind": {0: OF_A_FILE_SERVER, 1: elsewhere()},
    "the user's error with the text of a lost peer": {0: FAILED_LATE, 1: AS_LOST},
    "the user's error with the text of a relayed one": {0: FAILED_LATE, 1: AS_RELAYED},
    "the user's error with the text of a timeout": {0: elsewhere(), 1: AS_TIMEOUT},
    "no lost connection that the user's code raised as another error": {0: FAILED_LATE, 1: WRAPPED},
}


def test_the_verdict_finds_the_ranks_that_failed_first(snapshot: SnapshotAssertion) -> None:
    found = {}
    for name, ranks in BLAME.items():
        verdict = verdict_on(ranks)
        groups = [verdict.causes, *(others for others, _ in verdict.others)]
        found[name] = f"first {verdict.first.rank}: " + ", then ".join(map(str, groups))
        exited = [rank for rank, each in ranks.items() if isinstance(each, ProcessExit)]
        assert verdict.exited_ranks == tuple(exited), name
        assert type(verdict.error()) is CellFailedError, name
    assert found == snapshot
    assert find_first_cause([0, 1], {0: ended(), 1: ended()}, {}) is None
    assert find_first_cause([0, 1], {0: ended(), 1: ended()}, {}, ended_by="stop") is None


LOST = (
    CLOSED,
    "barrier() number 3 over shared memory cannot end: rank 1 of its group has ended",
    "Connection reset by peer",
    "writev [127.0.0.1]:1: Broken pipe",
    "connect [127.0.0.1]:1: Connection refused, remote",
    "NCCL communicator was aborted on rank 1",
    "ncclRemoteError: remote process exited or there was a network error",
    "Socket closed",
    "socket is closed",
    "the connection was shut down",
)


@pytest.mark.parametrize("text", LOST)
def test_a_lost_connection_is_described_as_a_consequence_without_its_text(text: str) -> None:
    lost = ended("RuntimeError", text, at=1.0, collective="all_reduce #1")
    verdict = verdict_on({0: lost, 1: ended("ValueError", "no", at=2.0)})
    assert verdict.first.rank == 1
    assert "all_reduce #1, line 9" in verdict.report()
    assert text not in verdict.report()
    refused = ended(
        "ConnectionRefusedError", "[Errno 111] Connection refused"
    )  # of the user's code
    assert not verdict_on({0: refused, 1: refused}).first.is_consequence


def test_an_error_of_all_ranks_that_differs_only_in_addresses_is_no_consequence() -> None:
    text = "Process group <torch.ProcessGroup object at 0x7f2b96aa8{}f0> is not known. Make it."
    failed = {
        rank: ended("ValueError", text.format(rank), torch_text=CLOSED, collective="_pre_forward")
        for rank in range(2)
    }
    report = verdict_on(failed).report().splitlines()
    shortened = "<torch.ProcessGroup object> is not known. Make it, line 9"
    assert report[0] == f"ranks 0-1: ValueError: Process group {shortened}"
    assert "consequence" not in "".join(report)
    gone = verdict_on({0: ended("ValueError", "See ...")})
    assert gone.summary() == "rank 0: ValueError: See ..., line 9"


def test_only_rank_0_knows_which_rank_did_not_come_to_a_monitored_barrier() -> None:
    text = "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for "
    text += (
        "send/recv from rank 0. Please check rank 0 logs for faulty rank.\nTimed out waiting 6ms"
    )
    waited = ended("RuntimeError", text, at=1.0)
    knows = ended("RuntimeError", "Ranks 2 failed to pass monitoredBarrier in 6000 ms", at=2.0)
    verdict = verdict_on({0: knows, 1: waited})
    assert verdict.first.rank == 0
    assert "rank 1: waited for rank 0" in verdict.report()
    assert "waited for rank 0" in verdict_on({1: waited, 2: waited}).report()


def test_a_timeout_in_different_collectives_names_the_call_of_each_rank() -> None:
    late = timed_out(at=20.0, collective="barrier #7")
    waited = {0: late, 1: timed_out(), 2: interrupted("barrier #7", sequence=7)}
    verdict = verdict_on(waited)
    calls = "ranks 0,2 called barrier #7, rank 1 all_reduce #7"
    assert verdict.summary().startswith(f"{calls}; rank 1: RuntimeError: Timed out")
    assert verdict.report().startswith(verdict.summary())
    assert verdict_on({0: timed_out(), 1: closed()}).summary().startswith("rank 0: RuntimeError")
    assert (
        verdict_on({0: late, 1: ended("ValueError", "no")}).summary()
        == "rank 1: ValueError: no, line 9"
    )


CALLS = {
    "all_reduce #1 of group [0, 1]": ("RuntimeError", TIMED_OUT, {"[0, 1]": 1}, {}),
    "new_group": ("DistStoreError", STORE, {"new_group": 10001}, {"new_group": 10000}),
    "recv(src=1, tag=3)": ("RuntimeError", TIMED_OUT, {}, {}),
    "monitored_barrier of group [0, 1]": ("RuntimeError", BARRIER, {"[0, 1]": 2}, {"[0, 1]": 1}),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_timeout_of_a_collective_or_a_new_group_blames_the_missing_rank(call: str) -> None:
    name, text, waited, before = CALLS[call]
    waiter = ended(name, text, collective=call, groups=waited)
    verdict = verdict_on({0: waiter, 1: elsewhere(sequence=7, groups=before)})
    assert verdict.first.rank == 1
    assert call in verdict.summary()
    assert verdict_on({0: waiter, 2: elsewhere(sequence=7, groups=waited)}).first.rank == 0
    outsider = elsewhere(sequence=7)
    assert (verdict_on({0: waiter, 2: outsider}).first.rank == 0) == (call != "new_group")


JOINING = "Timed out after 4 seconds waiting for clients. 1/2 clients joined."
CONNECTING = "The client socket has timed out after 3000ms while trying to connect to (::1, 1)."


@pytest.mark.parametrize("text", [STORE, JOINING, CONNECTING])
def test_a_timeout_of_init_process_group_blames_the_rank_without_a_group(text: str) -> None:
    name = "DistNetworkError" if text == CONNECTING else "DistStoreError"
    waiter = ended(name, text, collective="init_process_group", sequence=0, in_group=False)
    verdict = verdict_on({0: waiter, 1: elsewhere(sequence=0, in_group=False)})
    assert verdict.first.rank == 1
    assert "init_process_group" in verdict.summary()
    assert verdict_on({0: waiter, 1: elsewhere(sequence=0)}).first.rank == 0


# ---- the user ended the cell or the ranks


ENDED_BY_USER: list[Ranks] = [
    {0: ProcessExit(-15, 9.0), 1: ProcessExit(0, 9.1)},
    {0: interrupted(), 1: ProcessExit(-9, 9.0), 2: closed()},
    {0: ProcessExit(-15, 9.0, "step 7", "out of memory")},
]


@pytest.mark.parametrize("how", ["restart", "stop"])
def test_ranks_that_the_user_ended_do_not_count_as_failed(how: str) -> None:
    for ranks in ENDED_BY_USER:
        verdict = verdict_on(ranks, ended_by=how)
        assert verdict.ended_by == how
        assert type(verdict.error()) is CellInterruptedError
        assert how in verdict.summary()
        for word in ("step 7", "memory", "rank 0", "interrupted"):
            assert word not in verdict.report()


def test_a_rank_that_failed_before_the_user_ended_the_group_is_still_the_cause() -> None:
    stopped = ProcessExit(-15, 9.1)
    failed = verdict_on({0: FAILED, 1: stopped}, ended_by="restart")
    died = verdict_on({0: ProcessExit(-9, 5.0), 1: stopped}, ended_by="restart", ended_at=9.0)
    for verdict in (failed, died):
        assert (verdict.ended_by, verdict.first.rank) == ("", 0)
        assert type(verdict.error()) is CellFailedError
    later = verdict_on({0: ProcessExit(-9, 5.0), 1: stopped}, ended_by="restart", ended_at=4.0)
    assert later.ended_by == "restart"


def test_an_interrupt_raises_cell_interrupted_error_unless_a_rank_was_killed() -> None:
    verdict = verdict_on({0: interrupted()})
    error = verdict.error()
    assert (type(error), error.rank) == (CellInterruptedError, 0)
    assert (str(error), error.report) == (verdict.summary(), verdict.report())
    assert type(verdict_on({0: interrupted(), 1: KILLED}).error()) is CellFailedError


# ---- one rank


def test_a_failure_comes_from_a_report_or_an_exit_and_is_a_cause_or_not() -> None:
    killed = ProcessExit(-9, 4.0)
    assert failure_of(1, ended(), None) is failure_of(1, None, None) is None
    assert failure_of(1, None, killed) == RankFailure(rank=1, at=4.0, process_exit=killed)
    failed = failure_of(1, ended("ValueError", "no", at=3.0), killed)
    assert failed is not None
    assert (failed.rank, failed.at, failed.exitcode) == (1, 3.0, None)
    verdict = verdict_on({0: timed_out(), 1: elsewhere(), 2: timed_out(at=10.1)})
    causes = {rank: verdict.for_rank(rank) for rank in (0, 1, 2, 3)}
    found = {rank: each and not each.is_consequence for rank, each in causes.items()}
    assert found == {0: False, 1: True, 2: False, 3: None}


# ---- the words

ONE_LINE: dict[str, Ranks] = {
    "error": {0: FAILED},
    "error, no line": {0: ended("ValueError", "no", line=0)},
    "error, first line of its text": {0: ended("ValueError", "\nfirst\nsecond")},
    "error, no text": {0: ended("ValueError")},
    "error in a collective": {0: ended("RuntimeError", "no", collective="all_reduce #7")},
    "error on four ranks": dict.fromkeys(range(4), FAILED),
    "interrupted in a collective": {0: interrupted()},
    "interrupted": {0: interrupted("")},
    "interrupted after a step": {0: interrupted("", text="after step 5 of this cell")},
    "interrupted, no line": {0: interrupted("", line=0)},
    "connection lost": {0: closed()},
    "connection lost, raised as another error": {0: WRAPPED},
    "the user's error with the text of a lost peer": {0: AS_LOST},
    "timeout in a collective": {0: timed_out()},
    "SIGKILL": {0: KILLED},
    "SIGKILL on two ranks": {0: KILLED, 1: KILLED},
    "SIGSEGV": {0: ProcessExit(-11, 1.0)},
    "code 3": {0: ProcessExit(3, 1.0)},
    "code 0": {0: ProcessExit(0, 1.0)},
    "no code": {0: ProcessExit(None, 1.0)},
    "absent, no name": {0: timed_out(collective=""), 1: elsewhere(line=0)},
}
IN_FULL: dict[str, Ranks] = {
    "one raises, others wait": {
        0: interrupted(),
        1: ended("ValueError", "no", traceback=f"\n{TRACEBACK}\n\n"),
        2: interrupted(),
    },
    "one is killed, others lose the connection": {
        0: closed(),
        1: ProcessExit(-9, 10.4, "step 6\nstep 7\n", "out of memory"),
        2: closed(at=10.2),
    },
    "one raises, one is killed": {0: FAILED, 1: KILLED},
    "two are aborted": {
        0: closed(),
        1: ProcessExit(-6, 9.0, ABORTED),
        2: ProcessExit(-6, 9.0, ABORTED),
    },
    "all raise": {0: FAILED, 1: FAILED},
    "all are killed": {0: KILLED, 1: KILLED},
    "the user interrupts": {0: interrupted(), 1: elsewhere()},
    "one is elsewhere": BLAME["who was elsewhere"],
    "one has ended the cell": BLAME["who ended the cell without coming"],
    "one tells the others": TOLD,
    "a GPU is full": {
        0: interrupted(),
        1: ended("OutOfMemoryError", "no", memory="  cuda:0 has 15.0 GiB\n    this rank: 14"),
    },
}


def test_the_summaries_and_reports_of_verdicts(snapshot: SnapshotAssertion) -> None:
    lines = {name: verdict_on(ranks).summary() for name, ranks in ONE_LINE.items()}
    assert lines == snapshot(name="in one line")
    lines = {name: verdict_on(ranks).report() for name, ranks in IN_FULL.items()}
    for how in ("restart", "restart with a replay"):
        lines[f"the user's {how}"] = verdict_on({0: KILLED}, ended_by=how).report()
    assert lines == snapshot(name="in full")


def test_a_long_error_is_truncated_in_the_headline_and_complete_in_the_traceback() -> None:
    verdict = verdict_on({0: ended("RuntimeError", "x" * 1000, traceback="x" * 1000)})
    assert f": {'x' * (MAX_HEADLINE - 4)} ..., line 9" in verdict.summary()
    assert "x" * 1000 in verdict.report()


# ---- variables that were lost with earlier ranks


def test_the_report_says_which_variables_are_left_and_how_to_get_others_back(
    snapshot: SnapshotAssertion,
) -> None:
    named = "model", "pushed", "other"
    errors = {f"name '{each}' is not defined": "NameError" for each in named}
    errors["'model'"] = "KeyError"
    reports = {
        f"{kind}: {text}": replace(
            verdict_on(dict.fromkeys(range(2), ended(kind, text))), lost={"model": 3, "pushed": 0}
        )
        for text, kind in errors.items()
    }
    text = "name 'modle' is not defined"
    similar = verdict_on({0: ended("NameError", text, hint="Did you mean `model`?")})
    in_notebook = replace(similar, hint="`modle` is in the notebook.")
    reports |= {"a similar name": similar, "a name of the notebook": in_notebook}
    of_library = ended("NameError", "name 'model' is not defined", missing_name="")
    reports["a name in a library"] = replace(verdict_on({0: of_library}), lost={"model": 3})
    interrupted = verdict_on({0: ended("KeyboardInterrupt", "", is_interrupted=True)})
    reports |= {"interrupt": interrupted, "in a replay": replace(interrupted, is_replay=True)}
    ways_out = {name: each.report().rpartition("\n\n")[2] for name, each in reports.items()}
    assert ways_out == snapshot
