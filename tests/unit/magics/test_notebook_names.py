"""What the notebook knows about a name that a rank misses."""

import math
from typing import Any

import pytest

from nbddp.magics.notebook_names import describe_name


class OfTheNotebook:
    @property
    def __class__(self) -> Any:  # as a proxy or a mock may do
        raise AssertionError("it runs code of the user")


def helper() -> None:
    """Stand for a function of the notebook."""


OfTheNotebook.__module__ = helper.__module__ = "__main__"
NOTEBOOK = {
    "np": math,
    "sqrt": math.sqrt,
    "Session": pytest.Session,
    "helper": helper,
    "Net": OfTheNotebook,
    "model_config": {"layers": 3},
    "nothing": None,
    "proxy": OfTheNotebook(),
}
WAYS = {
    "import it in a `%%ddp` cell.": ("np", "sqrt", "Session"),
    "define it in a `%%ddp` cell.": ("helper", "Net"),
    "use `%%ddp --push model_config`.": ("model_config",),
    "use `%%ddp --push nothing`.": ("nothing",),
    "use `%%ddp --push proxy`.": ("proxy",),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_way_to_the_ranks_depends_on_the_kind_of_the_value(way: str) -> None:
    for name in WAYS[way]:
        text = describe_name(NOTEBOOK, name)
        assert text.startswith(f"`{name}` is ")
        assert text.endswith(way)
    assert describe_name(NOTEBOOK, "absent") == ""
