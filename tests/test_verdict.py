"""First cause, not first exit: what a failed cell says, word for word."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from nbddp.errors import CellFailedError, CellInterruptedError
from nbddp.record.verdict import MISFIT, Ending, Trouble, Verdict, judge, trouble_of
from nbddp.wire.messages import CellEnded, Failure

CLOSED = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:40310"
TRACEBACK = "Traceback ...\nCell In[3], line 9\nValueError: no"


def report(
    name: str = "",
    text: str = "",
    *,
    at: float = 10.0,
    line: int = 9,
    collective: str = "",
    is_interrupted: bool = False,
    sequence: int = 7,
    traceback: str = TRACEBACK,
    lasts: bool = False,
    groups: dict[str, int] | None = None,
    in_group: bool = True,
) -> CellEnded:
    """How a cell ended on a rank: well, unless an error is named."""
    failure = Failure(
        name=name,
        text=text,
        traceback=traceback,
        line=line,
        collective=collective,
        at=at,
        lasts=lasts,
    )
    return CellEnded(
        cell=1,
        seconds=0.1,
        in_group=in_group,
        sequence=sequence,
        groups=groups or {},
        is_interrupted=is_interrupted,
        failure=asdict(failure) if name else {},
    )


def interrupted(
    collective: str = "all_reduce #7",
    *,
    at: float = 12.0,
    line: int = 9,
    sequence: int = 6,
    **place: Any,
) -> CellEnded:
    return report(
        "KeyboardInterrupt",
        at=at,
        line=line,
        collective=collective,
        is_interrupted=True,
        sequence=sequence,
        **place,
    )


def closed(*, at: float = 10.0) -> CellEnded:
    return report("RuntimeError", CLOSED, at=at, collective="all_reduce #7")


Exits = dict[int, tuple[int | None, float]]  # exit codes, and when


def verdict_on(
    reports: dict[int, CellEnded], exits: Exits | None = None, *, ended_by: str = ""
) -> Verdict:
    endings = {rank: Ending(*exit_) for rank, exit_ in (exits or {}).items()}
    verdict = judge(sorted({*reports, *endings}), reports, endings, ended_by=ended_by)
    assert verdict is not None
    return verdict


# ---- who is to blame


def test_there_is_nothing_to_judge_when_all_went_well() -> None:
    assert judge([0, 1], {0: report(), 1: report()}, {}) is None


def test_the_rank_that_failed_first_is_the_cause() -> None:
    verdict = verdict_on({0: report("KeyError", "'b'", at=11.0), 1: report("E", "a", at=10.0)})
    assert verdict.first.rank == 1
    assert verdict.causes == (1,)
    assert [ranks for ranks, _ in verdict.others] == [(0,)]


def test_at_the_same_moment_the_lower_rank_is_named() -> None:
    assert verdict_on({1: report("A", "a"), 0: report("B", "b")}).first.rank == 0


def test_an_interrupted_rank_is_never_the_cause_while_another_failed() -> None:
    verdict = verdict_on({0: interrupted(at=1.0), 1: report("ValueError", "no", at=9.0)})
    assert verdict.first.rank == 1
    assert not verdict.is_interrupt


def test_a_closed_connection_is_never_the_cause_while_a_rank_died_later() -> None:
    verdict = verdict_on({0: closed(at=1.0), 2: closed(at=1.1)}, {1: (-9, 9.0)})
    assert verdict.first.rank == 1
    assert verdict.causes == (1,)
    assert verdict.lost == (1,)


@pytest.mark.parametrize(
    "text",
    [
        CLOSED,
        "Connection reset by peer",
        "writev [127.0.0.1]:1: Broken pipe",
        "connect [127.0.0.1]:1: Connection refused, remote",
        "NCCL communicator was aborted on rank 1",
        "ncclRemoteError: remote process exited or there was a network error",
        "Socket closed",
        "socket is closed",
        "the connection was shut down",
    ],
)
def test_a_peers_lost_connection_is_known_by_its_words(text: str) -> None:
    lost = report("RuntimeError", text, at=1.0, collective="all_reduce #1")
    verdict = verdict_on({0: lost, 1: report("ValueError", "no", at=2.0)})
    assert verdict.first.rank == 1
    assert "connection to a peer lost in all_reduce #1, line 9 (a consequence)" in (
        verdict.report()
    )


def test_an_error_of_the_users_own_network_code_keeps_its_name() -> None:
    own = report("ConnectionRefusedError", "[Errno 111] Connection refused")
    verdict = verdict_on({0: own, 1: own})
    assert verdict.summary() == (
        "ranks 0-1: ConnectionRefusedError: [Errno 111] Connection refused, line 9"
    )


def test_of_two_ranks_that_died_the_first_one_is_the_cause() -> None:
    verdict = verdict_on({}, {0: (-9, 5.0), 1: (-11, 4.0)})
    assert verdict.first.rank == 1
    assert verdict.lost == (0, 1)


def test_a_rank_killed_for_being_deaf_is_not_the_cause_of_its_peers_error() -> None:
    verdict = verdict_on({0: report("ValueError", "no", at=1.0)}, {1: (-9, 7.0)})
    assert verdict.first.rank == 0
    assert "  rank 1: was killed by SIGKILL" in verdict.report().split("\n")


# ---- what is one piece of news


def test_the_same_error_on_several_ranks_is_told_once() -> None:
    one = report("ValueError", "no", at=10.0)
    verdict = verdict_on(dict.fromkeys(range(4), one))
    assert verdict.causes == (0, 1, 2, 3)
    assert verdict.others == ()
    assert verdict.summary() == "ranks 0-3: ValueError: no, line 9"


@pytest.mark.parametrize(
    "other",
    [
        report("ValueError", "other", at=11.0),
        report("KeyError", "no", at=11.0),
        report("ValueError", "no", at=11.0, line=8),
        report("ValueError", "no", at=11.0, collective="barrier #2"),
    ],
)
def test_another_error_is_told_apart(other: CellEnded) -> None:
    verdict = verdict_on({0: report("ValueError", "no"), 1: other})
    assert verdict.causes == (0,)
    assert [ranks for ranks, _ in verdict.others] == [(1,)]


def test_ranks_that_waited_at_the_same_place_are_told_together() -> None:
    verdict = verdict_on(
        {0: interrupted(), 1: report("E", "x"), 2: interrupted(), 3: interrupted("barrier #8")}
    )
    assert [ranks for ranks, _ in verdict.others] == [(0, 2), (3,)]


def test_deaths_of_different_kinds_are_told_apart() -> None:
    verdict = verdict_on({}, {0: (-9, 1.0), 1: (-9, 1.0), 2: (3, 2.0)})
    assert verdict.causes == (0, 1)
    assert verdict.summary() == "ranks 0-1 was killed by SIGKILL" or (
        verdict.summary() == "ranks 0-1 were killed by SIGKILL"
    )
    assert [ranks for ranks, _ in verdict.others] == [(2,)]


# ---- one line


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (report("ValueError", "no"), "rank 0: ValueError: no, line 9"),
        (report("ValueError", "no", line=0), "rank 0: ValueError: no"),
        (report("ValueError", "\nfirst\nsecond"), "rank 0: ValueError: first, line 9"),
        (report("ValueError", ""), "rank 0: ValueError, line 9"),
        (
            report("RuntimeError", "timed out", collective="all_reduce #7"),
            "rank 0: RuntimeError: timed out in all_reduce #7, line 9",
        ),
        (interrupted(), "rank 0 interrupted in all_reduce #7, line 9"),
        (interrupted(""), "rank 0 interrupted, line 9"),
        (interrupted("", line=0), "rank 0 interrupted"),
        (closed(), "rank 0: connection to a peer lost in all_reduce #7, line 9"),
    ],
)
def test_a_failure_in_one_line(ended: CellEnded, words: str) -> None:
    assert verdict_on({0: ended}).summary() == words


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (-9, "rank 0 was killed by SIGKILL"),
        (-11, "rank 0 was killed by SIGSEGV"),
        (3, "rank 0 exited with code 3"),
        (0, "rank 0 exited with code 0"),
        (None, "rank 0 disappeared"),
    ],
)
def test_a_death_in_one_line(exitcode: int | None, words: str) -> None:
    assert verdict_on({}, {0: (exitcode, 1.0)}).summary() == words


# ---- the whole report, for the cases that users meet


def test_one_rank_raises_and_the_others_wait_in_a_collective() -> None:
    verdict = verdict_on(
        {
            0: interrupted(),
            1: report("ValueError", "no", traceback=f"\n{TRACEBACK}\n\n"),
            2: interrupted(),
        }
    )
    assert verdict.report() == (
        "first cause: rank 1: ValueError: no, line 9\n"
        "\n"
        "Traceback ...\n"
        "Cell In[3], line 9\n"
        "ValueError: no\n"
        "\n"
        "  ranks 0,2: interrupted in all_reduce #7, line 9\n"
        "Every rank keeps its names; the next cell works."
    )


def test_a_rank_is_killed_and_its_peers_lose_the_connection() -> None:
    verdict = verdict_on({0: closed(), 2: closed(at=10.2)}, {1: (-9, 10.4)})
    assert verdict.report() == (
        "first cause: rank 1 was killed by SIGKILL\n"
        "  ranks 0,2: connection to a peer lost in all_reduce #7, line 9 (a consequence)\n"
        "Rank 1 lost all names, the other ranks keep theirs. `%ddp heal` replaces rank 1 and "
        "copies the names, `%ddp restart` restarts all ranks."
    )


def test_all_ranks_raise_the_same() -> None:
    verdict = verdict_on({rank: report("ValueError", "no") for rank in range(2)})
    assert verdict.report() == (
        "ranks 0-1: ValueError: no, line 9\n"
        "\n"
        "Traceback ...\n"
        "Cell In[3], line 9\n"
        "ValueError: no\n"
        "\n"
        "Every rank keeps its names; the next cell works."
    )


def test_the_user_interrupts() -> None:
    verdict = verdict_on({0: interrupted(), 1: interrupted("", line=4, at=12.5)})
    assert verdict.report() == (
        "rank 0 interrupted in all_reduce #7, line 9\n"
        "  rank 1: interrupted, line 4\n"
        "Every rank keeps its names; the next cell works."
    )


def test_when_every_rank_is_lost_none_is_said_to_keep_its_names() -> None:
    said = verdict_on({}, {0: (-9, 1.0), 1: (-9, 1.0)}).report()
    assert "the other ranks keep theirs" not in said
    assert said.endswith("`%ddp restart` restarts all ranks.")


def test_a_rank_that_died_says_why_that_may_be_and_what_it_wrote_last() -> None:
    death = Ending(-9, 10.4, "step 6\nstep 7\n", "probably out of memory")
    verdict = judge([0, 1], {0: closed()}, {1: death})
    assert verdict is not None
    assert verdict.report().split("\n")[:6] == [
        "first cause: rank 1 was killed by SIGKILL",
        "  probably out of memory",
        "  last output of rank 1:",
        "  | step 6",
        "  | step 7",
        "  rank 0: connection to a peer lost in all_reduce #7, line 9 (a consequence)",
    ]


STACK = (
    "terminate called\n  what():  Received data size doesn't match expected size.\n"
    "Fatal Python error: Aborted\nThread 0x7f (most recent call first):\n"
    '  File "/torch/distributed/distributed_c10d.py", line 42 in all_gather\n'
    '  File "/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
    '  File "<cell>", line 3 in meet\n  File "<cell>", line 7 in <module>'
)


def test_ranks_that_were_aborted_say_in_which_call_and_whose_last_words_are_told() -> None:
    death = Ending(-6, 10.4, STACK)
    verdict = judge([0, 1, 2], {0: closed()}, {1: death, 2: death})
    assert verdict is not None
    assert verdict.report().split("\n")[:3] == [
        "first cause: ranks 1-2 were killed by SIGABRT in all_gather, line 3",
        f"  {MISFIT}",
        "  last output of rank 1:",
    ]


def test_a_rank_that_the_user_ended_is_not_asked_for_its_last_words() -> None:
    death = Ending(-15, 10.4, "step 7", "probably out of memory")
    verdict = judge([0], {}, {0: death}, ended_by="stop")
    assert verdict is not None
    assert "step 7" not in verdict.report()
    assert "memory" not in verdict.report()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RuntimeError", "rank 0 failed in nbddp.on_main(load): OSError: no"),
        ("CheckpointError", "rank 0: the disk is full"),
    ],
)
def test_what_the_kit_tells_the_other_ranks_is_a_consequence(name: str, text: str) -> None:
    told, own = report(name, text, at=1.0), report("OSError", "no", at=2.0)
    verdict = judge([0, 1], {0: own, 1: told}, {})
    assert verdict is not None
    assert verdict.summary() == "rank 0: OSError: no, line 9"
    assert f"  rank 1: {name}: {text}, line 9 (a consequence)" in verdict.report().splitlines()
    alone = judge([0, 1], {0: report(name, text, at=1.0), 1: report()}, {})
    assert alone is not None
    assert alone.summary() == f"rank 0: {name}: {text}, line 9"


# ---- the user ended the ranks

GONE = "All names are gone with the ranks; the next cell finds, or starts, new ones."


@pytest.mark.parametrize("how", ["restart", "stop"])
def test_ranks_that_the_user_ended_did_not_fail(how: str) -> None:
    verdict = verdict_on({}, {0: (-15, 9.0), 1: (0, 9.1)}, ended_by=how)
    assert verdict.ended_by == how
    assert verdict.summary() == f"the cell was ended by a {how}"
    assert verdict.report() == f"the cell was ended by a {how}\n{GONE}"
    assert type(verdict.error()) is CellInterruptedError


def test_what_ranks_said_while_the_user_ended_them_is_a_consequence() -> None:
    reports = {0: interrupted(), 2: closed()}
    verdict = verdict_on(reports, {1: (-9, 9.0)}, ended_by="restart")
    assert verdict.report() == f"the cell was ended by a restart\n{GONE}"
    assert str(verdict.error()) == "the cell was ended by a restart"


def test_a_rank_that_had_failed_before_is_the_cause_all_the_same() -> None:
    reports = {0: report("ValueError", "no", at=1.0)}
    verdict = verdict_on(reports, {1: (-15, 9.0)}, ended_by="restart")
    assert verdict.ended_by == ""
    assert verdict.summary() == "rank 0: ValueError: no, line 9"
    assert verdict.report().startswith("first cause: rank 0: ValueError: no, line 9\n")
    assert type(verdict.error()) is CellFailedError


def test_a_cell_that_was_through_before_the_user_ended_the_ranks_went_well() -> None:
    assert judge([0, 1], {0: report(), 1: report()}, {}, ended_by="stop") is None


def test_a_rank_that_had_died_before_is_the_cause_too() -> None:
    death, terminated = Ending(-9, 5.0, "", "probably out of memory"), Ending(-15, 9.1)
    verdict = judge([0, 1], {}, {0: terminated, 1: death}, ended_by="restart", ended_at=9.0)
    assert verdict is not None
    assert verdict.summary() == "rank 1 was killed by SIGKILL"
    assert "probably out of memory" in verdict.report()
    later = judge([0, 1], {}, {0: terminated, 1: death}, ended_by="restart", ended_at=4.0)
    assert later is not None
    assert later.summary() == "the cell was ended by a restart"


# ---- one rank


def test_a_rank_that_is_through_or_not_yet_has_no_trouble() -> None:
    assert trouble_of(1, report(), None) is None
    assert trouble_of(1, None, None) is None


def test_the_trouble_of_a_rank_is_what_it_reported() -> None:
    trouble = trouble_of(1, report("ValueError", "no", at=3.0), None)
    assert trouble is not None
    assert (trouble.rank, trouble.at, trouble.is_interrupted) == (1, 3.0, False)
    assert trouble.headline() == "ValueError: no, line 9"
    assert not trouble.is_consequence


def test_or_how_its_process_ended() -> None:
    killed = trouble_of(1, None, Ending(-9, 3.0))
    assert killed == Trouble(rank=1, at=3.0, ending=Ending(-9, 3.0))
    assert killed.exitcode == -9
    gone = trouble_of(1, None, Ending(None, 3.0))
    assert gone is not None
    assert (gone.headline(), gone.exitcode) == ("disappeared", None)


def test_a_rank_that_failed_and_then_ended_had_failed() -> None:
    trouble = trouble_of(1, report("ValueError", "no", at=3.0), Ending(-9, 4.0))
    assert trouble is not None
    assert trouble.exitcode is None
    assert trouble.headline() == "ValueError: no, line 9"


@pytest.mark.parametrize("ended", [interrupted(), closed()], ids=["interrupted", "closed"])
def test_the_trouble_of_a_rank_may_be_a_consequence(ended: CellEnded) -> None:
    trouble = trouble_of(1, ended, None)
    assert trouble is not None
    assert trouble.is_consequence


# ---- the exception


def test_a_failure_becomes_an_error_with_its_rank_and_report() -> None:
    verdict = verdict_on({0: interrupted(), 1: report("ValueError", "no")})
    error = verdict.error()
    assert type(error) is CellFailedError
    assert (str(error), error.rank, error.report) == (
        "rank 1: ValueError: no, line 9",
        1,
        verdict.report(),
    )


def test_what_filled_a_gpu_stands_under_the_traceback() -> None:
    told = report("OutOfMemoryError", "CUDA out of memory")
    failure = told.failure | {"memory": "  cuda:0 has 15.0 GiB\n    this rank: 14.0 GiB"}
    lines = verdict_on({0: interrupted(), 1: replace(told, failure=failure)}).report().splitlines()
    place = lines.index("  cuda:0 has 15.0 GiB")
    assert lines[place + 1] == "    this rank: 14.0 GiB"
    assert lines[place + 2].startswith("  rank 0: interrupted")


def test_an_interrupt_becomes_an_error_of_its_own() -> None:
    error = verdict_on({0: interrupted()}).error()
    assert type(error) is CellInterruptedError
    assert error.rank == 0


def test_an_interrupt_that_killed_a_rank_is_a_failure() -> None:
    assert type(verdict_on({0: interrupted()}, {1: (-9, 15.0)}).error()) is CellFailedError


# ---- timeouts

TIMED_OUT = "Timed out waiting 3000ms for recv operation"


def timed_out(*, at: float = 10.0, collective: str = "all_reduce #7") -> CellEnded:
    text = f"[/a/b/gloo/transport/tcp/unbound_buffer.cc:78] {TIMED_OUT}"  # the place is left out
    return report("RuntimeError", text, at=at, collective=collective)


def test_who_was_elsewhere_is_the_cause_of_a_timeout_and_who_waited_is_not() -> None:
    elsewhere = interrupted("", at=13.0, line=4)
    verdict = verdict_on({0: timed_out(), 1: elsewhere, 2: timed_out(at=10.1)})
    assert verdict.summary() == "rank 1 did not come to all_reduce #7: it was in line 4"
    assert not verdict.is_interrupt
    causes = {rank: verdict.of(rank) for rank in (0, 1, 2, 3)}
    found = {rank: each and not each.is_consequence for rank, each in causes.items()}
    assert found == {0: False, 1: True, 2: False, 3: None}
    assert verdict.report() == (
        "first cause: rank 1 did not come to all_reduce #7: it was in line 4\n"
        f"\n{TRACEBACK}\n\n"
        f"  ranks 0,2: RuntimeError: {TIMED_OUT} in all_reduce #7, line 9 (a consequence)\n"
        "Every rank keeps its names; the next cell works."
    )


def test_a_timeout_in_a_collective_without_a_name_has_its_cause_too() -> None:
    verdict = verdict_on({0: timed_out(collective=""), 1: interrupted("", line=0)})
    assert (
        verdict.summary() == "rank 1 did not come to the collective in which the other ranks waited"
    )


def test_where_all_waited_the_first_timeout_is_the_cause() -> None:
    verdict = verdict_on({0: timed_out(at=11.0), 1: interrupted("broadcast #7", at=13.0)})
    assert verdict.summary() == f"rank 0: RuntimeError: {TIMED_OUT} in all_reduce #7, line 9"


def test_who_came_and_went_on_is_not_the_cause_of_a_timeout() -> None:
    verdict = verdict_on({0: timed_out(), 1: interrupted("", at=13.0, sequence=7)})
    assert verdict.summary() == f"rank 0: RuntimeError: {TIMED_OUT} in all_reduce #7, line 9"


def test_who_ended_the_cell_without_coming_is_the_cause_of_a_timeout() -> None:
    waiter = report("RuntimeError", TIMED_OUT, collective=(call := "all_reduce #2 of group [0, 1]"))
    waiter = replace(waiter, groups={"[0, 1]": 2})
    ended = CellEnded(cell=1, seconds=1.0, in_group=True, sequence=7, groups={"[0, 1]": 1})
    verdict = verdict_on({0: waiter, 1: ended, 2: replace(ended, groups={})})
    assert verdict.causes == (1,)
    assert verdict.report() == (
        f"first cause: rank 1 did not come to {call}: it had already finished the cell\n"
        f"  rank 0: RuntimeError: {TIMED_OUT} in {call}, line 9 (a consequence)\n"
        "Every rank keeps its names; the next cell works."
    )
    came = replace(ended, groups={"[0, 1]": 2})
    assert verdict_on({0: waiter, 1: came}).causes == (0,)


def test_who_died_is_the_cause_of_a_timeout_whoever_was_elsewhere() -> None:
    verdict = verdict_on({0: timed_out(), 1: interrupted("", at=13.0)}, {2: (-9, 9.0)})
    assert verdict.summary() == "rank 2 was killed by SIGKILL"


STORE = "wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1"
BARRIER = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms"
CALLS = {
    "all_reduce #1 of group [0, 1]": ("RuntimeError", TIMED_OUT, {"[0, 1]": 1}, {}),
    "new_group": ("DistStoreError", STORE, {"new_group": 10001}, {"new_group": 10000}),
    "recv(src=1, tag=3)": ("RuntimeError", TIMED_OUT, {}, {}),
    "monitored_barrier of group [0, 1]": ("RuntimeError", BARRIER, {"[0, 1]": 2}, {"[0, 1]": 1}),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_timeout_of_a_call_or_a_group_of_its_own_names_the_rank_that_is_not_there(
    call: str,
) -> None:
    name, text, waited, before = CALLS[call]
    waiter = report(name, text, collective=call, groups=waited)
    elsewhere = interrupted("", line=4, sequence=7, groups=before)
    assert verdict_on({0: waiter, 1: elsewhere}).summary() == (
        f"rank 1 did not come to {call}: it was in line 4"
    )
    has_come = interrupted("", line=4, sequence=7, groups=waited)
    assert verdict_on({0: waiter, 2: has_come}).first.rank == 0
    outsider = interrupted("", line=4, sequence=7)
    assert (verdict_on({0: waiter, 2: outsider}).first.rank == 0) == (call != "new_group")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DistStoreError", STORE),
        ("DistStoreError", "Timed out after 4 seconds waiting for clients. 1/2 clients joined."),
        (
            "DistNetworkError",
            "The client socket has timed out after 3000ms while trying to connect to (::1, 1).",
        ),
    ],
)
def test_a_rank_without_a_group_did_not_come_to_init_process_group(name: str, text: str) -> None:
    waiter = report(name, text, collective="init_process_group", sequence=0, in_group=False)
    elsewhere = interrupted("", line=4, sequence=0, in_group=False)
    assert verdict_on({0: waiter, 1: elsewhere}).summary() == (
        "rank 1 did not come to init_process_group: it was in line 4"
    )
    in_group = interrupted("", line=4, sequence=0)
    assert verdict_on({0: waiter, 1: in_group}).first.rank == 0


def test_a_key_that_the_cell_itself_waited_for_may_be_of_any_rank() -> None:
    waiter = report("DistStoreError", STORE, sequence=7)
    assert verdict_on({0: waiter, 1: interrupted("", sequence=6)}).first.rank == 0


def test_a_long_error_is_cut_in_its_headline_and_whole_in_its_traceback() -> None:
    verdict = verdict_on({0: report("RuntimeError", "x" * 1000, traceback="x" * 1000)})
    assert verdict.summary() == f"rank 0: RuntimeError: {'x' * 236} ..., line 9"
    assert "x" * 1000 in verdict.report()


def test_a_timeout_of_another_kind_is_what_it_is() -> None:
    verdict = verdict_on(
        {0: report("RuntimeError", "timeout of the file server"), 1: interrupted("", at=13.0)}
    )
    assert verdict.summary() == "rank 0: RuntimeError: timeout of the file server, line 9"


def test_where_the_next_cell_fails_as_this_one_did_it_is_not_said_to_work() -> None:
    lasting = report("NoDescriptorsError", "none left", lasts=True)
    for reports in ({0: lasting, 1: lasting}, {0: report("ValueError", "no"), 1: lasting}):
        assert verdict_on(reports).report().endswith("\nEvery rank keeps its names.")
