"""The script: what was done on the ranks, in its order, with what stands before and after."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from nbddp.errors import RequestError
from nbddp.export.edits import indented
from nbddp.export.layout import Body, is_several, to_body
from nbddp.export.names import OF_IPYTHON, undefined_names
from nbddp.export.outline import Outline, names_in
from nbddp.export.plain import Plain, to_plain
from nbddp.export.plan import Item, Left, Plan, Program, Pulled, Sent
from nbddp.export.replacements import REPLACEMENTS
from nbddp.export.scaffold import (
    BEGIN,
    DISPLAY,
    FORM,
    FORM_AGAIN,
    GIVEN,
    Names,
    asks_for_shown,
    showing,
)
from nbddp.export.stores import KEEP, port_in, with_new_port
from nbddp.export.values import argument, is_argument, is_simple, literal
from nbddp.imports import import_aside
from nbddp.record.cell import CellRequest
from nbddp.record.names import bound_names
from nbddp.topology import TORCHRUN
from nbddp.wire.sources import dumps

PLACE = ("rank", "local_rank", "world_size", "device")
_MAKERS = frozenset({"exec", "globals", "setattr"})  # they make names that no text shows


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
    import_aside("nbddp.worker.lookahead")  # loads torch: not before there is a cell
    from nbddp.worker.lookahead import may_ask

    return may_ask(text, {})


class _Writer:
    def __init__(self, plan: Plan, path: Path) -> None:
        self._plan = plan
        self._path = path
        self._cells = _plain_cells(plan.items)
        texts = [each.text for each in self._cells]
        pushed = {name: "" for each in plan.items if isinstance(each, Sent) for name in each.values}
        self._outline = Outline(texts, {**GIVEN, **pushed})
        self._used = names_in(map(ast.parse, texts))
        bound = {name for text in texts for name in bound_names(text)}
        self._bound = bound | pushed.keys() | self._outline.star_names
        self._own = Names(self._outline, self._used | self._bound)
        self._imports: dict[str, None] = {}
        self._definitions: dict[str, None] = {}  # a mark, or what stands under it
        self._names: set[str] = set(PLACE)
        self._parts: list[str] = []
        self._arguments: dict[str, Any] = {}
        self._beside: dict[str, Any] = {}
        self._remarks: list[str] = []
        self._groups = 1
        self._keeps_stores = self._is_awaiting = False
        self._is_apart = False  # whether a rank may be further than others
        self.cells = 0

    def add(self, item: Item) -> None:
        """What was done next."""
        if isinstance(item, CellRequest):
            self._add_cell(item)
        elif isinstance(item, Sent):
            self._add_values(item)
        elif isinstance(item, Pulled):
            self._add_pulled(item)
        else:
            self._leave_out(item)

    def _leave_out(self, item: Left) -> None:
        self._remarks.append(f"{item.what}: left out: {item.reason}")
        self._parts.append(_comment(f"{item.what}: left out: {item.reason}"))

    def _add_pulled(self, item: Pulled) -> None:
        value = item.expression.strip()
        if unknown := self._unknown(value):
            reason = f"{', '.join(unknown)} came from what is left out"
            self._leave_out(Left(f"%ddp pull {value}", reason))
            return
        whom = None if item.rank is None else (item.rank,)
        value = f"({value})" if is_several(value) else value
        shown = f"{self._own['show']}({value}, {item.expression!r})"
        self._put(shown, whom, mark="%% pulled")

    def _unknown(self, expression: str) -> list[str]:
        """What it uses and no cell of the script makes, as far as can be told."""
        if self._outline.unknown_stars or self._used & _MAKERS:
            return []
        return [
            name
            for name in undefined_names(expression)
            if name not in {*self._bound, *GIVEN, *OF_IPYTHON} and not asks_for_shown([name])
        ]

    # ---- cells

    def _add_cell(self, request: CellRequest) -> None:
        number, plain = request.execution_count, self._cells[self.cells]
        show = "" if plain.is_silent else self._show(number)
        body = to_body(plain.text, up=self._outline.up(self.cells), show=show)
        self.cells += 1
        self._imports |= dict.fromkeys(
            [*body.imports, *(f"import {each}" for each in sorted(plain.modules))]
        )
        if new := [each for each in body.definitions if each not in self._definitions]:
            self._definitions |= dict.fromkeys([f"# %% definitions of cell [{number}]", *new])
        self._names |= body.names
        self._remarks += [f"cell [{number}]: {each}" for each in plain.left_out]
        if _asks_user(plain.text):
            self._remarks.append(f"cell [{number}]: it asks the user; torchrun's ranks cannot")
        if number in self._plan.above:
            self._parts.append(_markdown(self._plan.above[number]))
        text = self._awaited(body) if plain.is_awaiting else body.text
        before, after = self._around(text, needs_group=request.needs_group is not False)
        self._put(text, request.ranks, mark=f"%% cell [{number}]", before=before, after=after)

    def _around(self, text: str, *, needs_group: bool) -> tuple[str, str]:
        """What keeps ranks together: in the notebook a cell begins when all have ended the last."""
        dist, form = self._own["dist"], self._own["form_group"]
        before, after = f"{dist}.barrier()\n" if self._is_apart else "", ""
        if not needs_group:
            self._groups += 1
            before += f"{dist}.destroy_process_group()  # this cell makes its own\n"
            after = f"\n{form}({self._groups})"
        elif not _has_code(text):
            return "", ""
        elif "destroy_process_group" in text:
            self._groups += 1
            after = f"\nif not {dist}.is_initialized():\n    {form}({self._groups})"
        self._is_apart = needs_group
        return before, after

    def _awaited(self, body: Body) -> str:
        """One loop for all cells, as in the notebook: what one has begun goes on in the next."""
        self._is_awaiting = True
        inside = "\n".join([*_wrapped("global ", sorted(body.names), margin=""), body.text])
        cell, loop = self._own["cell"], self._own["loop"]
        return f"async def {cell}():\n{indented(inside)}\n\n{loop}.run_until_complete({cell}())"

    def _show(self, number: int) -> str:
        """The call that shows a cell's value."""
        show, name = self._own["show"], self._plan.out.get(number)
        more = f", {name!r}" if name else ""
        if asks_for_shown(self._used - self._bound):
            more += f", number={number}"
        return f"{show}({{}}{more})"

    def _put(
        self,
        text: str,
        ranks: Iterable[int] | None,
        *,
        mark: str,
        before: str = "",
        after: str = "",
    ) -> None:
        if ranks is not None:
            body = text if _has_code(text) else f"{text}\npass".lstrip("\n")
            is_bound = self._outline.is_made_by("rank", "given")
            rank = "rank" if is_bound else f"int({self._own['os']}.environ['RANK'])"
            text = f"if {rank} in {tuple(ranks)!r}:\n{indented(body)}"
        self._parts.append(f"# {mark}\n{indented(f'{before}{text}{after}')}")

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
                lines.append(f"{name} = {literal(value)}")
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
        whole = "\n\n".join([*self._definitions, body])
        uses_kit = bool(re.search(r"\bnbddp\b", whole))
        if self._plan.is_plain and uses_kit:
            self._remarks += _replacements(whole)
        text = self._assemble(body, uses_kit=uses_kit)
        try:
            unknown = undefined_names(text)
        except SyntaxError as error:
            raise RequestError(f"the script does not compile: {error}") from None
        if unknown:
            self._remarks[:0] = self._missing(unknown)
            text = self._assemble(body, uses_kit=uses_kit)
        return Program(
            text=text,
            pickled=self._pickled(),
            command=self._command(shlex.join(TORCHRUN), str(self._path)),
            remarks=tuple(self._remarks),
        )

    def _missing(self, names: Sequence[str]) -> Iterator[str]:
        """Why nobody defines them, as far as can be told."""
        others = [each for each in names if each not in OF_IPYTHON | self._outline.star_names]
        ways = [f"from {each} import *" for each in self._outline.unknown_stars]
        ways += [f"{each}()" for each in sorted(_MAKERS & self._used)]
        if others and ways:
            yield f"nobody defines {', '.join(others)}, unless {' or '.join(ways)} does"
        elif others:
            yield f"nobody defines {', '.join(others)}: it came from what is left out"
        if mine := [each for each in names if each in OF_IPYTHON]:
            yield f"{', '.join(mine)}: IPython has it, a script has not"

    def _pickled(self) -> bytes:
        return dumps(self._beside) if self._beside else b""

    def _command(self, launcher: str, path: str) -> str:
        file = shlex.quote(path)
        return f"{launcher} --standalone --nnodes=1 --nproc-per-node={self._plan.nproc} {file}"

    def _assemble(self, body: str, *, uses_kit: bool) -> str:
        notes = [_comment(f"- {each}") for each in self._remarks]
        about = "\n".join(["# What the notebook did and this script does not, or needs:", *notes])
        command = self._command("torchrun", self._path.name)
        command = command.replace("\\", "\\\\").replace('"', '\\"')
        own, wanted = self._own, self._used - self._bound
        shows = f"{own['show']}(" in body
        asked = asks_for_shown(wanted)
        pieces = [
            f'"""Exported by nbddp from the cells of a notebook.\n\n    {command}\n"""',
            about if notes else "",
            "\n".join(self._head(uses_kit=uses_kit)),
            "\n\n\n".join(self._definitions),
            DISPLAY if "display" in wanted else "",
            showing(own, keeps=asked) if shows or asked else "",
            self._form_group(),
            KEEP.format_map(own) if self._keeps_stores else "",
            self._main(body),
            f'if __name__ == "__main__":\n    {own["main"]}()',
        ]
        return "\n\n\n".join(each for each in pieces if each) + "\n"

    def _head(self, *, uses_kit: bool) -> Iterator[str]:
        """Imports: of the language's future, of what is needed here, of the cells."""
        has_paths = any(isinstance(each, PurePath) for each in self._arguments.values())
        needed = {
            "os": True,
            "torch": True,
            "dist": True,
            "argparse": bool(self._arguments),
            "asyncio": self._is_awaiting,
            "pickle": bool(self._beside),
            "Path": bool(self._beside) or has_paths,
            "timedelta": bool(self._plan.timeout),
            "record": True,
        }
        own = list(self._own.imports([name for name, is_needed in needed.items() if is_needed]))
        given = ["import torch", "import torch.distributed as dist"]
        given += ["import nbddp"] if uses_kit else []
        lines = dict.fromkeys([*own, *given, *self._imports])
        future = [each for each in lines if each.startswith("from __future__")]
        yield from future
        yield from (each for each in lines if each not in future)

    def _form_group(self) -> str:
        plan, own = self._plan, self._own
        backend = (
            f'"nccl" if {own["torch"]}.cuda.device_count() >= '
            f'int({own["os"]}.environ["LOCAL_WORLD_SIZE"]) else "gloo"'
            if plan.backend == "auto"
            else repr(plan.backend)
        )
        more = f", timeout={own['timedelta']}(seconds={plan.timeout:g})" if plan.timeout else ""
        form = FORM_AGAIN if self._groups > 1 else FORM
        return form.format(**own, backend=backend, more=more)

    def _main(self, body: str) -> str:
        own = self._own
        before = [
            f"@{own['record']}",
            f"def {own['main']}():",
            *_wrapped("global ", sorted(self._names)),
            BEGIN.format(**own, threads=self._plan.threads),
            *self._parsing(),
        ]
        if self._is_awaiting:
            before.append(f"    {own['loop']} = {own['asyncio']}.new_event_loop()")
        end = f"{own['dist']}.destroy_process_group()"
        last = f"{own['dist']}.barrier()  # the stores end with rank 0\n    " * self._keeps_stores
        return "\n".join(before) + f"\n\n{body}\n\n# %%\n    {last}{end}"

    def _parsing(self) -> Iterator[str]:
        own = self._own
        if self._arguments:
            yield f"    {own['parser']} = {own['argparse']}.ArgumentParser()"
            for name, value in self._arguments.items():
                yield f"    {own['parser']}.{argument(name, value, path=own['Path'])}"
            yield f"    {own['arguments']} = {own['parser']}.parse_args()"
        if self._beside:
            file = f'{own["Path"]}(__file__).with_suffix(".pushed.pkl").read_bytes()'
            yield f"    {own['pushed']} = {own['pickle']}.loads({file})"


def _plain_cells(items: Sequence[Item]) -> list[Plain]:
    """The cells in plain Python; a command of the shell may speak of whatever they bind."""
    cells = [each for each in items if isinstance(each, CellRequest)]
    names = {name for each in items if isinstance(each, Sent) for name in each.values}
    for each in cells:
        names |= bound_names(to_plain(each.source).text)
    return [to_plain(each.source, names | GIVEN.keys()) for each in cells]


def _has_code(text: str) -> bool:
    return bool(ast.parse(text).body)


def _comment(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.split("\n"))


def _markdown(text: str) -> str:
    return f"# %% [markdown]\n{_comment(text)}"


def _wrapped(
    word: str, names: Sequence[str], *, margin: str = "    ", width: int = 80
) -> Iterator[str]:
    """Declarations of names, in lines that can be read."""
    line = ""
    for name in names:
        if line and len(line) + len(name) > width:
            yield f"{margin}{word}{line}"
            line = ""
        line = f"{line}, {name}" if line else name
    if line:
        yield f"{margin}{word}{line}"


def _replacements(body: str) -> list[str]:
    used = sorted(set(re.findall(r"\bnbddp\.(\w+)", body)))
    return [f"nbddp.{name}: {REPLACEMENTS[name]}" for name in used if name in REPLACEMENTS]
