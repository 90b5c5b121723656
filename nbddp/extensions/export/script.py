"""Write cells and pushed values as one script for torchrun.

The cells stay at module level. Code that a spawned process needs is outside of
``if __name__ == "__main__":``, all other code is inside.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from nbddp.errors import RequestError
from nbddp.extensions.export import template
from nbddp.extensions.export.ipython_syntax import (
    Edit,
    PlainCell,
    apply_edits,
    span,
    translate_cell,
)
from nbddp.extensions.export.main_guard import (
    GUARD,
    IPYTHON_NAMES,
    Definition,
    indent,
    split_by_guard,
    undefined_names,
)
from nbddp.record.cell import CellRequest
from nbddp.record.replay_log import SET_IN_EACH_RANK, assigned_names
from nbddp.topology import TORCHRUN
from nbddp.wire.function_sources import dumps
from nbddp.wire.group_spec import BACKENDS, GroupSpec

MAX_LITERAL = 500  # characters of a value that is written as a literal
PREDEFINED_NAMES = frozenset({"torch", "dist", "nbddp", "os"})


@dataclass(frozen=True, slots=True)
class PushedValues:
    """Values that the notebook pushed to some ranks, or to all ranks."""

    values: Mapping[str, Any]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PulledValue:
    """An expression that the notebook pulled; the script prints its value."""

    expression: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Omitted:
    """An item that the script leaves out, and the reason; ``source`` is the cell's code."""

    what: str
    reason: str
    source: str = ""


Item = CellRequest | PushedValues | PulledValue | Omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedScript:
    """An exported script.

    Attributes:
        text: the text of the script.
        pickled: the content of a second file with pickled values; empty if there are none.
        command: the command that runs the script.
        remarks: notes for the user, such as undefined names and omitted cells.
    """

    text: str
    pickled: bytes
    command: str
    remarks: tuple[str, ...]


def write_script(
    items: Iterable[Item], path: Path, spec: GroupSpec, ports: Collection[int] = ()
) -> ExportedScript:
    """Write a script.

    Args:
        items: the cells, pushes and pulls in their order.
        path: the path of the script.
        spec: the options of the worker group.
        ports: the ports of stores in the notebook's process.

    Raises:
        RequestError: there is nothing to export, or the script does not compile.
    """
    writer = _Writer(path, spec, ports)
    for item in items:
        writer.add(item)
    if not writer.cells:
        raise RequestError("no cell has succeeded since the ranks started: nothing to export")
    return writer.finish()


class _Writer:
    def __init__(self, path: Path, spec: GroupSpec, ports: Collection[int]) -> None:
        self._path, self._spec, self._ports = path, spec, ports
        self._parts: list[str] = []
        self._remarks: list[str] = []
        self._future_imports: dict[str, None] = {}
        self._top_level_names = {*PREDEFINED_NAMES}
        self._bound_names: set[str] = {*SET_IN_EACH_RANK}
        self._omitted_names: dict[str, str] = {}  # omitted names, each with its omitted item
        self._arguments: dict[str, Any] = {}
        self._pickled_values: dict[str, Any] = {}
        self._n_groups = 1
        self._may_be_out_of_step = False
        self.cells = 0

    def add(self, item: Item) -> None:
        """Add the next item."""
        match item:
            case CellRequest():
                self._add_cell(item)
            case PushedValues():
                self._add_values(item)
            case PulledValue():
                self._add_pulled(item)
            case Omitted():
                names: Collection[str] = ()
                with suppress(SyntaxError):  # the cell may have failed with one
                    names = assigned_names(translate_cell(item.source).text)
                names = {*names} - self._bound_names  # an earlier cell may have bound them
                self._omit(item.what, item.reason, names=names)

    def _omit(self, what: str, reason: str, *, names: Collection[str] = ()) -> None:
        self._remarks.append(f"{what}: left out: {reason}")
        self._omitted_names |= dict.fromkeys(names, what)

    def _why_it_cannot_run(self, text: str) -> str:
        """Return why code cannot run: it reads a name that was left out; empty if it can run."""
        names = [each for each in undefined_names(text) if each in self._omitted_names]
        return ", ".join(f"it uses {each} from {self._omitted_names[each]}" for each in names)

    # ---- cells

    def _add_cell(self, request: CellRequest) -> None:
        what = f"cell [{request.execution_count}]"
        plain = translate_cell(request.source)
        try:
            reason = self._why_it_cannot_run(plain.text)
        except SyntaxError:
            self._omit(what, "it uses await at top level", names=assigned_names(plain.text))
            return
        bound = assigned_names(plain.text)
        if clashes := sorted(bound & template.OWN_NAMES):
            reason = f"it assigns {clashes[0]}, a name that the script needs itself"
        if reason:
            self._omit(what, reason, names=bound)
            return
        self.cells += 1
        self._remarks += [f"{what}: {each}" for each in plain.remarks]
        self._bound_names |= bound
        self._omitted_names = {
            name: why for name, why in self._omitted_names.items() if name not in bound
        }
        text = self._as_module(_with_last_value_printed(plain, request.output_name))
        self._parts.append(f"# %% {what}")
        if request.needs_group is False:
            self._add_guarded("_dist.destroy_process_group()  # the cell creates its own")
        self._add_cell_parts(text, request)
        if request.needs_group is False or "destroy_process_group" in text:
            self._n_groups += 1
            call = f"_init_process_group({self._n_groups})"
            is_sure = request.needs_group is False
            self._add_guarded(call if is_sure else f"if not _dist.is_initialized():\n    {call}")
        self._may_be_out_of_step = True

    def _add_cell_parts(self, text: str, request: CellRequest) -> None:
        needs_wait = self._may_be_out_of_step and request.needs_group is not False
        is_for_all = request.ranks is None
        parts = split_by_guard(text, self._top_level_names, is_for_all=is_for_all)
        for must_be_guarded, part in parts:
            if not must_be_guarded:
                self._parts.append(part)
                continue
            has_code = bool(ast.parse(part).body)
            if request.ranks is not None and has_code:
                part = f"if _RANK in {tuple(request.ranks)!r}:\n{indent(part)}"
            if needs_wait and has_code:
                part, needs_wait = f"_wait_for_all()\n{part}", False
            self._add_guarded(part)

    def _add_guarded(self, text: str) -> None:
        """Add code that only the main process of the script runs, and not a spawned process."""
        if not ast.parse(text).body:
            self._parts.append(text)
        elif self._parts and self._parts[-1].startswith(GUARD):
            self._parts[-1] += f"\n{indent(text)}"
        else:
            self._parts.append(f"{GUARD}\n{indent(text)}")

    def _as_module(self, text: str) -> str:
        """Remove ``global`` outside of functions, and collect the ``__future__`` imports."""
        edits: list[Edit] = []
        pending: list[ast.stmt] = [*ast.parse(text).body]
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Global):
                edits.append((*span(text, node), "pass"))
            elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
                self._future_imports[ast.unparse(node)] = None
                edits.append((*span(text, node), ""))
            elif not isinstance(node, Definition):
                pending += [
                    child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
                ]
        return apply_edits(text, edits)

    def _add_pulled(self, item: PulledValue) -> None:
        value = item.expression.strip()
        names = {*undefined_names(value)} - self._bound_names
        if reason := self._why_it_cannot_run(value) or ", ".join(sorted(names & IPYTHON_NAMES)):
            self._omit(f"%ddp pull {value}", reason)
            return
        text = f"_print_value({_as_argument(value)}, {item.expression!r})"
        if item.rank is not None:
            text = f"if _RANK == {item.rank}:\n    {text}"
        self._parts.append("# %% pulled")
        self._add_guarded(text)

    # ---- values

    def _add_values(self, pushed: PushedValues) -> None:
        lines = []
        for name, value in pushed.values.items():
            if _refers_to_port(value, self._ports):
                self._omit(name, "the store is in the notebook's process", names=[name])
                continue
            is_first = name not in self._bound_names and pushed.ranks is None
            self._bound_names.add(name)
            self._omitted_names.pop(name, None)
            if is_first and is_option(name, value):
                self._arguments[name] = value
            if self._is_value_of_option(name, value):
                lines.append(f"{name} = _args.{name}")
            elif text := python_literal(value):
                lines.append(f"{name} = {text}")
            else:
                key = f"{len(self._pickled_values)} {name}"
                self._pickled_values[key] = value
                lines.append(f"{name} = _pushed[{key!r}]")
        if lines:
            text = "\n".join(lines)
            if pushed.ranks is not None:
                text = f"if _RANK in {pushed.ranks!r}:\n{indent(text)}"
            self._parts.append("# %% pushed by the notebook")
            self._add_guarded(text)

    def _is_value_of_option(self, name: str, value: Any) -> bool:
        """Return whether an option has this value as its default, from an earlier push."""
        if name not in self._arguments:
            return False
        old_value = self._arguments[name]
        return type(value) is type(old_value) and bool(value == old_value)

    # ---- the whole script

    def finish(self) -> ExportedScript:
        """Assemble the script, and look for undefined names."""
        text = self._assemble()
        try:
            unknown = undefined_names(text)
        except SyntaxError as error:
            raise RequestError(f"the script does not compile: {error}") from None
        if unknown:
            is_unsure = re.search(r"import \*|exec\(", text)
            may_be = ", unless `import *` or `exec` defines it" if is_unsure else ""
            self._remarks.insert(0, f"{', '.join(unknown)}: not defined in the script{may_be}")
            text = self._assemble()
        return ExportedScript(
            text=text,
            pickled=dumps(self._pickled_values) if self._pickled_values else b"",
            command=self._command(shlex.join(TORCHRUN), str(self._path)),
            remarks=tuple(self._remarks),
        )

    def _command(self, launcher: str, path: str) -> str:
        nproc, file = self._spec.nproc, shlex.quote(path)
        return f"{launcher} --standalone --nnodes=1 --nproc-per-node={nproc} {file}"

    def _assemble(self) -> str:
        body = "\n\n".join(self._parts)
        command = self._command("torchrun", self._path.name)
        command = command.replace("\\", "\\\\").replace('"', '\\"')
        notes = [f"# - {each}".replace("\n", "\n#   ") for each in self._remarks]
        about = "\n".join(["# This script differs from the notebook, or needs changes:", *notes])
        wants_display = "display" in body and "display" not in self._bound_names
        frame = [
            template.NAMES,
            template.INIT_GROUP_AGAIN if self._n_groups > 1 else "",
            template.WAIT_FOR_ALL if "_wait_for_all()" in body else "",
            template.PRINT_VALUE if "_print_value(" in body else "",
            template.DISPLAY if wants_display else "",
            f"{GUARD}\n{self._setup_code(body)}",
        ]
        modules = ("argparse", "datetime", "os", "pathlib", "pickle")
        used = [name for name in modules if any(f"{name}." in each for each in frame)]
        imports = [
            *self._future_imports,
            *(f"import {name}" for name in used),
            "",
            template.IMPORTS,
        ]
        if re.search(r"\bnbddp\b", body):
            imports += ["", "import nbddp"]
        pieces = [
            f'"""Exported by nbddp from the cells of a notebook.\n\n    {command}\n"""',
            about if notes else "",
            "\n".join(imports),
            *frame,
            f"{body}\n\n# %%\n{GUARD}\n{template.CLEANUP}\n",
        ]
        return "\n\n\n".join(filter(None, pieces))

    def _setup_code(self, body: str) -> str:
        spec, timeout = self._spec, ""
        backend = template.AUTO_BACKEND
        if spec.backend != "auto":  # torchrun has no backend of an extension
            backend = repr(spec.backend if spec.backend in BACKENDS else "gloo")
        if spec.timeout != GroupSpec().timeout:
            timeout = f", timeout=datetime.timedelta(seconds={spec.timeout})"
        init = template.INIT_FIRST_GROUP if self._n_groups > 1 else template.INIT_GROUP
        facts = template.FACTS.format(threads=spec.threads_per_rank())
        lines = [template.SETUP, init.format(backend=backend, timeout=timeout), facts]
        if re.search(r"\b(accelerate|transformers|trl)\b", body):
            lines.append(template.USE_CPU)
        if self._arguments:
            lines.append("    _parser = argparse.ArgumentParser()")
            lines += [f"    _parser.{option_call(*each)}" for each in self._arguments.items()]
            lines.append("    _args = _parser.parse_args()")
        if self._pickled_values:
            file = 'pathlib.Path(__file__).with_suffix(".pushed.pkl").read_bytes()'
            lines.append(f"    _pushed = pickle.loads({file})")
        return "\n".join(lines)


def _with_last_value_printed(plain: PlainCell, name: str) -> str:
    """Return the cell with a call that prints its last value, as the notebook does."""
    body = ast.parse(plain.text).body
    last = body[-1] if body else None
    if plain.is_silent or not isinstance(last, ast.Expr):
        return plain.text
    start, end = span(plain.text, last)
    data = plain.text.encode()
    value, rest = data[start:end].decode(), data[end:].decode().lstrip(" \t")
    is_print = isinstance(last.value, ast.Call) and ast.unparse(last.value.func) == "print"
    if rest.startswith(";") or is_print or value == "None":
        return plain.text
    more = f", {name!r}" if name else ""
    call = f"_print_value({_as_argument(value)}{more})"
    return apply_edits(plain.text, [(start, end, call)])


def _as_argument(expression: str) -> str:
    """Return an expression as one argument, in parentheses if it could be read as several.

    >>> _as_argument("x + 1"), _as_argument("x, y")
    ('x + 1', '(x, y)')
    """
    value: Any = ast.parse(f"({expression}\n)", mode="eval").body
    is_plain = not isinstance(value, ast.Tuple | ast.GeneratorExp | ast.NamedExpr | ast.Yield)
    return expression if is_plain else f"({expression})"


def _refers_to_port(value: Any, ports: Collection[int]) -> bool:
    """Return whether a value is the port or the address of a store in the notebook's process."""
    if type(value) is int:
        return value in ports
    return isinstance(value, str) and any(re.search(rf":{port}(?!\d)", value) for port in ports)


def is_option(name: str, value: Any) -> bool:
    """Return whether a pushed value becomes a command-line option of the script."""
    is_number = type(value) is int or (type(value) is float and math.isfinite(value))
    is_kind = is_number or type(value) is str or isinstance(value, PurePath)
    return is_kind and name != "help"  # argparse defines --help


def option_call(name: str, value: Any) -> str:
    """Return the call that adds an option to the script's parser.

    >>> option_call("lr_max", 0.1)
    "add_argument('--lr-max', dest='lr_max', type=float, default=0.1)"
    """
    kind, default = type(value).__name__, value
    if isinstance(value, PurePath):
        kind, default = "pathlib.Path", str(value)
    flag = "--" + name.replace("_", "-")
    return f"add_argument({flag!r}, dest={name!r}, type={kind}, default={default!r})"


def python_literal(value: Any) -> str:
    """Return a Python literal of a value; empty if there is none.

    >>> python_literal({"a": (1, None)}), python_literal(float("nan")), python_literal(print)
    ("{'a': (1, None)}", '', '')
    """
    text = repr(value)
    try:
        same = len(text) <= MAX_LITERAL and ast.literal_eval(text)
        is_same = type(same) is type(value) and same == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""
    return text if is_same else ""
