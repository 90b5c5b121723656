"""Break ten central modules in small ways, one at a time: python tools/mutants.py [TARGET ...].

The unit tests of its package should fail for each mutant. Those for which all tests pass are
written to tests/surviving_mutants.txt; a change of the tests should add none.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SURVIVORS = ROOT / "tests" / "surviving_mutants.txt"
PER_TARGET = 32
WORKERS = 2
SECONDS = 600  # a mutant whose tests take longer has been noticed

TARGETS = {  # name: (file in nbddp/, folder in tests/)
    "advance": ("lifecycle/transitions.py", "unit/lifecycle"),
    "verdict": ("record/verdict.py", "unit/record"),
    "hang detector": ("record/hang_detector.py", "unit/record"),
    "replay": ("record/replay_log.py", "unit/record"),
    "rebind": ("worker/process_group/bound_objects.py", "unit/worker"),
    "signature": ("wire/envelope.py", "unit/wire"),
    "checkpoint commit": ("extensions/train/checkpoint/atomic_files.py", "extensions/train"),
    "sampler": ("extensions/train/epoch_batches.py", "extensions/train"),
    "matcher": ("record/collectives/collective_matcher.py", "unit/record"),
    "codec": ("wire/messages.py", "unit/wire"),
}

OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}


class Mutant(NamedTuple):
    """A module with one change."""

    target: str
    description: str
    source: str


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may replace this one."""
    match node:
        case ast.Compare(left, [operator], comparators):
            yield ast.Compare(left, [OTHER_COMPARISON[type(operator)]()], comparators)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, operator, right) if type(operator) in OTHER_OPERATOR:
            yield ast.BinOp(left, OTHER_OPERATOR[type(operator)](), right)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield ast.Pass()


def mutants(target: str, source: str) -> list[Mutant]:
    """Return at most PER_TARGET mutants of a module, evenly spread over its functions."""
    found = []
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for parent in (node for part in function.body for node in ast.walk(part)):
            for field, child in places(parent):
                for other in replacements(child):
                    before = ast.unparse(child)
                    put(parent, field, other)
                    after = ast.unparse(ast.fix_missing_locations(other))
                    name = f"{target}: {function.name}: {before!r} -> {after!r}"
                    found.append(Mutant(target, name, ast.unparse(tree)))
                    put(parent, field, child)
    step = max(1, len(found) / PER_TARGET)
    return [found[int(number * step)] for number in range(min(PER_TARGET, len(found)))]


def places(parent: ast.AST) -> Iterator[tuple[tuple[str, int | None], ast.AST]]:
    """Yield each child of a node, and its place: the field, and the index if that is a list."""
    for name, value in ast.iter_fields(parent):
        if isinstance(value, ast.AST):
            yield (name, None), value
        elif isinstance(value, list):
            for index, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield (name, index), child


def put(parent: ast.AST, place: tuple[str, int | None], child: ast.AST) -> None:
    """Set one child of a node."""
    name, index = place
    if index is None:
        setattr(parent, name, child)
    else:
        getattr(parent, name)[index] = child


def passes(copy: Path, target: str, source: str) -> bool:
    """Return whether the unit tests of a target pass with another source."""
    file, tests = TARGETS[target]
    path = copy / "nbddp" / file
    original = path.read_text()
    path.write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "unit"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            [*command, "-p", "no:cacheprovider", f"tests/{tests}"],
            cwd=copy,
            env=environment,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(original)
    return run.returncode == 0


def main(names: list[str]) -> None:
    """Test all mutants of the named targets, and write those that survive."""
    earlier = SURVIVORS.read_text().splitlines()
    survivors = [line for line in earlier if line.partition(":")[0] not in names]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(WORKERS):
            copy = Path(folder, str(number))
            for part in ("nbddp", "tests", "tools"):
                shutil.copytree(ROOT / part, copy / part)
            shutil.copy(ROOT / "pyproject.toml", copy)
            copies.put(copy)

        def survives(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                return passes(copy, mutant.target, mutant.source)
            finally:
                copies.put(copy)

        for target in names:
            source = (ROOT / "nbddp" / TARGETS[target][0]).read_text()
            unchanged = Mutant(target, "", ast.unparse(ast.parse(source)))
            if not survives(unchanged):
                sys.exit(f"{target}: the tests fail without a mutant")
            tried = mutants(target, source)
            alive = [
                mutant.description
                for mutant, is_alive in zip(tried, pool.map(survives, tried), strict=True)
                if is_alive
            ]
            print(f"{target}: {len(tried) - len(alive)} of {len(tried)} noticed", flush=True)
            survivors += alive
    SURVIVORS.write_text("".join(f"{line}\n" for line in survivors))


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
