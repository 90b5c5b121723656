"""Fixtures that start real ranks."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drivers.ranks import Capture, Ranks, WarmLauncher
from notebook import Notebook

# a group remembers the options of a cell, such as --nproc 1, for the next start; reloading the
# extension would end the warm helper
FORGET_OPTIONS = """
from nbddp.wire.group_spec import GroupSpec
get_ipython()._nbddp.notebook.group.spec = GroupSpec()
del GroupSpec
"""


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest) -> Iterator[WarmLauncher]:
    """Return one warm forkserver for all groups of this run, unless ranks are spawned."""
    launcher = WarmLauncher(request.config.getoption("--start-method"))
    launcher.preload_more()
    yield launcher
    launcher.end()


@pytest.fixture
def make_group(
    launcher: WarmLauncher,
    folder: Path,  # noqa: ARG001 - where the runs are recorded
) -> Iterator[Callable[..., Ranks]]:
    groups: list[Ranks] = []

    def make(nproc: int = 2, **options: object) -> Ranks:
        group = Ranks(nproc=nproc, launcher=launcher, **options)
        groups.append(group)
        group.start()
        return group

    yield make
    for group in groups:
        group.close()


@pytest.fixture(scope="module")
def lasting_group(
    launcher: WarmLauncher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """Two ranks for all tests of a file."""
    group = Ranks(nproc=2, launcher=launcher)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("lasting"))
        group.start()
    yield group
    group.close()


@pytest.fixture
def shared_group(lasting_group: Ranks) -> Iterator[Ranks]:
    """The file's two ranks, without the names that other tests have given them.

    It is for tests in which no rank dies, and which leave nothing in its process.
    """
    lasting_group.run("%reset -f", quiet=True)
    yield lasting_group
    lasting_group.scripts.close()  # its ranks stay after a failure


@pytest.fixture
def group_here(shared_group: Ranks, folder: Path) -> Ranks:
    """The file's two ranks, which work in the test's folder, as this process does."""
    shared_group.run(f"%cd -q {folder}", quiet=True)
    return shared_group


@pytest.fixture
def group(request: pytest.FixtureRequest, make_group: Callable[..., Ranks]) -> Ranks:
    """Two ranks, started; those of the file in files that use ``lasting_group``."""
    if "lasting_group" in request.fixturenames:
        shared: Ranks = request.getfixturevalue("group_here")
        return shared
    return make_group(2)


@pytest.fixture
def write(folder: Path) -> Callable[..., Path]:
    """Write a file, by default a script in a folder of its own. Return its path."""

    def write(source: str, name: str = "work/script.py") -> Path:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return path

    return write


@pytest.fixture
def lines(capsys: Capture) -> Callable[..., list[str]]:
    """Return the output lines of a rank since the last call."""

    def lines(rank: int = 0) -> list[str]:
        mark = f"[rank {rank}] "
        output = capsys.readouterr().out.splitlines()
        return [line.removeprefix(mark) for line in output if line.startswith(mark)]

    return lines


@pytest.fixture(scope="session")
def lasting_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Return a kernel with nbddp loaded, shared by files with ``SHARES_KERNEL = True``."""
    with Notebook(tmp_path_factory.mktemp("lasting")) as notebook:
        yield notebook


@pytest.fixture(scope="module")
def kernel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    """A kernel with nbddp loaded, for all tests of a file.

    Until it has ranks it takes seven seconds of a processor: files in which few tests have use of
    one share it.
    """
    if getattr(request.module, "SHARES_KERNEL", False):
        lasting: Notebook = request.getfixturevalue("lasting_kernel")
        lasting.folder = tmp_path_factory.mktemp("notebook")
        assert lasting.run(f"%reset -f\n%cd -q {lasting.folder}\n{FORGET_OPTIONS}").status == "ok"
        yield lasting
        return
    with Notebook(tmp_path_factory.mktemp("notebook")) as notebook:
        yield notebook


@pytest.fixture
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    """The file's kernel; its ranks are stopped after each test."""
    yield kernel
    assert kernel.run("%ddp auto off").status == "ok"
    assert kernel.run("%ddp stop").status == "ok"


@pytest.fixture
def base(notebook: Notebook, tmp_path: Path) -> Path:
    """Return a new folder, the working folder of the kernel, where its runs are recorded."""
    assert notebook.run(f"%cd -q {tmp_path}").status == "ok"
    return tmp_path


@pytest.fixture
def fresh_notebook(folder: Path) -> Iterator[Notebook]:
    with Notebook(folder) as notebook:
        yield notebook
    os.chdir(folder.parent)
