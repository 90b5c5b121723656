"""Whether the main thread is stalled, from samples and their times."""

from dataclasses import replace

import pytest

from nbddp.worker.watch.stall_detector import (
    CHILD_CPU,
    CONFIRM_AFTER,
    MAX_SWITCHES,
    THREAD_CPU,
    BlockingCall,
    ProcessSample,
    StallDetector,
    ThreadSample,
)

HERE = ThreadSample(position=(5, 1, 8), collectives=3, reports=2, written=100, cpu=1.0, switches=40)
DONE = {"position": (5, 1, 9), "collectives": 4, "reports": 3}
SIGNS = {"written": 101, "switches": 41, "cpu": 1.0 + 2 * THREAD_CPU}


def stay(after: ThreadSample, wait: BlockingCall) -> float:
    """How long it seems to have stayed, after 10 s here and one more look."""
    still = StallDetector()
    still.add_thread_sample(HERE, wait, 0.0)
    assert still.add_thread_sample(HERE, wait, 10.0) == 10.0
    return still.add_thread_sample(after, wait, 11.0)


@pytest.mark.parametrize("wait", BlockingCall)
def test_an_idle_thread_is_stalled_in_any_wait_and_its_own_activity_resets_the_stall(
    wait: BlockingCall,
) -> None:
    assert stay(HERE, wait) == 11.0
    for name, value in DONE.items():
        assert stay(replace(HERE, **{name: value}), wait) == 0.0, name


@pytest.mark.parametrize(
    ("wait", "moves"),
    [
        (BlockingCall.NONE, {*SIGNS}),
        (BlockingCall.ON_STACK, {"cpu"}),
        (BlockingCall.RECORDED, {"cpu"}),
        (BlockingCall.SPINNING, set()),
    ],
)
def test_activity_of_other_threads_does_not_reset_the_stall_of_a_waiting_thread(
    wait: BlockingCall, moves: set[str]
) -> None:
    moved = {name for name in SIGNS if not stay(replace(HERE, **{name: SIGNS[name]}), wait)}
    assert moved == moves


def test_in_a_single_blocking_call_only_output_and_much_cpu_time_reset_the_stall() -> None:
    wakes = {"switches": 60, "cpu": 1.0 + 2 * THREAD_CPU}
    assert stay(replace(HERE, **wakes), BlockingCall.ONE_EVENT) == 11.0
    assert stay(replace(HERE, cpu=1.0 + CHILD_CPU), BlockingCall.ONE_EVENT) == 0.0
    assert stay(replace(HERE, written=101), BlockingCall.ONE_EVENT) == 0.0


def test_many_context_switches_in_an_unrecorded_wait_reset_the_stall() -> None:
    assert stay(replace(HERE, switches=40 + MAX_SWITCHES), BlockingCall.ON_STACK) == 11.0
    assert stay(replace(HERE, switches=41 + MAX_SWITCHES), BlockingCall.ON_STACK) == 0.0


STARVED = frozenset({("7", "40")})  # a thread, and how often it slept


@pytest.mark.parametrize(
    ("closer", "is_at_work"),
    [
        (ProcessSample(state="S", cpu=2.0, children=5.01), False),
        (ProcessSample(state="D", children=5.0), True),
        (ProcessSample(state="R", children=5.0), True),
        (ProcessSample(state="S", cpu=90.0, children=5.0), True),
        (ProcessSample(state="S", children=5.1), True),
        (ProcessSample(state="S", children=5.0, written=1), True),
        (ProcessSample(state="S", children=5.0, runnable=STARVED), True),
        (ProcessSample(state="S", children=5.0, runnable=frozenset({("7", "41")})), False),
        (ProcessSample(children=5.0), False),
    ],
    ids=[
        *("idle", "disk", "runs", "other threads", "children", "they write"),
        *("a thread waits for a core", "a thread slept", "no such system"),
    ],
)
def test_a_process_sample_finds_work_done_for_a_sleeping_thread(
    closer: ProcessSample, is_at_work: bool
) -> None:
    still = StallDetector()
    still.add_thread_sample(HERE, BlockingCall.NONE, 0.0)
    still.add_process_sample(ProcessSample(children=5.0, runnable=STARVED), 3.0)
    assert still.add_process_sample(closer, 4.0) == (0.0 if is_at_work else 4.0)


def test_process_samples_of_children_are_compared_only_since_the_last_reset() -> None:
    still = StallDetector()
    still.add_process_sample(ProcessSample(children=1.0), 1.0)
    still.reset(2.0)
    assert still.add_process_sample(ProcessSample(children=9.0), 5.0) > 0.0


def test_a_late_first_process_sample_does_not_prove_that_children_are_idle() -> None:
    still = StallDetector()
    still.reset(0.0)
    assert still.add_process_sample(ProcessSample(children=1.0), 7.0) == CONFIRM_AFTER
    assert still.add_process_sample(ProcessSample(children=2.0), 8.0) == 0.0
    assert still.add_process_sample(ProcessSample(children=2.0), 9.0) == 1.0


def test_a_thread_with_active_helpers_needs_a_process_sample_each_time() -> None:
    still = StallDetector()
    still.reset(0.0)
    assert [still.needs_process_sample(now) for now in (1.0, 2.0)] == [False, True]
    still.add_process_sample(ProcessSample(cpu=90.0), 2.0)
    assert still.needs_process_sample(3.0), "the next look may be one at which they were starved"
    still.reset(4.0)
    assert not still.needs_process_sample(5.0)
