"""A process group of one rank, a recorder of the reports of a training, and fake devices."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def group_of_one() -> Iterator[None]:
    import torch.distributed as dist  # not for tests without torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def recorder() -> Iterator[Any]:
    from sinks import recording  # not for tests without torch

    with recording() as recorder:
        yield recorder


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    from fake_devices import fake_devices  # not for tests without torch

    return fake_devices(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    """A shell without a history; ``__main__`` is given back."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    main = sys.modules["__main__"]
    yield InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    sys.modules["__main__"] = main


@pytest.fixture
def typed(
    shell: Any,
    folder: Path,  # noqa: ARG001 - of the script and the runs
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """The magics of a notebook without ranks."""
    from typed import Typed

    typed = Typed(shell, monkeypatch)
    yield typed
    typed.notebook.group.close()
