"""Edited modules are reloaded, and objects that exist get the new code."""

import importlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbddp.extensions.autoreload.modules import Reloaded, UserModules


class Edited:
    """A module in a file, and a program that has imported it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.modules = folder, UserModules()
        self.names: dict[str, Any] = {}
        self._time = itertools.count(1_700_000_000)

    def write(self, text: str, name: str = "edited") -> None:
        path = self.folder / f"{name}.py"
        path.write_text(text)
        os.utime(path, (seconds := next(self._time), seconds))
        importlib.invalidate_caches()

    def run(self, code: str) -> None:
        exec(code, sys.modules["__main__"].__dict__)
        new = [each for name, each in sys.modules.items() if name.startswith("edited")]
        self.modules.note(new)

    def value(self, code: str) -> Any:
        return eval(code, sys.modules["__main__"].__dict__)

    def reload(self) -> Reloaded:
        return self.modules.reload(lambda _: True)


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edited]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    main = sys.modules["__main__"].__dict__
    kept = {**main}
    yield Edited(tmp_path)
    main.clear()
    main.update(kept)
    for name in [each for each in sys.modules if each.startswith("edited")]:
        del sys.modules[name]


MODULE = """
import torch
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, wraps
from torch import nn

RATE = 1

def double(f):
    @wraps(f)
    def doubled():
        return 2 * f()
    return doubled

def f():
    return RATE

@double
def decorated():
    return RATE

@lru_cache
def cached():
    return RATE

def removed():
    return 1

def outer():
    def inner():
        return RATE
    return inner

class Base:
    def name(self):
        return "base"

class Child(Base):
    size = 1
    def name(self):
        return "child"
    @property
    def twice(self):
        return 2
    @staticmethod
    def fixed():
        return 1
    @classmethod
    def made(cls):
        return cls.size

@dataclass
class Config:
    rate: int = 1

class Color(Enum):
    RED = 1

class Slots:
    __slots__ = ("a",)
    def a_plus(self):
        return 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
    def forward(self, x):
        return 0 * self.layer(x) + 1
"""
SETUP = """
import edited, torch
from edited import *
held = f
held_method = Child().name
child, config, color, slots, net = Child(), Config(), Color.RED, Slots(), Net()
class Sub(Child): pass
sub = Sub()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
weight = net.layer.weight
"""
ONE = "torch.ones(1, 1)"


@pytest.mark.parametrize(
    ("old", "new", "expression", "expected"),
    [
        ("    return RATE\n\n@double", "    return 5\n\n@double", "edited.f()", 5),
        ("    return RATE\n\n@double", "    return 5\n\n@double", "f()", 5),
        ("    return RATE\n\n@double", "    return 5\n\n@double", "held()", 5),
        ("def f():", "def f(a=3):", "f.__defaults__", (3,)),
        ("RATE = 1", "RATE = 4", "f(), cached(), decorated(), Child.made()", (4, 4, 8, 1)),
        ("RATE = 1", "RATE = 4\nNEW = 2", "edited.NEW", 2),
        ("return 2 * f()", "return 3 * f()", "decorated()", 3),
        ("def removed", "def renamed", "hasattr(edited, 'removed'), edited.renamed()", (False, 1)),
        (
            "        return RATE\n    return inner",
            "        return 7\n    return inner",
            "outer()()",
            7,
        ),
        ('return "child"', 'return "new"', "child.name(), held_method(), sub.name()", ("new",) * 3),
        ('return "child"', "return super().name()", "child.name(), sub.name()", ("base",) * 2),
        ('return "base"', 'return "new"', "Base.name(child)", "new"),
        ('"child"\n', '"child"\n    def added(self):\n        return 3\n', "child.added()", 3),
        ("    size = 1", "    size = 6", "child.size, Child.size, sub.size, Sub.made()", (6,) * 4),
        ("        return 2\n", "        return 8\n", "child.twice, sub.twice", (8, 8)),
        ("def fixed():\n        return 1", "def fixed():\n        return 9", "sub.fixed()", 9),
        ("return cls.size", "return -cls.size", "Sub.made(), child.made()", (-1, -1)),
        ("class Child(Base)", "class Child", "isinstance(child, Base)", False),
        ("class Child(Base)", "class Child(Base, dict)", "child.name()", "child"),
        (
            "rate: int = 1",
            "rate: int = 1\n    decay: int = 2",
            "config.decay, Config(3).rate",
            (2, 3),
        ),
        ("RATE = 1", "RATE = 2", "color is Color.RED is edited.Color.RED", True),
        ("RED = 1", "RED = 1\n    BLUE = 2", "Color.BLUE.value", 2),
        ('__slots__ = ("a",)', '__slots__ = ("a", "b")', "slots.a_plus()", 1),
        ("        return 1\n\nclass Net", "        return 2\n\nclass Net", "slots.a_plus()", 2),
        ("(x) + 1", "(x) + 2", f"net({ONE}).item()", 2.0),
        ("(x) + 1", "(x) + 2", "weight is net.layer.weight", True),
        ("def forward", "def extra(self):\n        return 3\n    def forward", "net.extra()", 3),
        ("from enum import Enum", "from enum import Enum\nimport edited2", "edited.edited2.X", 1),
        ("RATE = 1", "from edited3 import Y as RATE", "f()", 2),
        ("class Config", "class Settings", "edited.Settings().rate, config.rate", (1, 1)),
        ("import torch\n", "import torch\n\n\n# ü\n", "f.__code__.co_firstlineno", 19),
    ],
)
def test_existing_objects_have_the_code_of_an_edited_module(
    edited: Edited, old: str, new: str, expression: str, expected: object
) -> None:
    edited.write(MODULE)
    edited.write("X = 1", "edited2")
    edited.write("import edited\nY = 2", "edited3")  # a cycle
    edited.run(SETUP)
    assert MODULE.count(old) == 1
    edited.write(MODULE.replace(old, new))
    assert edited.reload().names == ["edited"]
    assert edited.value(expression) == expected
    assert edited.reload() == Reloaded()  # once


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("RED = 1", "RED = 2", ["edited.Color (objects that exist)"]),
        ('("a",)', '("a", "b")', ["edited.Slots (objects that exist)"]),
    ],
)
def test_what_cannot_change_is_named(edited: Edited, old: str, new: str, kept: list[str]) -> None:
    edited.write(MODULE)
    edited.run(SETUP)
    edited.write(MODULE.replace(old, new))
    assert edited.reload().kept == kept


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1\nif", "SyntaxError in line 2: invalid syntax"),
        ("x = 1\n\n1 / 0", "ZeroDivisionError in line 3: division by zero"),
        ("import missing", "ModuleNotFoundError in line 1: No module named 'missing'"),
        ("raise SystemExit(3)", "SystemExit in line 1: 3"),
    ],
)
def test_no_module_changes_if_one_has_an_error(edited: Edited, text: str, error: str) -> None:
    edited.write("def f():\n    return 1")
    edited.write("def g():\n    return 1", "edited2")
    edited.run("from edited import f\nfrom edited2 import g\nimport edited2")
    edited.write("def f():\n    return 2")
    edited.write(text, "edited2")
    for _ in range(2):  # the second time, too
        assert edited.reload().error == f"edited2.py: {error}"
        assert edited.value("f(), g(), edited2.g()") == (1, 1, 1)
    edited.write("def g():\n    return 2", "edited2")
    assert edited.reload().names == ["edited", "edited2"]
    assert edited.value("f(), g(), edited2.g()") == (2, 2, 2)


def test_an_undone_reload_is_made_again(edited: Edited) -> None:
    edited.write("def f():\n    return 1")
    edited.run("from edited import f")
    edited.write("def f():\n    return 2")
    edited.reload()
    edited.modules.undo()
    assert edited.value("f()") == 1
    assert edited.reload().names == ["edited"]
    assert edited.value("f()") == 2


def test_modules_of_packages_and_deleted_files_are_left_alone(edited: Edited) -> None:
    edited.write("X = 1")
    edited.run("import edited, json, pytest")
    edited.modules.note([sys.modules["json"], sys.modules["pytest"]])
    assert [*edited.modules._versions] == ["edited"]
    (edited.folder / "edited.py").unlink()
    assert edited.reload() == Reloaded()
