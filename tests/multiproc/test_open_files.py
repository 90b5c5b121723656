"""A script or a rank saves the files that it leaves open, as a program of torchrun does."""

import bz2
import gzip
import lzma
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from drivers.ranks import Capture, MakeRanks, Write
from processes import under_torchrun

from nbddp import CellFailedError

# files that names, a class, a cycle, a module, a logger, a frame and a forked child hold
FORKS = """
import gzip, os, sys
if not os.fork():
    child = gzip.open(f"{FOLDER}/child{os.environ['RANK']}.gz", "wt"); child.write("saved")
    sys.exit()
os.wait()
"""
LEAVES = """
import atexit, bz2, csv, gzip, logging, lzma, os, pickle, sys, zipfile
def at(name): return f"{FOLDER}/{os.environ['RANK']}{name}"
text = open(at("text"), "w"); text.write("saved")
rows = csv.writer(open(at("csv"), "w")); rows.writerow(["saved"])
class Holder:
    file = open(at("class"), "w"); file.write("saved")
    def __init__(self):
        self.me, self.file = self, gzip.open(at("cycle.gz"), "wt"); self.file.write("saved")
holder = Holder()
class Kind(type):
    def __eq__(self, other): return self is other  # so its classes have no hash
class Unhashable(metaclass=Kind): pass
_zipped = gzip.open(at("private.gz"), "wt"); _zipped.write("saved")
xz = lzma.open(at("a.xz"), "wt"); xz.write("saved")
bz = bz2.open(at("a.bz2"), "wt"); bz.write("saved")
archive = zipfile.ZipFile(at("a.zip"), "w"); archive.writestr("name", "saved")
pickle.Pickler(open(at("a.pickle"), "wb")).dump("saved")
sys.modules["own"] = own = type(sys)("own"); own.__file__ = at("own.py")
own.file = gzip.open(at("module.gz"), "wt"); own.file.write("saved")
logging.getLogger(FOLDER).addHandler(logging.StreamHandler(open(at("log"), "w")))
logging.getLogger(FOLDER).warning("saved")
at_exit = open(at("exit"), "w"); atexit.register(at_exit.write, "saved")
def last():
    local = gzip.open(at("frame.gz"), "wt"); local.write("saved")
    ENDING
last()
"""
KINDS = 13  # of files by a rank that forks no child
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def content(path: Path) -> str:
    match path.suffix:
        case ".pickle":
            return str(pickle.loads(path.read_bytes()))
        case ".zip":
            return zipfile.ZipFile(path).read("name").decode()
        case ending if ending in OPENERS:
            return str(OPENERS[ending](path).read(), "utf-8")
    return path.read_text()


def contents(folder: Path) -> dict[str, str]:
    """Return what the files in a folder contain, or the error of reading them."""
    found = {}
    for path in sorted(folder.iterdir()):
        try:
            found[path.name] = content(path).strip()
        except (OSError, EOFError, zipfile.BadZipFile, lzma.LZMAError) as error:
            found[path.name] = repr(error)
    return found


def leaving(folder: Path, ending: str, *, forks: bool = True) -> str:
    folder.mkdir()
    return f"FOLDER = {str(folder)!r}{FORKS * forks}{LEAVES.replace('ENDING', ending)}"


def assert_saved(folder: Path, kinds: int) -> None:
    saved = contents(folder)
    assert set(saved.values()) == {"saved"}, saved
    assert len(saved) == 2 * kinds


def test_script_saves_its_open_files_as_under_torchrun(
    make_group: MakeRanks, write: Write, folder: Path
) -> None:
    write(leaving(folder / "torchrun", "pass"))
    under_torchrun("work/script.py", cwd=folder)
    assert_saved(folder / "torchrun", KINDS + 1)
    group = make_group(2)
    for name, ending in (("end", "pass"), ("exit", "sys.exit()"), ("error", "raise ValueError")):
        write(leaving(folder / name, ending))
        if name == "error":
            with pytest.raises(CellFailedError, match="ValueError"):
                group.run_script("work/script.py")
            waiting = contents(folder / name)  # for `%ddp debug`
            assert {waiting[f"0{each}"] for each in ("text", "csv", "class", "a.pickle")} == {
                "saved"
            }
            assert "EOFError" in waiting["0a.xz"]
            group.run("pass")
        else:
            group.run_script("work/script.py")
        assert_saved(folder / name, KINDS + 1)


@pytest.mark.parametrize("how", ["stop", "restart"])
def test_rank_saves_its_open_files(make_group: MakeRanks, folder: Path, how: str) -> None:
    group = make_group(2)
    group.run(leaving(folder / "cell", "pass", forks=False))
    group.failure_of(leaving(folder / "failed", "raise ValueError", forks=False))
    # a value of IPython, and one of a library, which Python itself may lose
    group.run("logging.kept = gzip.open(at('kept.gz'), 'wt')\nn = logging.kept.write('saved')")
    value = "value = gzip.open(at('value.gz'), 'wt')\nvalue.write('saved')\nvalue"
    group.run(value)
    getattr(group, how)()
    assert_saved(folder / "cell", KINDS)
    assert_saved(folder / "failed", KINDS + 2)


# a disk that is full; a pipe that nothing reads; a destructor that does not return
FULL = "full = open('/dev/full', 'w'); full.write('lost')\n"
PIPE = (
    "import os; os.mkfifo(name := f'pipe{os.getpid()}')\n"
    "pipe = open(os.open(name, os.O_RDWR), 'wb', 1 << 20); pipe.write(bytes(1 << 19))\n"
)
DEAF = (
    "import time\nclass Deaf:\n    def __del__(self, sleep=time.sleep): sleep(600)\n_deaf = Deaf()"
)


def test_files_that_cannot_be_saved_are_named(
    make_group: MakeRanks, write: Write, capsys: Capture
) -> None:
    group = make_group(2)
    for source, unsaved in (
        (FULL, "/dev/full (No space left on device)"),
        (FULL + PIPE, "(it took too long)"),
        (DEAF, "archives (it took too long)"),
    ):
        group.run(source)
        group.restart()
        assert "nbddp: not saved completely: " in group.log(1).read_text()
        assert unsaved in group.log(1).read_text()
    write(FULL + PIPE)
    group.run_script("work/script.py")
    assert "not saved completely" in capsys.readouterr().out
