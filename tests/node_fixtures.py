"""Fixtures that start real ranks on nodes, which are all on this machine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from drivers.ranks import Ranks
from local_nodes import OnNodes


@pytest.fixture
def make_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OnNodes]]:
    """Makes groups for nodes that are all on this machine, and ends them."""
    monkeypatch.setenv("HOME", str(folder))
    with ExitStack() as stack:

        def make(kind: type[OnNodes] = OnNodes, **options: Any) -> OnNodes:
            made = kind(**options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def on_nodes(make_nodes: Callable[..., OnNodes]) -> Ranks:
    return make_nodes(nproc_per_node=1).start()
