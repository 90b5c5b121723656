"""Values that a rank reports at the end of each cell, so that a replacement can restore them."""

from __future__ import annotations

import re
import time
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from nbddp.wire.messages import JsonDict
from nbddp.wire.value_texts import ATOMS, DEVICE, NAMED_TUPLE, PLAIN, is_fingerprint, read_plain
from nbddp.worker.heal.fingerprints import DICTS, fingerprint, is_named_tuple, restorable_text

CPU_SECONDS = 0.003  # for the search; values that would take longer are not reported
FINGERPRINT_SHARE = 1 / 3  # fraction of these seconds for values that are not plain
FIRST_FACTOR = 2  # more time for the first search: all values are new, and caches are cold
MAX_DEPTH, MAX_PARTS = 2, 100  # levels of attributes; attributes of one object
# reported values; those of them that are not plain
MAX_VALUES, MAX_FINGERPRINTS = 2000, 200
CLOCK_INTERVAL = 16  # values between two reads of the clock, which takes as long as one value
SHELL_NAMES = re.compile(
    r"_+|_i*\d*|_(i+|dh|oh|ih)|In|Out|exit|quit|get_ipython"  # names that IPython sets,
    r"|__(builtins_dict|compiled_fn|resume_at|import|nested)_\w*"  # and torch.compile for functions
)
# Values of these types are equal on all ranks, or a heal moves them to the new process group.
_SKIPPED_TYPES = (
    *(types.ModuleType, type, nn.Module, Optimizer, types.BuiltinFunctionType),
    *(property, classmethod, staticmethod, types.MemberDescriptorType, types.GetSetDescriptorType),
)
_SHARED = (Enum, Optimizer, types.ModuleType)  # types of objects with shared attributes
# A heal moves parameters, buffers and hooks.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
# The attributes of objects of these packages are not searched.
_OPAQUE_PACKAGES = frozenset({"builtins", "torch", "numpy", "random", "nbddp"})

Container = dict[str, Any] | type  # the attributes of a class are in a read-only mapping
FoundValue = tuple[str, Container, str, str]  # path, container of the value, key in it, text
# By path: a plain value, its items if they may be replaced, and its text
Memo = dict[str, tuple[object, tuple[object, ...] | None, str]]
Holder = tuple[str, Container]  # a format for the paths of its values, and their container


class ReportedValues:
    """Reports how a rank's values changed, and restores the values of a replacement.

    Values are reported as texts; see :mod:`nbddp.wire.value_texts`.

    Args:
        namespace: the user's variables.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._memo: Memo = {}
        self._reported: dict[str, str] | None = None
        self._skipped: set[str] = set()

    def report_all_next(self) -> None:
        """Report all values the next time."""
        self._reported = None

    def changes(self) -> JsonDict:
        """Return the texts of new values, and the paths of values that are gone.

        This runs at the end of each cell. It runs no code of the user and does not wait for a GPU.
        """
        before = self._reported
        if len(self._memo) > 2 * MAX_VALUES:  # most of these values are gone
            self._memo.clear()
        cpu_seconds = CPU_SECONDS if before is not None else FIRST_FACTOR * CPU_SECONDS
        search = _Search(self._namespace, self._memo, cpu_seconds)
        try:
            now = {path: text for path, _, _, text in search.values()}
        except Exception:  # noqa: BLE001 - a user's class may raise anything; the cell must not fail
            return {}
        skipped, self._reported, self._skipped = self._skipped, now, search.skipped
        if before is None:
            return {"new": now, "is_all": True}
        new = {path: text for path, text in now.items() if before.get(path) != text}
        gone = [path for path in before if path not in now]
        late = [path for path in new if (path if path.isidentifier() else "") in skipped]
        report: JsonDict = {"new": new, "gone": gone} if new or gone else {}
        return report | ({"late": late} if late else {})

    def restore(self, values: Mapping[str, Sequence[str]], preset: Collection[str]) -> list[str]:
        """Restore this rank's own values. Return the paths of the changed values.

        Args:
            values: by path, the text of the donor's value and the text of this rank's own value.
            preset: variables that each rank sets itself; they are restored even if their value
                is not the donor's.
        """
        remaining = {path: texts for path, texts in values.items() if not is_fingerprint(texts[1])}
        restored: list[str] = []
        written: dict[int, str] = {}
        for path, container, key, text in [*_Search(self._namespace, {}, cpu_seconds=1.0).values()]:
            expected, own_text = remaining.pop(path, (text, text))
            is_expected = text == expected or path in preset
            if text != own_text and is_expected and _write(container, key, own_text, written):
                restored.append(path)
        for path, (_, own_text) in remaining.items():
            is_missing = path.isidentifier() and path not in self._namespace
            if is_missing and _write(self._namespace, path, own_text, written):
                restored.append(path)
        return restored

    def differing(self, values: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the paths of the values that still differ from this rank's own ones.

        Args:
            values: as for :meth:`restore`.
        """
        search = _Search(self._namespace, {}, cpu_seconds=1.0)
        now = {path: text for path, _, _, text in search.values()}
        differing = [
            path
            for path, (theirs, own_text) in values.items()
            if theirs and now.get(path) != own_text
        ]
        lost = [path for path in values if path.isidentifier() and path not in self._namespace]
        return [path for path in differing if path in now] + lost


class _Search:
    """A search for values: first values of variables, then values of attributes.

    Args:
        namespace: the user's variables.
        memo: plain values from earlier searches, because making a text takes longer than
            finding it.
        cpu_seconds: time limit.

    Attributes:
        skipped: variables without a text because of the time limit; "" stands for attributes and
            items.
    """

    def __init__(self, namespace: dict[str, Any], memo: Memo, cpu_seconds: float) -> None:
        self._namespace = namespace
        self._memo = memo
        self._deadline = time.thread_time() + cpu_seconds
        self._fingerprint_seconds = cpu_seconds * FINGERPRINT_SHARE
        self._new_count = 0
        self._fingerprints_left = MAX_FINGERPRINTS
        self._values_left = MAX_VALUES
        self._nested: list[Holder] = []
        self._is_over = False
        self.skipped: set[str] = set()

    def values(self) -> Iterator[FoundValue]:
        """Yield the values with their texts."""
        holders: list[Holder] = [("", self._namespace)]
        for _ in range(MAX_DEPTH + 1):
            for form, container in holders:
                yield from self._search(form, container)
                if self._values_left <= 0 or self._is_late():
                    self.skipped.add("")
                    return
            holders, self._nested = self._nested, []

    def _search(self, form: str, container: Container) -> Iterator[FoundValue]:
        """Yield the values of one container, and collect nested containers for the next level."""
        for key, value in [*_items(container)][: self._values_left]:
            if type(key) is not str or (form and key in _MODULE_ATTRIBUTES):
                continue
            path = form.format(key) if form else key
            memo = self._memo.get(path)
            if memo is not None and memo[0] is value and _has_items(value, memo[1]):
                text = memo[2]
            else:
                try:
                    text = self._new_text(form, path, value)
                except Exception:  # noqa: BLE001 - a user's class; the others keep their texts
                    text = ""
            if text:
                self._values_left -= 1
                yield path, container, key, text

    def _is_late(self) -> bool:
        self._is_over = self._is_over or time.thread_time() > self._deadline
        return self._is_over

    def _skip(self, form: str, path: str) -> str:
        self.skipped.add("" if form else path)
        return ""

    def _new_text(self, form: str, path: str, value: Any) -> str:
        if not form and (path[:2] == "__" or SHELL_NAMES.fullmatch(path)):
            return ""
        kind = type(value)
        if kind not in ATOMS:
            self._new_count += 1
            if self._is_over or (self._new_count % CLOCK_INTERVAL == 0 and self._is_late()):
                return self._skip(form, path)
        may_be_plain = kind in PLAIN or issubclass(kind, (tuple, torch.device, np.generic))
        if may_be_plain and (text := restorable_text(value)):
            self._remember(path, value, text)
            return text
        self._nested += _holders(path, value)
        is_skipped = issubclass(kind, _SKIPPED_TYPES)
        if is_skipped or (kind is types.FunctionType and not self._holds_values(value)):
            return ""
        return self._fingerprint(form, path, value)

    def _fingerprint(self, form: str, path: str, value: Any) -> str:
        if not self._fingerprints_left or self._fingerprint_seconds <= 0:
            return self._skip(form, path)
        began = time.thread_time()
        text = fingerprint(value)
        self._fingerprint_seconds -= time.thread_time() - began
        self._fingerprints_left -= 1
        return text

    def _remember(self, path: str, value: Any, text: str) -> None:
        kind = type(value)
        if kind in (list, set, tuple) and any(each in text[1:] for each in ("[", "{", "set(")):
            return  # an item may change in place
        self._memo[path] = value, (*value,) if kind in (list, set) else None, text

    def _holds_values(self, function: types.FunctionType) -> bool:
        if function.__closure__:
            return True
        is_cells = function.__globals__ is self._namespace
        return is_cells and bool(function.__defaults__ or function.__kwdefaults__)


def _items(container: Container) -> Collection[tuple[Any, Any]]:
    if isinstance(container, type):
        return [(key, value) for key, value in vars(container).items() if key[:2] != "__"]
    return container.items()


def _has_items(value: Any, items: tuple[object, ...] | None) -> bool:
    """Return whether a value still has the same items. None means that they cannot be replaced."""
    if items is None:
        return True
    return len(value) == len(items) and all(map(is_, (*value,), items))


def _holders(path: str, value: Any) -> list[Holder]:
    """Return the container of an object's attributes or a dict's items, with a format for paths."""
    kind = type(value)
    form = ".{}"
    items: Any = None
    if issubclass(kind, type):
        is_cells = value.__module__ == "__main__" and not issubclass(value, Enum)
        items = value if is_cells else None
    elif kind in DICTS:
        form, items = "[{!r}]", value
    elif kind.__module__.partition(".")[0] not in _OPAQUE_PACKAGES:
        items = None if issubclass(kind, _SHARED) else getattr(value, "__dict__", None)
    is_small = type(items) in DICTS and 0 < len(items) <= MAX_PARTS
    if not is_small and not isinstance(items, type):
        return []
    return [(path.replace("{", "{{").replace("}", "}}") + form, items)]


def _write(container: Container, key: str, text: str, written: dict[int, str]) -> bool:
    """Set a value to that of a text. Return whether this was possible.

    A list or set is changed in place, because other objects may refer to it too.

    Args:
        container: where the value is.
        key: key of the value in it.
        text: text of the new value.
        written: text of each list and set that was changed, by its address.
    """
    current: Any = (vars(container) if isinstance(container, type) else container).get(key)
    if text.startswith(DEVICE):
        value: Any = torch.device(text.removeprefix(DEVICE))
    elif text.startswith(NAMED_TUPLE):
        name, _, items = text.removeprefix(NAMED_TUPLE).partition(" ")
        if type(current).__name__ != name or not is_named_tuple(type(current)):
            return False
        value = tuple.__new__(type(current), read_plain(items))
    else:
        value = read_plain(text)
    is_same_kind = type(value) is type(current) and type(value) in (list, set)
    if is_same_kind and written.setdefault(id(current), text) == text:
        current.clear()
        (current.extend if type(current) is list else current.update)(value)
    elif isinstance(container, type):
        type.__setattr__(container, key, value)
    else:
        container[key] = value
    return True
