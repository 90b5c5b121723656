"""Hypothesis strategies for any message of the wire."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st

from nbddp.wire.collective import Collective
from nbddp.wire.messages import Message, MessageFromRank, MessageToRank
from nbddp.wire.rank_start import Script

KINDS: tuple[type[Any], ...] = (*get_args(MessageToRank), *get_args(MessageFromRank))

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)  # NaN is not equal to itself
    | st.text(max_size=8)
)
_JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    bool | None: st.none() | st.booleans(),
    dict[str, Any]: st.dictionaries(st.text(max_size=8), _JSON, max_size=3),
    dict[str, str]: st.dictionaries(st.text(max_size=8), st.text(), max_size=3),
    float: st.floats(allow_nan=False),
    int: st.integers(),
    list[Any]: st.lists(_JSON, max_size=4),
    list[int]: st.lists(st.integers(), max_size=4),
    list[str]: st.lists(st.text(), max_size=4),
    tuple[int, ...]: st.lists(st.integers(), max_size=4).map(tuple),
    tuple[str, ...]: st.lists(st.text(), max_size=4).map(tuple),
    Script | None: st.none()
    | st.builds(Script, name=st.text(), path=st.text(), arguments=st.just(["a"]), folder=st.text()),
    str: st.text(max_size=30),
    Collective | None: st.none()
    | st.builds(Collective, st.text(), st.integers(), st.text(), st.text()),
}


def of_kind(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of one class, from the types of its fields."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{item.name: _BY_TYPE[hints[item.name]] for item in fields(kind)})


def any_message() -> st.SearchStrategy[Message]:
    return st.one_of([of_kind(kind) for kind in KINDS])
