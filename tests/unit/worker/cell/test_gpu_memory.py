"""The message of a full GPU: its users and their share, the largest tensors, a remedy."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from nbddp.worker.cell import failure
from nbddp.worker.cell.failure import describe_out_of_memory, largest_tensors

GIB = 1 << 30


def names_of(*scopes: dict[str, Any], device: torch.device | None = None) -> list[str]:
    return [name for name, _ in largest_tensors(scopes, device)]


def test_the_largest_tensors_are_listed_first_as_python_expressions() -> None:
    model = torch.nn.Linear(50, 40)
    model(torch.ones(50)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    scope = {"model": model, "optimizer": optimizer, "batch": {"x": [torch.ones(3000)]}}
    assert names_of(scope) == [
        "batch['x'][0]",
        "model.weight",
        "model.weight.grad",
        "optimizer.state[0]['momentum_buffer']",
        "model.bias",
    ]


def test_tensors_that_share_memory_are_named_once_and_hidden_names_are_skipped() -> None:
    whole = torch.ones(100, 10)
    scope: dict[str, Any] = {
        "whole": whole,
        "part": whole[:50],
        "_": whole + 1,
        "text": "x",
        "loop": [],
    }
    scope["loop"].append(scope["loop"])
    assert names_of(scope, {"inner": torch.ones(7), "again": whole}) == ["whole", "inner"]


def test_only_tensors_on_the_given_device_are_listed() -> None:
    scope = {"here": torch.ones(3), "nowhere": torch.ones(9, device="meta")}
    assert names_of(scope, device=torch.device("cpu")) == ["here"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the message for a GPU of 16 GiB on which these amounts are used."""

    def told(*, free: int, held: int, reserved: int) -> str:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _d: (free * GIB, 16 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _d: held * GIB)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _d: reserved * GIB)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _d: "Tesla T4")
        big = SimpleNamespace(
            device=torch.device("cuda", 1), nbytes=3 * GIB, dtype=torch.float32, shape=(3, 5)
        )
        monkeypatch.setattr(failure, "largest_tensors", lambda *_scopes: [("x", big)])
        return describe_out_of_memory(torch.OutOfMemoryError("GPU 1 has no room"), [])

    return told


@pytest.mark.parametrize(
    ("free", "held", "reserved"),
    [(1, 12, 13), (1, 3, 3), (1, 8, 14)],
    ids=["this rank", "others", "in pieces"],
)
def test_an_out_of_memory_message_names_the_main_user_of_the_gpu_and_a_remedy(
    card: Any, free: int, held: int, reserved: int, snapshot: SnapshotAssertion
) -> None:
    assert card(free=free, held=held, reserved=reserved) == snapshot


def test_other_errors_and_ranks_without_a_gpu_get_no_out_of_memory_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert describe_out_of_memory(torch.OutOfMemoryError("pretended"), []) == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert describe_out_of_memory(RuntimeError("no"), []) == ""


def test_an_out_of_memory_message_is_shown_even_if_a_module_raises_on_inspection(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    class Odd(torch.nn.Module):
        def named_parameters(self, *_args: Any, **_options: Any) -> Any:
            raise RuntimeError("not now")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    error = torch.OutOfMemoryError("GPU 0 has no room")
    assert describe_out_of_memory(error, [{"model": Odd()}]) == snapshot
