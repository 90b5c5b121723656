"""Golden walks of kernels: loaded again, two in a folder, in odd folders, with users' settings."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden.walks import KEEP, all_text, are_gone, assert_ranks_work, pids, run_folders, run_json
from notebook import Notebook
from processes import under_torchrun, wait_until

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True


START = f"%%ddp --nproc 2\n{KEEP}"
UNLOADED = (
    "nbddp: the extension was unloaded: all ranks are stopped and their variables are lost; they "
    "ran with `--nproc 2`\n"
)


def test_the_extension_is_loaded_twice_and_unloaded(notebook: Notebook) -> None:
    notebook.run(START)
    first = pids(notebook, range(2))
    assert notebook.run("%load_ext nbddp\n%load_ext nbddp").text == ""
    assert pids(notebook, range(2)) == first
    assert_ranks_work(notebook)

    assert notebook.run("%unload_ext nbddp").text == UNLOADED
    assert are_gone(first)
    for cell in (START, "%ddp status"):
        assert re.search("magic .*ddp.* not found", notebook.run(cell).text)
    assert notebook.run("%load_ext nbddp").text == ""
    assert notebook.run("%reload_ext nbddp").text == "", "there are no ranks to lose"
    assert notebook.run(START).status == "ok"
    assert_ranks_work(notebook)


@pytest.mark.full
def test_the_extension_is_reloaded(notebook: Notebook) -> None:
    notebook.run(START)
    first = pids(notebook, range(2))
    assert notebook.run("%reload_ext nbddp").text == UNLOADED
    assert are_gone(first)
    assert notebook.run(START).status == "ok"
    assert_ranks_work(notebook)


def test_two_kernels_in_one_folder_keep_their_runs_apart(
    notebook: Notebook, fresh_notebook: Notebook
) -> None:
    base = fresh_notebook.folder
    notebook.run(f"%cd -q {base}")
    both = {1.0: notebook, 2.0: fresh_notebook}
    cells = {
        kernel: kernel.begin(f"%%ddp --nproc 2 --name same\n{KEEP}\nnbddp.log(loss={loss})")
        for loss, kernel in both.items()
    }
    for kernel, request in cells.items():
        assert kernel.finish(request).status == "ok"
    for loss, kernel in both.items():
        reply = kernel.run(f"%%ddp\nprint(kept)\nnbddp.log(loss={loss})")
        assert [reply.lines(rank) for rank in range(2)] == [["0"], ["10"]], all_text(reply)

    folders = run_folders(base)
    assert len(folders) == 2
    assert all("same" in folder.name for folder in folders)
    assert {run_json(each)["pid"] for each in folders} == {each.pid for each in both.values()}
    for folder in folders:
        [loss] = (loss for loss, each in both.items() if each.pid == run_json(folder)["pid"])
        found = re.findall(r'"loss": (\S+?)[,}]', (folder / "metrics.jsonl").read_text())
        assert found == [str(loss)] * 4
    for kernel in both.values():
        text = kernel.run("%ddp runs").text
        assert all(folder.name in text for folder in folders)
    count = "import nbddp; print(len(nbddp.runs()))"
    assert notebook.run(count).text == "2\n"

    assert fresh_notebook.run("%ddp stop").status == "ok"
    assert_ranks_work(notebook)
    assert fresh_notebook.run(f"%%ddp --nproc 2\n{KEEP}").status == "ok"
    assert_ranks_work(fresh_notebook)
    assert len(run_folders(base)) == 3


@pytest.fixture
def odd_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a blank and a letter that is not ASCII; it is the home folder, too."""
    folder = tmp_path / "mein Ordner ü"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_kernel_works_in_a_folder_with_blanks_and_umlauts(odd_folder: Path) -> None:
    with Notebook(odd_folder) as notebook:
        notebook.run(f"%%ddp --nproc 2 --name 'erster ü'\n{KEEP}\nprint('grüße von', rank)")
        [run] = run_folders(odd_folder)
        assert run_json(run)["cwd"] == str(odd_folder)
        assert "grüße von 1\n" in (run / "rank1.log").read_text()
        assert "grüße von 1" in notebook.run("%ddp logs 1").text
        assert "grüße von 0" in notebook.run("%ddp show").text
        assert run.name in notebook.run("%ddp runs").text

        assert notebook.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()").status == "ok"
        reply = notebook.run("%ddp export 'mein Skript.py'")
        assert reply.status == "ok", all_text(reply)
        reply = notebook.run("%ddp run 'mein Skript.py'")
        assert reply.status == "ok", all_text(reply)
        assert [reply.lines(rank)[0] for rank in range(2)] == ["grüße von 0", "grüße von 1"]
        assert_ranks_work(notebook)


@pytest.mark.full
def test_an_export_runs_under_torchrun_in_a_folder_with_blanks_and_umlauts(
    odd_folder: Path,
) -> None:
    with Notebook(odd_folder) as notebook:
        notebook.run(f"%%ddp --nproc 2\n{KEEP}\nprint(f'grüße von {{kept}}\\n', end='')")
        assert notebook.run("%ddp export 'mein Skript.py'").status == "ok"
        lines = under_torchrun("mein Skript.py", cwd=odd_folder)
        assert sorted(lines) == ["grüße von 0", "grüße von 10"]
        assert_ranks_work(notebook)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_nodes_work_in_a_folder_with_blanks_and_umlauts(odd_folder: Path) -> None:
    with Notebook(odd_folder) as notebook:
        reply = notebook.run("%ddp nodes --local 2 --wait 110")
        assert reply.status == "ok", all_text(reply)
        assert notebook.run(f"%%ddp\n{KEEP}\nprint('grüße von', rank)").status == "ok"
        assert_ranks_work(notebook)
        [run] = run_folders(odd_folder)
        assert wait_until(lambda: "grüße von 1\n" in (run / "rank1.log").read_text())
        assert notebook.run("%ddp stop").status == "ok"


ELASTIC = """%%ddp --elastic --max-restarts 1 --push base
import os, pathlib, time
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
(pathlib.Path(base) / f"began-{count}-{world_size}-{rank}").touch()
while count in "01":  # until a node comes, until a node goes
    dist.barrier()
    time.sleep(0.01)
print(world_size, count)
"""


@pytest.mark.full
@pytest.mark.timeout(400)
def test_an_elastic_cell_grows_with_a_node_and_shrinks_without_it(odd_folder: Path) -> None:
    with Notebook(odd_folder) as notebook:
        text = notebook.run("%ddp nodes --nnodes 1:2").text
        found = re.search(r"^ *(\S.* -m torch\.distributed\.run .*--join.*)$", text, re.MULTILINE)
        assert found is not None, text
        assert notebook.run("%ddp nodes --local 1 --wait 110").status == "ok"
        assert notebook.run(f"base = {str(odd_folder)!r}").status == "ok"
        assert notebook.run(f"%%ddp\n{KEEP}").status == "ok"

        request = notebook.begin(ELASTIC)
        assert wait_until((odd_folder / "began-0-1-0").exists, timeout=120)
        agent = subprocess.Popen(f"exec {found[1]}", shell=True, start_new_session=True)
        both = [odd_folder / f"began-1-2-{rank}" for rank in range(2)]
        assert wait_until(lambda: all(each.exists() for each in both), timeout=120)
        agent.kill()
        agent.wait()
        reply = notebook.finish(request)
        assert reply.status == "ok", all_text(reply)
        assert reply.lines(0) == ["1 2"]
        assert_ranks_work(notebook, 1)
        assert notebook.run("%ddp stop").status == "ok"


@pytest.fixture
def without_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    settings = tmp_path / "ipython" / "profile_default"
    settings.mkdir(parents=True)
    (settings / "ipython_kernel_config.py").write_text("c.HistoryManager.enabled = False\n")
    monkeypatch.setenv("IPYTHONDIR", str(settings.parent))
    with Notebook(tmp_path) as notebook:
        yield notebook


SHOUT = """
def shout(lines):
    return [line.replace("THE_ANSWER", "42") for line in lines]
get_ipython().input_transformers_post.append(shout)
"""


def test_cells_work_beside_a_users_settings(without_history: Notebook) -> None:
    notebook, base = without_history, without_history.folder
    assert notebook.run("get_ipython().history_manager.enabled").result == "False"
    (base / "edited.py").write_text("value = 1\n")
    assert notebook.run("%load_ext autoreload\n%autoreload 2").status == "ok"
    assert notebook.run("import edited\nedited.value").result == "1"
    assert notebook.run(f"%%ddp --nproc 2\n{KEEP}").status == "ok"
    assert_ranks_work(notebook)

    (base / "edited.py").write_text("value = 1_000  # edited\n")
    assert notebook.run("%%ddp\nworld_size").text == "Out [ranks 0-1] 2\n"
    assert notebook.run("edited.value").result == "1000"

    assert notebook.run(SHOUT).status == "ok"
    assert notebook.run("THE_ANSWER").result == "42"
    assert notebook.run("%%ddp\nkept + THE_ANSWER").status == "ok"
    assert_ranks_work(notebook)
    assert notebook.run("%ddp auto on").status == "ok"
    reply = notebook.run("print(rank + THE_ANSWER)")
    assert [reply.lines(rank) for rank in range(2)] == [["42"], ["43"]], all_text(reply)
    assert notebook.run("%ddp auto off").status == "ok"
    assert notebook.run("THE_ANSWER").result == "42"

    line = notebook.run("%%ddp\n\n1 / 0").error
    assert line.endswith("line 3"), line
    assert notebook.run("%ddp restart --replay").status == "ok"
    assert_ranks_work(notebook)


def test_cells_work_with_a_nested_loop_and_with_pdb_on(notebook: Notebook) -> None:
    assert notebook.run("import nest_asyncio2\nnest_asyncio2.apply()").status == "ok"
    assert notebook.run(f"%%ddp --nproc 2\n{KEEP}").status == "ok"
    nested = "import asyncio\nasync def two():\n    return 2\nasyncio.run(two())"
    assert notebook.run(nested).result == "2"
    reply = notebook.run(f"%%ddp\nimport nest_asyncio2\nnest_asyncio2.apply()\n{nested}")
    assert reply.status == "ok", all_text(reply)
    assert_ranks_work(notebook)

    assert notebook.run("%pdb on").status == "ok"
    reply = notebook.converse("here = 7\n1 / 0", "p here + 1", "q")
    assert "8" in reply.text.split(), all_text(reply)
    reply = notebook.converse("%%ddp\nhere = rank\n1 / 0", "q")
    assert "line 3" in all_text(reply)
    assert notebook.run("%pdb off").status == "ok"
    assert_ranks_work(notebook)
