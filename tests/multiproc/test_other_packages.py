"""The extension on the page for developers, installed as a package of somebody else."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packages_on_disk import install

PAGE = Path(__file__).parents[2] / "docs" / "development" / "extending.md"
FILE = re.compile(r"^```(?:python|toml)\n# (nbddp_cpu/\S+|pyproject.toml)\n(.*?)^```", re.M | re.S)
PROGRAM = """
from IPython.terminal.interactiveshell import TerminalInteractiveShell

def main():
    shell = TerminalInteractiveShell.instance(colors="nocolor")
    shell.run_line_magic("load_ext", "nbddp")
    shell.run_cell("%%ddp --nproc 2 --cpu\\nsum(range(9))")
    for line in ("cpu", "help cpu", "stop"):
        shell.run_cell(f"%ddp {line}")

if __name__ == "__main__":
    main()
"""


def test_the_extension_on_the_page_adds_a_command_an_option_and_sentences_of_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = dict(FILE.findall(PAGE.read_text()))
    assert sum(len(text.splitlines()) for text in files.values()) <= 60
    project = tomllib.loads(files.pop("pyproject.toml"))
    [(name, target)] = project["project"]["entry-points"]["nbddp.extensions"].items()
    install(folder / "site", name, target, files)
    (folder / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"), prepend=":")
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, check=True
    )
    for rank in range(2):
        assert re.search(rf"^\[rank {rank}\] nbddp: \d\.\d s of CPU time$", done.stdout, re.M)
        assert re.search(rf"^ *rank {rank} +\d\.\d s$", done.stdout, re.M)
    assert "Show the CPU time of each rank in the last cell." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
