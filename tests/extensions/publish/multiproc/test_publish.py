"""Live publishing from a notebook, also with a tracker that does not respond."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from notebook import Notebook
from published import await_whole, fake_wandb, run_folder

from nbddp.extensions.publish.publisher import read_published

# a tracker's process gets what others leave of the machine
pytestmark = pytest.mark.timeout(200)

TRAINING = "for step in range(30):\n    dist.barrier()\n    nbddp.log(step=step, loss=rank + 1.0)\n"
PUBLISH = f"%%ddp --nproc 2 --publish wandb\n{TRAINING}"


@pytest.fixture
def with_tracker(notebook: Notebook, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Lets the kernel find a tracker that does this; a folder for its runs."""
    path = str(fake_wandb(tmp_path))

    def find(how: str) -> Path:
        code = f"import os, sys\nsys.path.insert(0, {path!r})\nos.environ['FAKE_WANDB'] = {how!r}"
        assert notebook.run(f"%cd -q {tmp_path}\n{code}").status == "ok"
        return tmp_path

    yield find
    code = f"import os, sys\nsys.path.remove({path!r})\ndel os.environ['FAKE_WANDB']"
    assert notebook.run(code).status == "ok"


def test_unresponsive_tracker_does_not_delay_cells_or_stop(
    notebook: Notebook, with_tracker: Callable[[str], Path]
) -> None:
    base = with_tracker("blocks")
    for _ in range(5):
        assert notebook.run(PUBLISH).status == "ok"
    assert notebook.run("%ddp stop").status == "ok"
    code = (
        "publishing = get_ipython()._nbddp.notebook.extensions._hooks.load('publish')\n"
        "*_, made = publishing._publications.values()\n"
        "from nbddp.sigint import wait_for_all\n"
        "print(made.result.done()); made._process.kill()\n"
        "wait_for_all([made.result], 20); print(made.result.done())"
    )
    assert notebook.run(code).text == "False\nTrue\n"
    assert len((run_folder(base) / "metrics.jsonl").read_text().splitlines()) == 5 * 30 * 2


def test_run_is_published_until_stop_including_later_cells(
    notebook: Notebook, with_tracker: Callable[[str], Path]
) -> None:
    base = with_tracker("well")
    notebook.run(PUBLISH.replace("wandb", "wandb:digits"))
    for _ in range(2):
        notebook.run(f"%%ddp\n{TRAINING}")
    notebook.run("%ddp stop")
    folder = run_folder(base)
    done = await_whole(folder, "wandb")
    assert (done["steps"], done["late"]) == (90, 0)
    log = (folder / "publish-wandb.log").read_text()
    assert log.count('"loss": 1.5, ') == 90
    assert "finished 0" in log


def test_script_is_published_as_its_own_run_beside_the_run_of_the_cells(
    notebook: Notebook, with_tracker: Callable[[str], Path]
) -> None:
    base = with_tracker("well")
    notebook.run(PUBLISH)
    cells = run_folder(base)
    begin = "import nbddp, torch.distributed as dist\ndist.init_process_group()\n"
    (base / "train.py").write_text(f"{begin}rank = dist.get_rank()\n{TRAINING}")
    assert notebook.run("%ddp run --publish wandb train.py").status == "ok"
    [script] = {*cells.parent.iterdir()} - {cells}
    assert await_whole(script, "wandb")["steps"] == 30
    assert not read_published(cells, "wandb").get("is_whole")
    notebook.run("%ddp stop")
    await_whole(cells, "wandb")
