"""Reload edited modules of the user; objects that exist get the new code."""

from __future__ import annotations

import ast
import enum
import gc
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from IPython.extensions.autoreload import update_generic

_PACKAGES = {"site-packages", "dist-packages"}  # folders; an editable install is elsewhere
_PYTHON = sysconfig.get_path("stdlib")
_OF_IMPORT = {
    *("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__"),
    *("__path__", "__builtins__"),
}
# the class of such an object cannot change
_FIXED = (enum.Enum, tuple, frozenset, int, float, complex, str, bytes)
Names = dict[str, Any]
Pairs = list[tuple[str, Any, Any]]  # a name, the old object and the new one


@dataclass
class Version:
    """The version of a module that this process runs.

    Attributes:
        changed_at: when its file was changed, in nanoseconds.
        source: the text of the file.
    """

    changed_at: int
    source: bytes


@dataclass
class Reloaded:
    """What a reload did.

    Attributes:
        names: the modules that have new code.
        kept: names that keep their old code, each with the reason.
        error: why nothing was reloaded; then there are no names.
    """

    names: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    error: str = ""


class UserModules:
    """The user's modules in this process, in the order of their import."""

    def __init__(self) -> None:
        self._versions: dict[str, Version] = {}
        self._before: dict[str, Version] = {}  # the versions before the last reload

    def note(self, modules: Iterable[types.ModuleType]) -> None:
        """Record the versions of modules that were imported since the last call."""
        for module in modules:
            name, path = module.__name__, _file_of(module)
            if path is not None and name not in self._versions:
                try:
                    self._versions[name] = Version(path.stat().st_mtime_ns, path.read_bytes())
                except OSError:
                    continue  # the file is deleted: it cannot change any more

    def reload(self, may_reload: Callable[[str], bool]) -> Reloaded:
        """Reload the modules whose files have changed: all, or none if there is an error."""
        found = Reloaded()
        self._before = {}
        for name, version in list(self._versions.items()):
            module = sys.modules.get(name)
            path = _file_of(module) if module is not None and may_reload(name) else None
            if module is None or path is None:
                continue
            try:
                changed_at = path.stat().st_mtime_ns
                if changed_at == version.changed_at:
                    continue
                source = path.read_bytes()
                if source != version.source:
                    found.kept += run_again(module, source, version.source)
                    self._before[name] = version
                    found.names.append(name)
            except KeyboardInterrupt:
                self.undo()
                raise
            except FileNotFoundError:
                continue  # an editor may be writing it
            except BaseException as error:  # noqa: BLE001 - also SystemExit of the module
                self.undo()
                return Reloaded(error=f"{path.name}: {_describe(error, path)}")
            self._versions[name] = Version(changed_at, source)
        return found

    def undo(self) -> None:
        """Run the sources again that the last reload replaced."""
        for name, version in self._before.items():
            run_again(sys.modules[name], version.source, self._versions[name].source)
            self._versions[name] = version
        self._before = {}


def _file_of(module: types.ModuleType) -> Path | None:
    """Return the source file of a module, if it is one of the user's."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "__main__")
    if not isinstance(file, str) or name.partition(".")[0] in ("__main__", "nbddp"):
        return None
    path = Path(file)
    is_installed = file.startswith(_PYTHON) or not _PACKAGES.isdisjoint(path.parts)
    return None if is_installed or path.suffix != ".py" else path


def _describe(error: BaseException, path: Path) -> str:
    """Return the kind and text of an error, and its line in the module."""
    line = getattr(error, "lineno", None)
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == str(path):
            line = step.tb_lineno
        step = step.tb_next
    where = f" in line {line}" if line else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}{where}: {text}"


def run_again(module: types.ModuleType, source: bytes, old_source: bytes) -> list[str]:
    """Run a source in the namespace of its module, and give its code to the existing objects.

    Return what keeps its old code. If the source raises an error, nothing changes.
    """
    names = module.__dict__
    old = dict(names)
    code = compile(decode_source(source), str(module.__file__), "exec", dont_inherit=True)
    for name in old.keys() - _OF_IMPORT:
        del names[name]
    try:
        exec(code, names)
    except BaseException:
        names.clear()
        names.update(old)
        raise
    for name in _unchanged(source, old_source):
        if isinstance(kind := old.get(name), type) and issubclass(kind, _FIXED):
            names[name] = kind  # its objects exist elsewhere
    pairs = list(_pairs(module.__name__, old, names))
    kept = _move_instances(pairs)
    _replace_references(pairs)
    for name, before, after in pairs:
        if name in kept:
            continue
        try:
            update_generic(before, after)  # for references in lists, closures and hooks
        except (TypeError, ValueError, AttributeError):
            kept[name] = "where a list or a hook refers to it"
    return [f"{module.__name__}.{name} ({reason})" for name, reason in kept.items()]


def _unchanged(source: bytes, old_source: bytes) -> set[str]:
    """Return the classes that both sources define in the same way."""
    now, before = _classes(source), _classes(old_source)
    return {name for name, text in now.items() if before.get(name) == text}


def _classes(source: bytes) -> dict[str, str]:
    """Return the text of each class that a source defines."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: ast.unparse(node) for node in nodes}


def _pairs(module: str, old: Names, new: Names) -> Iterator[tuple[str, Any, Any]]:
    """Return the functions and classes that the module defines, each old and new."""
    for name, before in old.items():
        after = new.get(name)
        is_defined = getattr(before, "__module__", None) == module and before is not after
        if is_defined and _is_definition(before) and _is_definition(after):
            yield name, before, after


def _is_definition(value: Any) -> bool:
    # functools.lru_cache makes an object that is no function
    return isinstance(value, type | types.FunctionType) or hasattr(value, "__wrapped__")


def _move_instances(pairs: Pairs) -> dict[str, str]:
    """Make instances and subclasses of the old classes those of the new; return the failures.

    So ``super()`` works in new methods. FSDP2 makes a subclass of the class of each model.
    """
    classes: dict[type, tuple[str, type]] = {
        before: (name, after) for name, before, after in pairs if isinstance(before, type)
    }
    kept: dict[str, str] = {}
    for instance in gc.get_referrers(*classes) if classes else ():
        if (found := classes.get(type(instance))) is not None:
            name, after = found
            if isinstance(instance, _FIXED):
                kept[name] = "objects that exist"
                continue
            try:
                object.__setattr__(instance, "__class__", after)
            except TypeError:  # such as another __slots__
                kept[name] = "objects that exist"
    for before, (name, after) in classes.items():
        subclasses: list[type] = before.__subclasses__()
        for subclass in subclasses:
            bases = tuple(after if base is before else base for base in subclass.__bases__)
            try:
                subclass.__bases__ = bases
            except TypeError:
                kept[name] = f"its subclass {subclass.__name__}"
    return kept


def _replace_references(pairs: Pairs) -> None:
    """Let names in cells and other modules, as of ``from model import Net``, mean the new ones."""
    replacements = {id(before): after for _, before, after in pairs}
    for module in list(sys.modules.values()):
        if _file_of(module) is not None or module is sys.modules["__main__"]:
            names = module.__dict__
            for name, value in list(names.items()):
                if id(value) in replacements:
                    names[name] = replacements[id(value)]
