"""Where ``--backend shm`` can be used, and how the memory of a group behaves without ranks."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from interrupted_calls import keeps_a_frame
from refusals import refusal

from nbddp import WorkerGroup
from nbddp.errors import ArgumentError, RequestError
from nbddp.extensions.shm.engine import Call, Channel, Record, Recorder
from nbddp.extensions.shm.group import ShmGroup
from nbddp.extensions.shm.shared_memory import TURNS, Memory
from nbddp.topology import Topology
from nbddp.worker.process_group.process_group import make_own_backend


@pytest.mark.parametrize("name", ["mpi", ""])
def test_an_unknown_backend_is_refused_with_those_of_extensions(name: str) -> None:
    told = f"backend must be one of auto, gloo, nccl, shm, got {name!r}"
    assert refusal(ArgumentError, WorkerGroup, 2, backend=name) == told


def test_only_ranks_on_one_linux_machine_can_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = Topology(rank=0, local_rank=0, world_size=4, local_world_size=2)
    assert refusal(RequestError, make_own_backend, "shm", apart) == (
        "backend shm connects only ranks on one machine: use --backend gloo"
    )
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refusal(RequestError, make_own_backend, "shm", Topology.local(2)[0]) == (
        "backend shm needs Linux: use --backend gloo"
    )
    assert make_own_backend("gloo", apart) is None


@pytest.mark.parametrize("size", [2, 16, 64, 128])
def test_the_memory_for_collectives_of_any_size_is_limited(size: int) -> None:
    memory = Memory(0, size, timedelta())
    assert TURNS * size * memory.slot_size <= 64 << 20
    assert memory.slot_size >= 256 << 10


def test_an_interrupt_of_a_method_that_torch_calls_too_keeps_no_frame() -> None:
    group = ShmGroup(0, 1, Recorder())
    assert not keeps_a_frame(lambda: (group.rank(), group.size()), interrupts=300)


def test_a_callback_of_a_call_can_wait_for_later_calls_of_its_channel() -> None:
    channel, group, order = Channel("test"), ShmGroup(0, 1, Recorder()), list[str]()

    may_start = threading.Event()

    def submit(name: str) -> Call:
        def act() -> None:
            assert may_start.wait(10)
            order.append(name)

        record = Record(1, name, ("", ""), [], False, 0)
        call = Call(act, [name], record, group._memory.leave_after)
        channel.submit(call, at_once=False)
        return call

    done = (
        submit("first").get_future().then(lambda _: submit("of the callback").get_future().wait())
    )
    submit("before the callback")
    may_start.set()
    assert done.wait() == ["of the callback"]
    assert submit("after it").wait(timedelta(seconds=10))
    assert order == ["first", "before the callback", "of the callback", "after it"]
    channel.close()


def connected(timeout: float = 10.0) -> tuple[Memory, Memory]:
    """Return the memory of a group, as each of its two ranks sees it."""
    store = dist.HashStore()
    pair = Memory(0, 2, timedelta(seconds=timeout)), Memory(1, 2, timedelta(seconds=timeout))
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(Memory.connect, pair, [store, store])] == [None, None]
    return pair


def test_a_rank_that_leaves_ends_the_waits_of_the_others_but_not_before_it_was_awaited() -> None:
    first, second = connected()
    second.post(second.arrived(1, 0))
    second.leave("an error")
    first.meet("barrier")  # the other rank had come before it left
    with pytest.raises(dist.DistBackendError) as failed:
        first.meet("barrier number 2")
    assert str(failed.value) == (
        "barrier number 2 over shared memory cannot end: rank 1 of its group has left a call "
        "after an error or an interrupt"
    )


def test_a_wait_ends_with_the_timeout_or_when_it_is_aborted() -> None:
    first, _ = connected()
    first.timeout = timedelta(seconds=0.1)
    with pytest.raises(
        dist.DistBackendError, match=r"Timed out waiting 0.1 s in barrier .* rank 1"
    ):
        first.meet("barrier")
    first.leave_after(ValueError("a reason"))
    reason = "cannot end: an earlier call failed with ValueError: a reason"
    with pytest.raises(dist.DistBackendError, match=reason):
        first.meet("barrier")


def test_no_memory_remains_when_no_rank_uses_it() -> None:
    def used() -> tuple[int, int]:
        descriptors = len([*Path("/proc/self/fd").iterdir()])
        return Path("/proc/self/maps").read_text().count("memfd:nbddp-shm"), descriptors

    gc.collect()  # of earlier tests
    before = used()
    pair = connected()
    assert used() == (before[0] + 2, before[1] + 2)
    del pair
    assert used() == before
