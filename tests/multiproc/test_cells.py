"""What a %%ddp cell does, in a real kernel."""

from __future__ import annotations

import pytest
from notebook import Notebook

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True


def test_the_process_group_is_ready_and_a_value_that_ranks_agree_on_is_shown_once(
    notebook: Notebook,
) -> None:
    reply = notebook.run(
        "%%ddp --nproc 2\nx = torch.ones(1, device=device) * (rank + 1)\ndist.all_reduce(x)\n"
        "x.item(), world_size, local_rank, nbddp.__version__ != ''"
    )
    assert reply.text.splitlines() == [
        "Out [rank 0] (3.0, 2, 0, True)",
        "Out [rank 1] (3.0, 2, 1, True)",
    ]
    assert notebook.run("%%ddp\nworld_size").text == "Out [ranks 0-1] 2\n"
    assert notebook.run("%%ddp --quiet\nprint('noise')\nx.item()").text == "Out [ranks 0-1] 3.0\n"
    assert notebook.run("%%ddp --fresh\n'x' in globals()").text == "Out [ranks 0-1] False\n"


def test_magics_commands_await_and_last_values_work(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 1\n!echo from a child $RANK\n%time 1\nimport asyncio, os\n"
        "await asyncio.sleep(0.01)\nfiles = !echo a\nprint(files)\n"
        "wrote = os.write(1, b'from fd 1\\n')\n41"
    )
    assert reply.status == "ok"
    assert {"from a child 0", "['a']", "from fd 1"} <= {*reply.lines(0)}
    assert notebook.run("%%ddp\n_ + 1").text == "Out [rank 0] 42\n"


def test_figures_and_displays_reach_the_notebook(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 2\nfrom IPython.display import HTML\ndisplay(HTML('<b>bold</b>'))\n"
        "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()"
    )
    assert reply.status == "ok"
    assert sum("text/html" in data for data in reply.displays) == 2
    assert sum(data.get("image/png", "").startswith("iVBOR") for data in reply.displays) == 2


def test_a_progress_bar_ends_as_one_line(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 2\nfrom tqdm import tqdm\nfor _ in tqdm(range(20), mininterval=0): pass"
    )
    for rank in (0, 1):
        assert len(reply.lines(rank)) == 1
        assert "20/20" in reply.lines(rank)[0]


def test_a_traceback_shows_the_cells_own_lines_under_the_editors_numbers(
    notebook: Notebook,
) -> None:
    reply = notebook.run("%%ddp --nproc 2\n\n# a remark\nvalue = 1; dist.barrier()\nvalue / 0")
    assert reply.status == "error"
    assert reply.error == "CellFailedError: ranks 0-1: ZeroDivisionError: division by zero, line 5"
    assert "----> 5 value / 0" in reply.traceback
    assert reply.traceback.count("division by zero") == 2  # the title, and one traceback
    assert "site-packages" not in reply.traceback
    assert "nbddp/" not in reply.traceback


def test_a_module_that_forgot_its_beginning_costs_no_rank(notebook: Notebook) -> None:
    notebook.run(
        "%%ddp --nproc 2\nclass Net(torch.nn.Module):\n    def __init__(self): pass\nnet = Net()"
    )
    assert "AttributeError" in notebook.run("%%ddp\nnet(1)").error
    assert notebook.run("%%ddp\ndist.barrier()").status == "ok"


def test_a_script_that_says_sys_exit_0_has_succeeded(notebook: Notebook) -> None:
    assert notebook.run("%%ddp --nproc 1\nimport sys\nsys.exit()").status == "ok"
    reply = notebook.run("%%ddp\nsys.exit(3)")
    assert reply.error == "CellFailedError: rank 0: SystemExit: 3, line 2"


def test_pasted_code_finds_torchruns_variables_and_may_init_again_and_again(
    notebook: Notebook,
) -> None:
    body = (
        "import os\ndist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\n"
        "print(x.item(), os.environ['RANK'], os.environ['WORLD_SIZE'])\n"
        "dist.destroy_process_group()\n"
    )
    reply = notebook.run(f"%%ddp --nproc 2 --no-init\n{body}{body}")
    assert reply.lines(1) == ["2.0 1 2", "2.0 1 2"]
    reply = notebook.run(f"%%ddp --no-init\n{body}")
    assert reply.lines(0) == ["2.0 0 2"]
    assert notebook.run("%%ddp\ndist.barrier()\ndist.is_initialized()").text.endswith("True\n")


def test_values_go_to_the_ranks_and_come_back(notebook: Notebook) -> None:
    notebook.run("config = {'lr': 0.1}\nclass Here:\n    value = 7\nthing = Here()")
    reply = notebook.run(
        "%%ddp --nproc 2 --push config,thing --out answers\nconfig['lr'] * rank + thing.value"
    )
    assert reply.status == "ok"
    assert notebook.run("answers").result == "[7.0, 7.1]"
    notebook.run("%%ddp\nstate = torch.full((3,), float(rank))")
    assert notebook.run("%ddp pull state --rank 1").result == "tensor([1., 1., 1.])"
    assert notebook.run("state.sum().item()").result == "3.0"
    assert notebook.run("%ddp pull 'rank + 1'").result == "[1, 2]"


def test_a_semicolon_keeps_a_value_off_the_page_and_not_from_who_asks_for_it(
    notebook: Notebook,
) -> None:
    reply = notebook.run("%%ddp --nproc 2 --out kept\nrank + 1;")
    assert (reply.text, reply.result) == ("", "")
    assert notebook.run("kept").result == "[1, 2]"
    reply = notebook.run("%ddp pull rank;")
    assert (reply.status, reply.result) == ("ok", "")
    assert notebook.run("rank").result == "[0, 1]"


def test_no_wait_returns_at_once_and_wait_waits_and_tells_a_failure(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\nimport os, time\nif os.path.exists('go_on'): os.remove('go_on')")
    reply = notebook.run(
        "%%ddp --no-wait\nwhile not os.path.exists('go_on'): time.sleep(0.01)\nprint('done')"
    )
    assert reply.status == "ok"
    assert "done" not in reply.text
    assert "`%ddp wait`" in notebook.run("%%ddp\npass").text
    notebook.run("open('go_on', 'w').close()")
    assert notebook.run("%ddp wait").status == "ok"
    assert notebook.run("%%ddp --no-wait\n1 / 0").status == "ok"
    assert "ZeroDivisionError" in notebook.run("%ddp wait").error


def test_auto_mode_sends_cells_to_the_ranks_and_local_keeps_one(notebook: Notebook) -> None:
    notebook.run("%ddp start --nproc 2")
    notebook.run("%ddp auto on")
    assert notebook.run("1 / 0").error.endswith("ZeroDivisionError: division by zero, line 1")
    assert notebook.run("%%local\n'world_size' in globals()").result == "False"
    notebook.run("%ddp auto off")
    assert notebook.run("'world_size' in globals()").result == "False"
    assert notebook.run("%%local\n1 + 1").result == "2"


def test_twenty_thousand_lines_of_each_rank_come_whole_and_in_order(notebook: Notebook) -> None:
    source = "%%ddp --nproc 2\nfor i in range(20_000): print(f'{i:06d}' + 'x' * 94)"
    reply = notebook.run(source)
    assert reply.status == "ok"
    for rank in range(2):
        assert [int(line[:6]) for line in reply.lines(rank)] == list(range(20_000))
