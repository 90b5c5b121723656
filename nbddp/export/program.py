"""The script: what was done on the ranks, in its order, with what stands before and after."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from nbddp.errors import RequestError
from nbddp.export.edits import indented
from nbddp.export.layout import to_body
from nbddp.export.names import undefined_names
from nbddp.export.plain import to_plain
from nbddp.export.replacements import REPLACEMENTS
from nbddp.export.stores import KEEP, port_in, with_new_port
from nbddp.export.values import argument, is_argument, is_simple
from nbddp.record.cell import CellRequest
from nbddp.record.names import bound_names
from nbddp.wire.parcels import dumps

GIVEN = ("rank", "local_rank", "world_size", "device")
MARGIN = "    "


@dataclass(frozen=True, slots=True)
class Sent:
    """Values that were pushed, to these ranks or to all."""

    values: Mapping[str, Any]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """What the notebook fetched: the script prints it."""

    expression: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """What has no place in a script, and why."""

    what: str
    reason: str


Item = CellRequest | Sent | Pulled | Left


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a script is made of.

    Attributes:
        items: in their order.
        nproc: ranks on a machine.
        backend: as torch calls it; ``auto`` for nccl where each rank has a GPU.
        timeout: of collectives, in seconds; 0 for torch's own.
        threads: of torch's operators in each rank.
        out: by a cell's prompt number, the name that its values have in the notebook.
        above: by a cell's prompt number, what the notebook says above it, in Markdown.
        ports: of stores that the notebook kept when it pushed something.
        is_plain: whether to say what stands for nbddp's own functions.
    """

    items: Sequence[Item]
    nproc: int
    backend: str = "auto"
    timeout: float = 0.0
    threads: int = 1
    out: Mapping[int, str] = field(default_factory=dict)
    above: Mapping[int, str] = field(default_factory=dict)
    ports: frozenset[int] = frozenset()
    is_plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script.

    Attributes:
        text: of the file.
        pickled: what lies in a file beside it, empty if nothing does.
        command: the line that runs it.
        remarks: what the user should know: names that nobody defines, what was left out.
    """

    text: str
    pickled: bytes
    command: str
    remarks: tuple[str, ...]


def write_program(plan: Plan, path: Path) -> Program:
    """Make the script of what was done.

    Args:
        plan: what to make it of.
        path: of the file that it is for.

    Raises:
        RequestError: nothing has been done, or it does not compile.
    """
    writer = _Writer(plan, path)
    for item in plan.items:
        writer.add(item)
    if not writer.cells:
        raise RequestError("no cell has gone well since the ranks started: nothing to export")
    return writer.finish()


def _asks_user(text: str) -> bool:
    from nbddp.worker.lookahead import may_ask  # loads torch: not before there is a cell

    return may_ask(text, {})


class _Writer:
    def __init__(self, plan: Plan, path: Path) -> None:
        self._plan = plan
        self._path = path
        self._own = _own_names(plan.items)
        self._imports: dict[str, None] = {}
        self._names: set[str] = set(GIVEN)
        self._parts: list[str] = []
        self._arguments: dict[str, Any] = {}
        self._beside: dict[str, Any] = {}
        self._remarks: list[str] = []
        self._groups = 1
        self._keeps_stores = False
        self.cells = 0

    def add(self, item: Item) -> None:
        """What was done next."""
        if isinstance(item, CellRequest):
            self._add_cell(item)
        elif isinstance(item, Sent):
            self._add_values(item)
        elif isinstance(item, Pulled):
            whom = None if item.rank is None else (item.rank,)
            shown = f"{self._own['show']}({item.expression}, {item.expression!r})"
            self._put(shown, whom, mark="%% pulled")
        else:
            self._remarks.append(f"{item.what}: left out: {item.reason}")
            self._parts.append(_comment(f"{item.what}: left out: {item.reason}"))

    # ---- cells

    def _add_cell(self, request: CellRequest) -> None:
        number = request.execution_count
        plain = to_plain(request.source)
        name = self._plan.out.get(number)
        show = self._own["show"]
        body = to_body(plain.text, show=f"{show}({{}}, {name!r})" if name else f"{show}({{}})")
        self._imports |= dict.fromkeys(
            [*body.imports, *(f"import {each}" for each in sorted(plain.modules))]
        )
        self._names |= body.names
        self._remarks += [f"cell [{number}]: {each}" for each in plain.left_out]
        if _asks_user(plain.text):
            self._remarks.append(f"cell [{number}]: it asks the user; torchrun's ranks cannot")
        self.cells += 1
        if number in self._plan.above:
            self._parts.append(_markdown(self._plan.above[number]))
        text = body.text
        if not request.needs_group:
            self._groups += 1
            again = f"{self._own['form_group']}({self._groups})"
            text = f"dist.destroy_process_group()  # this cell makes its own\n{text}\n{again}"
        self._put(text, request.ranks, mark=f"%% cell [{number}]")

    def _put(self, text: str, ranks: Iterable[int] | None, *, mark: str) -> None:
        if ranks is not None:
            body = text if _has_code(text) else f"{text}\npass".lstrip("\n")
            text = f"if rank in {tuple(ranks)!r}:\n{indented(body)}"
        self._parts.append(f"# {mark}\n{indented(text)}")

    # ---- values

    def _add_values(self, sent: Sent) -> None:
        lines = []
        for name, value in sent.values.items():
            is_first = name not in self._names and sent.ranks is None
            self._names.add(name)
            if (port := port_in(value, self._plan.ports)) is not None:
                self._keep_store(name, port)
                new = f"{self._own['ports']}[{port}]"
                lines.append(f"{name} = {with_new_port(value, port, new)}")
            elif is_first and is_argument(name, value):
                self._arguments[name] = value
                lines.append(f"{name} = {self._own['arguments']}.{name}")
            elif is_simple(value):
                lines.append(f"{name} = {value!r}")
            else:
                key = f"{len(self._beside)} {name}"
                self._beside[key] = value
                lines.append(f"{name} = {self._own['pushed']}[{key!r}]")
        self._put("\n".join(lines), sent.ranks, mark="%% pushed by the notebook")

    def _keep_store(self, name: str, port: int) -> None:
        """All ranks do so, whoever is told of it."""
        self._put(f"{self._own['keep_store']}({port})", None, mark="%% a store")
        self._keeps_stores = True
        self._remarks.append(
            f"{name}: the notebook kept a store there: rank 0 keeps one in its place"
        )

    # ---- the whole

    def finish(self) -> Program:
        """Put it together, and look it through."""
        body = "\n\n".join(self._parts)
        uses_kit = bool(re.search(r"\bnbddp\b", body))
        if self._plan.is_plain and uses_kit:
            self._remarks += _replacements(body)
        text = self._assemble(body, uses_kit=uses_kit)
        try:
            unknown = undefined_names(text)
        except SyntaxError as error:
            raise RequestError(f"the script does not compile: {error}") from None
        if unknown:
            names = ", ".join(unknown)
            self._remarks.insert(0, f"nobody defines {names}: it came from what is left out")
            text = self._assemble(body, uses_kit=uses_kit)
        return Program(
            text=text,
            pickled=self._pickled(),
            command=self._command(),
            remarks=tuple(self._remarks),
        )

    def _pickled(self) -> bytes:
        return dumps(self._beside) if self._beside else b""

    def _command(self) -> str:
        return f"torchrun --standalone --nproc-per-node={self._plan.nproc} {self._path.name}"

    def _assemble(self, body: str, *, uses_kit: bool) -> str:
        notes = [f"# - {each}" for each in self._remarks]
        show = self._own["show"]
        about = "\n".join(["# What the notebook did and this script does not, or needs:", *notes])
        pieces = [
            f'"""Exported by nbddp from the cells of a notebook.\n\n    {self._command()}\n"""',
            about if notes else "",
            "\n".join(self._head(uses_kit=uses_kit)),
            _SHOW.format(show=show) if f"{show}(" in body else "",
            self._form_group(),
            KEEP.format(**self._own) if self._keeps_stores else "",
            self._main(body),
            'if __name__ == "__main__":\n    main()',
        ]
        return "\n\n\n".join(each for each in pieces if each) + "\n"

    def _head(self, *, uses_kit: bool) -> Iterator[str]:
        """Imports: of the language's future, of what is needed here, of the cells."""
        needed = ["import os", "import torch", "import torch.distributed as dist"]
        needed += ["import argparse"] if self._arguments else []
        needed += ["import pickle"] if self._beside else []
        has_paths = any(isinstance(each, PurePath) for each in self._arguments.values())
        needed += ["from pathlib import Path"] if self._beside or has_paths else []
        needed += ["import nbddp"] if uses_kit else []
        needed += ["from datetime import timedelta"] if self._plan.timeout else []
        needed += ["from torch.distributed.elastic.multiprocessing.errors import record"]
        lines = dict.fromkeys([*needed, *self._imports])
        future = [each for each in lines if each.startswith("from __future__")]
        yield from future
        yield from (each for each in lines if each not in future)

    def _form_group(self) -> str:
        plan = self._plan
        backend = (
            '"nccl" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"'
            if plan.backend == "auto"
            else repr(plan.backend)
        )
        more = f", timeout=timedelta(seconds={plan.timeout:g})" if plan.timeout else ""
        if self._groups > 1:
            return _FORM_AGAIN.format(form=self._own["form_group"], backend=backend, more=more)
        return (
            f"def {self._own['form_group']}():\n"
            f"    backend = {backend}\n"
            f"    dist.init_process_group(backend{more})"
        )

    def _main(self, body: str) -> str:
        names = sorted(self._names)
        before = [
            "@record",
            "def main():",
            *_wrapped("global ", names),
            f"    {self._own['form_group']}()",
            "    rank, world_size = dist.get_rank(), dist.get_world_size()",
            '    local_rank = int(os.environ["LOCAL_RANK"])',
            "    gpus = torch.cuda.device_count()",
            '    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")',
            "    if gpus:",
            "        torch.cuda.set_device(device)",
            f"    torch.set_num_threads({self._plan.threads})  # as in the notebook",
            *self._parsing(),
        ]
        last = "    dist.barrier()  # the stores end with rank 0\n" if self._keeps_stores else ""
        return "\n".join(before) + f"\n\n{body}\n\n# %%\n{last}    dist.destroy_process_group()"

    def _parsing(self) -> Iterator[str]:
        if self._arguments:
            yield "    parser = argparse.ArgumentParser()"
            for name, value in self._arguments.items():
                yield f"    parser.{argument(name, value)}"
            yield f"    {self._own['arguments']} = parser.parse_args()"
        if self._beside:
            file = 'Path(__file__).with_suffix(".pushed.pkl").read_bytes()'
            yield f"    {self._own['pushed']} = pickle.loads({file})"


_SHOW = '''def {show}(value, name="Out"):
    """Print what the notebook showed."""
    if value is not None:
        print(f"[rank {{os.environ['RANK']}}] {{name}} {{value!r}}\\n", end="", flush=True)'''


# under torchrun a second init_process_group() of torch 2.13 finds the addresses of the first, and
# fails: tried with gloo and 4 ranks
_FORM_AGAIN = '''def {form}(number=1):
    """Meet under keys that were not used before: the first group's addresses are gone."""
    backend = {backend}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    place = dict(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    fresh = dist.PrefixStore(f"group {{number}}", store)
    dist.init_process_group(backend, store=fresh, **place{more})'''


def _own_names(items: Sequence[Item]) -> dict[str, str]:
    """What the script's own helpers are called: as long as no cell has the name, by their own."""
    taken = {name for item in items if isinstance(item, Sent) for name in item.values}
    for item in items:
        if isinstance(item, CellRequest):
            taken |= bound_names(to_plain(item.source).text)
    own = {}
    for name in ("show", "form_group", "arguments", "pushed", "keep_store", "ports", "stores"):
        own[name] = name
        while own[name] in taken:
            own[name] += "_"
    return own


def _has_code(text: str) -> bool:
    return bool(ast.parse(text).body)


def _comment(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.split("\n"))


def _markdown(text: str) -> str:
    return f"# %% [markdown]\n{_comment(text)}"


def _wrapped(word: str, names: Sequence[str], width: int = 80) -> Iterator[str]:
    """Declarations of names, in lines that can be read."""
    line = ""
    for name in names:
        if line and len(line) + len(name) > width:
            yield f"    {word}{line}"
            line = ""
        line = f"{line}, {name}" if line else name
    if line:
        yield f"    {word}{line}"


def _replacements(body: str) -> list[str]:
    used = sorted(set(re.findall(r"\bnbddp\.(\w+)", body)))
    return [f"nbddp.{name}: {REPLACEMENTS[name]}" for name in used if name in REPLACEMENTS]
