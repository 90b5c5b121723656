"""The values that a rank reports at each cell's end, so that a replacement can restore them."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from nbddp.wire.marks import DEVICE, OTHER, plain_mark, read_plain
from nbddp.wire.messages import JsonDict

PATIENCE = 0.003  # CPU seconds for the search; values found later are not reported
MAX_DEPTH, MAX_PARTS = 2, 100  # levels of attributes, and attributes of one object
MAX_VALUES, MAX_OTHERS = 2000, 50  # values that are reported, and those of them that are not plain
LOOKED_AT = 10_000  # characters at each end of a text
HISTORY = re.compile(
    r"_+|_i*\d*|_(i+|dh|oh|ih)|In|Out"  # what IPython keeps of cells,
    r"|__(builtins_dict|compiled_fn|resume_at|import|nested)_\w*"  # and torch.compile of functions
)
_OF_SHELL = frozenset({"In", "Out", "exit", "quit", "get_ipython"})
# Values of these types are the same on all ranks, or a heal moves them to the new process group.
_ALIKE = (ModuleType, FunctionType, type, nn.Module, Optimizer)
# The attributes of objects of these packages are not searched.
_CLOSED = frozenset({"builtins", "torch", "numpy", "nbddp"})

Marked = tuple[str, dict[str, Any], str, str]  # path, container of the value, key in it, mark
Memo = dict[str, tuple[object, str]]  # by path: a plain value and its mark
Holder = tuple[str, dict[str, Any]]  # a format for the paths of its values, and the values


class PlainValues:
    """The marks of a rank's values, and the changes since the last report.

    Args:
        namespace: the user's names.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._memo: Memo = {}
        self._told: dict[str, str] | None = None

    def forget(self) -> None:
        """Report all marks the next time."""
        self._told = None

    def changes(self) -> JsonDict:
        """Return the marks that are new, and the paths of values that are gone.

        This runs at each cell's end: it runs no code of the user's and waits for no GPU.
        """
        before = self._told
        if len(self._memo) > 2 * MAX_VALUES:  # most of them are gone
            self._memo.clear()
        try:
            now = {path: mark for path, _, _, mark in _marked(self._namespace, self._memo)}
        except Exception:  # noqa: BLE001 - whatever a user's class raises: the cell must not fail
            return {}
        self._told = now
        if before is None:
            return {"new": now, "is_all": True}
        new = {path: mark for path, mark in now.items() if before.get(path) != mark}
        gone = [path for path in before if path not in now]
        return {"new": new, "gone": gone} if new or gone else {}

    def take(self, own: Mapping[str, Sequence[str]], preset: Collection[str]) -> list[str]:
        """Restore this rank's own values. Return the paths of those that it changed.

        Args:
            own: by path, the mark of the donor's value and the mark of this rank's own value.
            preset: names that each rank sets for itself: restored whatever their marks are now.
        """
        left = dict(own)
        taken: list[str] = []
        for path, holder, key, mark in [*_marked(self._namespace, {}, patience=1.0)]:
            expected, mine = left.pop(path, (mark, mark))
            if mark != mine and (mark == expected or path in preset):
                holder[key] = _value(mine)
                taken.append(path)
        for path, (_, mine) in left.items():
            if path.isidentifier() and path not in self._namespace:
                self._namespace[path] = _value(mine)
                taken.append(path)
        return taken


def _marked(namespace: dict[str, Any], memo: Memo, patience: float = PATIENCE) -> Iterator[Marked]:
    """Yield the values with their marks, those of names before those of attributes.

    Args:
        namespace: the user's names.
        memo: the plain values that were found before: making a mark takes longer than finding it.
        patience: CPU seconds that this may take.
    """
    deadline = time.thread_time() + patience
    search = _Search(memo)
    holders: list[Holder] = [("", namespace)]
    for _ in range(MAX_DEPTH + 1):
        for form, holder in holders:
            yield from search.look(form, holder)
            if search.left <= 0 or time.thread_time() > deadline:
                return
        holders, search.inner = search.inner, []


class _Search:
    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._others = MAX_OTHERS
        self.left = MAX_VALUES
        self.inner: list[Holder] = []

    def look(self, form: str, holder: dict[str, Any]) -> Iterator[Marked]:
        """Yield the values of one container, and collect nested containers for the next level."""
        for key, value in [*holder.items()][: self.left]:
            if type(key) is not str:
                continue
            path = form.format(key) if form else key
            known = self._memo.get(path)
            is_known = known is not None and known[0] is value
            mark = known[1] if known and is_known else self._new_mark(form, path, value)
            if mark:
                self.left -= 1
                yield path, holder, key, mark

    def _new_mark(self, form: str, path: str, value: Any) -> str:
        if not form and _is_shells(path):
            return ""
        if mark := _mark(value):
            self._memo[path] = value, mark
            return mark
        if isinstance(value, _ALIKE):
            return ""
        self.inner += _holders(path, value)
        if form or not self._others:  # attributes are reported only if they are plain
            return ""
        self._others -= 1
        return _other_mark(value)


def _is_shells(name: str) -> bool:
    if name[0:1] != "_":
        return name in _OF_SHELL
    return name[1:2] == "_" or HISTORY.fullmatch(name) is not None


def _holders(path: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the attributes of an object, or the items of a dict, and a format for their paths."""
    if isinstance(value, Enum):  # all that have this member share its attributes
        return []
    safe = path.replace("{", "{{").replace("}", "}}")
    if type(value) is dict:
        return [(f"{safe}[{{!r}}]", value)] if len(value) <= MAX_PARTS else []
    held = getattr(value, "__dict__", None)
    if type(held) is not dict or not 0 < len(held) <= MAX_PARTS:
        return []
    room = type(value).__module__.partition(".")[0]
    return [] if room in _CLOSED else [(f"{safe}.{{}}", held)]


def _mark(value: object) -> str:
    if type(value) is torch.device:
        return f"{DEVICE}{value}"
    return plain_mark(value)


def _value(mark: str) -> object:
    if mark.startswith(DEVICE):
        return torch.device(mark.removeprefix(DEVICE))
    return read_plain(mark)


def _other_mark(value: Any) -> str:
    """Return a mark by which most different values can be told apart, at little cost."""
    kind = type(value)
    facts: list[object] = [kind.__name__]
    if issubclass(kind, Enum):
        facts += [value._name_]
    elif kind is str:
        ends = value[:LOOKED_AT] + value[-LOOKED_AT:]  # a text may be a whole data set
        facts += [len(value), zlib.crc32(ends.encode(errors="replace"))]
    elif kind in (list, tuple) and value:
        facts += [len(value), _mark(value[0]), _mark(value[-1])]
    elif kind in (dict, set, frozenset):
        facts += [len(value)]
    elif kind is np.ndarray and value.size and value.dtype.kind in "biufc":
        facts += [*value.shape, *_sample(value)]
    elif kind is torch.Tensor and value.is_cpu and value.layout is torch.strided and value.numel():
        facts += [*value.shape, *_sample(value.detach())]
    return OTHER + " ".join(map(str, facts))


def _sample(array: Any) -> list[object]:
    """Return the first number, and one from the middle."""
    middle = tuple(length // 2 for length in array.shape)
    return [array[(0,) * array.ndim].item(), array[middle].item()]
