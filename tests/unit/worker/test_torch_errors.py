"""Who raised an error: C++ code and torch.distributed, or a ``raise`` of other code."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import futures

from nbddp.worker.torch_errors import is_backend_error, raising_file, torch_errors

LOST = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer"


def wait_for_a_key() -> None:
    dist.HashStore().wait(["no such key"], timedelta(milliseconds=1))


def raise_again() -> None:
    try:
        wait_for_a_key()
    except RuntimeError as error:
        raise error


def raise_from() -> None:
    try:
        wait_for_a_key()
    except RuntimeError as error:
        raise ValueError("epoch 3 failed") from error


def raise_lost() -> None:
    raise RuntimeError(LOST)


def raise_from_a_worker() -> None:
    try:
        raise_lost()
    except RuntimeError:
        torch._utils.ExceptionWrapper(where="in DataLoader worker process 0").reraise()


def raise_from_a_future() -> None:
    future: Future[None] = Future()
    future.set_exception(RuntimeError(LOST))
    future.result()


def raise_from_a_torch_future() -> None:
    future: futures.Future[None] = futures.Future()
    future.set_exception(RuntimeError(LOST))
    future.wait()


def raise_from_a_task() -> None:
    async def gather() -> None:
        await asyncio.gather(asyncio.to_thread(raise_lost))

    asyncio.run(gather())


def raise_from_a_hook() -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: raise_lost())
    weight.sum().backward()


def go_backward_twice() -> None:
    loss = torch.ones(1, requires_grad=True).exp()
    loss.backward()
    loss.backward()


def load_igloo() -> None:
    torch._C.PyTorchFileReader("/no/such/gloo/or/igloo.pt")


RAISES: dict[Callable[[], None], list[str]] = {
    wait_for_a_key: ["DistStoreError"],
    raise_again: ["DistStoreError"],
    raise_from: ["DistStoreError"],
    go_backward_twice: ["RuntimeError"],
    raise_lost: [],
    raise_from_a_worker: [],
    raise_from_a_future: [],
    raise_from_a_torch_future: [],
    raise_from_a_task: [],
    raise_from_a_hook: [],
}


def error_of(function: Callable[[], None]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of several types
        function()
    return caught.value


@pytest.mark.parametrize("function", RAISES, ids=lambda each: each.__name__)
def test_only_c_code_and_torch_distributed_raise_errors_of_torch(
    function: Callable[[], None],
) -> None:
    found = [type(each).__name__ for each in torch_errors(error_of(function))]
    assert found == RAISES[function]


def test_a_cycle_of_causes_ends() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert [*torch_errors(first)] == [first, second]
    assert raising_file(error_of(raise_lost)) == __file__


def test_an_error_is_the_backends_if_torch_raised_it_and_its_text_says_so() -> None:
    assert is_backend_error(RuntimeError(LOST))
    assert is_backend_error(dist.DistBackendError("of any text"))
    assert not is_backend_error(error_of(raise_lost))
    about_a_file = error_of(load_igloo)
    assert [*torch_errors(about_a_file)] == [about_a_file]
    assert not is_backend_error(about_a_file)
    assert not is_backend_error(None)
