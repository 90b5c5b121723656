"""The core works without any extension: each is deleted from a copy, with those that need it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from console import ddp

import nbddp
from nbddp.extension.installed import installed
from nbddp.extensions import COMMANDS

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

REPOSITORY = Path(nbddp.__file__).parents[1]
TESTS = Path(__file__).parents[1]
RECORDED = TESTS / "recorded_runs"
STORED = ("loops", "resumed", "grid-lr0.1", "killed")  # the grid is of a sweep
PROGRAM = """
import sys
from IPython.terminal.interactiveshell import TerminalInteractiveShell

def main():
    shell = TerminalInteractiveShell.instance(colors="nocolor")
    shell.run_line_magic("load_ext", "nbddp")
    shell.run_cell("%%ddp --nproc 2\\nnbddp.log(step=1, loss=0.5)\\nkept = rank + 20\\nkept")
    for line in ("kill 1", "heal", "status", "help", *sys.argv[1:]):
        shell.run_cell(f"%ddp {line}")
    shell.run_cell("%%ddp\\nkept")
    shell.run_cell("import nbddp; print(*dir(nbddp))")
    shell.run_cell("%ddp stop")

if __name__ == "__main__":
    main()
"""
# what type checkers read of the folders
TYPES = re.compile(r"^ .*(nbddp\.extensions\.|= arming|methods\.).*\n", re.MULTILINE)
KEPT = "Out [rank 0] 20\nOut [rank 1] 21\n"
CONTRACTS = "from importlinter.cli import lint_imports_command as run; run()"
TESTS_WITHOUT_EXTENSIONS = ("-m", "pytest", "-q", "-p", "no:node_fixtures")
UNIT_TESTS = (*TESTS_WITHOUT_EXTENSIONS, "-m", "unit", "tests/unit")
GOLDEN_WALKS = (
    *(*TESTS_WITHOUT_EXTENSIONS, "-m", "full or not full"),
    *(f"tests/golden/test_{name}.py" for name in ("failures", "kernels", "scripts", "spawned")),
    *("-k", "not nodes and not export and not elastic and not folder"),
)


def with_those_that_need(names: set[str]) -> set[str]:
    """Return the extensions that cannot be loaded without these."""
    while more := {name for name, each in installed().items() if names & {*each.needs}} - names:
        names |= more
    return names


def copy_without(deleted: set[str], folder: Path) -> Path:
    """Return a copy of nbddp and its contracts, without these extensions."""
    copy = folder / "copy"
    shutil.copytree(REPOSITORY / "nbddp", copy / "nbddp")
    for name in deleted:
        shutil.rmtree(copy / "nbddp" / "extensions" / name)
    lines = (REPOSITORY / "pyproject.toml").read_text().splitlines(keepends=True)
    names = re.compile(rf"nbddp\.extensions\.({'|'.join(deleted)})\b")
    kept = [line for line in lines if not names.search(line)]
    (copy / "pyproject.toml").write_text("".join(kept))
    return copy


def run(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("names", [*installed(), " ".join(installed())])
def test_the_core_works_without_an_extension(
    names: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = with_those_that_need({*names.split()})
    copy = copy_without(deleted, folder)
    (folder / "program.py").write_text(PROGRAM)
    shutil.copytree(RECORDED, folder / ".nbddp" / "runs")
    shown = {} if "runs" in deleted else {f"show {name}": ddp(f"show {name}") for name in STORED}
    monkeypatch.setenv("PYTHONPATH", str(copy))
    commands = [name for name, owner in COMMANDS.items() if owner in deleted]
    done = run("program.py", *commands, *shown, folder=folder)

    assert done.returncode == 0, done.stderr
    printed = done.stdout
    for text in shown.values():
        assert text in printed
        printed = printed.replace(text, "")
    assert printed.count(KEPT) == 2, printed
    assert "rank 1 healed with the variables of rank 0" in printed
    assert "Traceback" not in printed + done.stderr
    for name in commands:
        missing = f"there is no `%ddp {name}`; the extension {COMMANDS[name]} is not installed"
        assert missing in printed + done.stderr
        assert not re.search(rf"^ *%ddp {name}\b", printed, re.MULTILINE)  # in the help
    public = {name for each in deleted for name in installed()[each].public}
    assert set(printed.splitlines()[-2].split()) == set(dir(nbddp)) - public
    contracts = run("-c", CONTRACTS, folder=copy)
    assert contracts.returncode == 0, contracts.stdout


@pytest.mark.timeout(1800)
def test_the_types_and_tests_of_the_core_need_no_extension(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_without({*installed()}, folder)
    shutil.rmtree(copy / "nbddp" / "nodes")  # the old name of the program on a node
    types = copy / "nbddp" / "extensions" / "__init__.py"
    types.write_text(TYPES.sub("", types.read_text()))
    shutil.copytree(TESTS, copy / "tests", ignore=shutil.ignore_patterns("extensions"))
    monkeypatch.setenv("PYTHONPATH", str(copy))
    for command in (("-m", "mypy", "nbddp"), UNIT_TESTS, GOLDEN_WALKS):
        done = run(*command, folder=copy)
        assert done.returncode == 0, done.stdout + done.stderr
