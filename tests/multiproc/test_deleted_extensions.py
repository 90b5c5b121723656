"""The core works without any extension: each is deleted from a copy, with those that need it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nbddp
from nbddp.extension.installed import installed
from nbddp.extensions import COMMANDS

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

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
KEPT = "Out [rank 0] 20\nOut [rank 1] 21\n"


def with_those_that_need(names: set[str]) -> set[str]:
    """Return the extensions that cannot be loaded without these."""
    while more := {name for name, each in installed().items() if names & {*each.needs}} - names:
        names |= more
    return names


@pytest.mark.parametrize("names", [*installed(), " ".join(installed())])
def test_the_core_works_without_an_extension(
    names: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = with_those_that_need({*names.split()})
    copy = shutil.copytree(Path(nbddp.__file__).parent, folder / "copy" / "nbddp")
    for name in deleted:
        shutil.rmtree(copy / "extensions" / name)
    (folder / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(folder / "copy"))
    commands = [name for name, owner in COMMANDS.items() if owner in deleted]
    done = subprocess.run(
        [sys.executable, "program.py", *commands], capture_output=True, text=True, check=True
    )

    assert done.stdout.count(KEPT) == 2, done.stdout
    assert "rank 1 healed with the variables of rank 0" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    for name in commands:
        missing = f"there is no `%ddp {name}`; the extension {COMMANDS[name]} is not installed"
        assert missing in done.stdout + done.stderr
        assert not re.search(rf"^ *%ddp {name}\b", done.stdout, re.MULTILINE)  # in the help
    public = {name for each in deleted for name in installed()[each].public}
    assert set(done.stdout.splitlines()[-2].split()) == set(dir(nbddp)) - public
