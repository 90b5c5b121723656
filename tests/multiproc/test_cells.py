"""``%%ddp`` cells in a real kernel, and their output."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drivers.ranks import Capture, Ranks
from golden.walks import all_text
from limits import set_limits
from notebook import Notebook

SHARES_KERNEL = True


def test_process_group_is_ready_and_equal_last_values_are_shown_once(notebook: Notebook) -> None:
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


def test_a_rank_of_cells_is_the_main_process_as_under_torchrun(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 2\nimport multiprocessing as mp\n"
        "mp.current_process().name, mp.parent_process(), mp.Process().name, mp.active_children()"
    )
    assert reply.text == "Out [ranks 0-1] ('MainProcess', None, 'Process-1', [])\n"


def test_magics_commands_await_and_last_values_work(notebook: Notebook) -> None:
    reply = notebook.run(
        "%%ddp --nproc 1\n!echo from a child $RANK\n%time 1\nimport asyncio, os\n"
        "await asyncio.sleep(0.01)\nfiles = !echo a\nprint(files)\n"
        "wrote = os.write(1, b'from fd 1\\n')\n41"
    )
    assert reply.status == "ok"
    assert {"from a child 0", "['a']", "from fd 1"} <= {*reply.lines(0)}
    assert notebook.run("%%ddp\n_ + 1").text == "Out [rank 0] 42\n"


def test_a_traceback_shows_the_cells_lines_under_the_editors_numbers(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2\n\n# a remark\nvalue = 1; dist.barrier()\nvalue / 0")
    assert reply.status == "error"
    assert reply.error == "CellFailedError: ranks 0-1: ZeroDivisionError: division by zero, line 5"
    assert "----> 5 value / 0" in reply.traceback
    assert reply.traceback.count("division by zero") == 2  # the title, and one traceback
    assert "site-packages" not in reply.traceback
    assert "nbddp/" not in reply.traceback


def test_a_name_of_the_notebook_gets_a_way_to_the_ranks(notebook: Notebook) -> None:
    notebook.run("import math\nfrom math import tau\nlayers = 3\ndef helper(): pass")
    notebook.run(
        "%%ddp --nproc 2\nclass Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 2\n    def __getitem__(self, at): return layers"
    )
    ways = {
        "math.pi": "import it in a `%%ddp` cell",
        "helper()": "define it in a `%%ddp` cell",
        "list(torch.utils.data.DataLoader(Data(), num_workers=1))": "`%%ddp --push layers`",
        "world_sise": "Did you mean `world_size`?",
    }
    for code, way in ways.items():
        assert way in notebook.run(f"%%ddp\n{code}").traceback
    if not torch.cuda.is_available():
        assert "`.to(device)`" in notebook.run("%%ddp\ntorch.ones(1).cuda()").error
        calls = ["Stream()", "device(0).__enter__()"]
        calls += [] if torch.version.cuda else ["Event()"]  # a CUDA build needs no GPU for it
        for call in calls:
            assert "`.to(device)`" in notebook.run(f"%%ddp\ntorch.cuda.{call}").error
        error = notebook.run("%%ddp\ntorch.cuda.set_device(rank)").error
        way = "use `.to(device)`" if torch.version.cuda else "leave out this line; `device` is"
        assert f"this rank has no CUDA: {way}" in error


def test_pasted_torchrun_code_can_init_the_process_group_repeatedly(notebook: Notebook) -> None:
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


def test_push_and_pull_transfer_values(notebook: Notebook) -> None:
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


def test_semicolon_hides_the_value_but_out_and_pull_return_it(notebook: Notebook) -> None:
    reply = notebook.run("%%ddp --nproc 2 --out kept\nrank + 1;")
    assert (reply.text, reply.result) == ("", "")
    assert notebook.run("kept").result == "[1, 2]"
    reply = notebook.run("%ddp pull rank;")
    assert (reply.status, reply.result) == ("ok", "")
    assert notebook.run("rank").result == "[0, 1]"


def test_no_wait_returns_at_once_and_wait_reports_a_failure(notebook: Notebook) -> None:
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


def test_wait_follows_a_cell_whose_view_has_ended(notebook: Notebook) -> None:
    notebook.run(
        "from nbddp.ui.text_view import TextView\nshow, TextView.show = TextView.show, None"
    )
    (notebook.folder / "go_on").unlink(missing_ok=True)  # of an earlier test
    prints = "import os, time\nwhile not os.path.exists('go_on'): print('on'); time.sleep(0.05)"
    assert "NoneType" in notebook.run(f"%%ddp --nproc 2\n{prints}\n1 / 0").error
    notebook.run("TextView.show = show")
    reply = notebook.run_until("%ddp wait", lambda so_far: "[rank 1] on" in so_far.text)
    assert "ZeroDivisionError" in reply.error
    assert notebook.run("%ddp wait").status == "ok"


def test_curves_and_single_values_are_shown_once_below_their_cell(notebook: Notebook) -> None:
    train = "for step in range(20): nbddp.log(step=step, loss=2 / (step + 1) + rank)"
    [chart] = notebook.run(f"%%ddp --nproc 2\n{train}").displays
    assert chart["image/png"].startswith("iVBORw0KGgo")
    assert chart["text/plain"] == "loss 0.6"
    reported = notebook.run("%%ddp\nnbddp.log(eval_loss=0.5 + rank)")
    assert (reported.text, reported.displays) == ("nbddp: eval_loss 1\n", [])
    assert notebook.run("%%ddp\nx = 1").text == ""


CPP = """print('before')
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(5, 1))
model(torch.ones(2, 4))"""


def test_torchs_frames_are_folded_and_the_log_has_the_whole_traceback(
    group: Ranks, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, peers_timeout=30.0)  # both ranks have time to report it
    error = group.failure_of(CPP)
    assert re.fullmatch("ranks 0-1: RuntimeError: .*shapes.*, line 3", str(error))
    assert re.search(r"^ +\.\.\. \d+ frames in torch$", error.report, re.MULTILINE)
    assert "model(torch.ones(2, 4))" in error.report
    group.run("print('after')")
    shown = capsys.readouterr().out
    assert "return F.linear(" not in shown
    assert shown.count("[rank 0] before\n") == shown.count("[rank 0] after\n") == 1
    for rank in range(2):
        log = group.log(rank).read_text()
        assert log.index("before\n") < log.index("return F.linear(") < log.index("after\n")


FAILS = {
    "a cell": "%%ddp --nproc 2\n1/0",
    "the next cell": "%%ddp\ndef f():\n    1/0\nf()",
    "a magic within": "%%ddp\n%%time\n1/0",
    "a cell within": "%%ddp\n%%capture\n1/0",
    "a line magic within": "%%ddp\n%time 1/0",
    "quiet": "%%ddp --quiet\n1/0",
    "below other code": "x = 1\nget_ipython().run_cell_magic('ddp', '', '1/0')",
    "a script": "%run fails.ipy",
    "a cell of the notebook within": "%%local\nget_ipython().run_cell_magic('ddp', '', '1/0')",
    "later": "%%ddp --no-wait\nimport time; time.sleep(0.2)\n1/0",
}


def numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"cell \[(\d+)\]", text)}


def test_cell_number_equals_the_prompt_number(notebook: Notebook) -> None:
    notebook.run("open('fails.ipy', 'w').write('%%ddp\\n1/0')")
    for name, cell in FAILS.items():
        reply = notebook.run(cell)
        text = all_text(reply)
        if "--no-wait" in cell:
            text += all_text(notebook.run("%ddp wait"))
        assert len(reply.counts) == 1, "the prompt has one number"
        assert numbers(text) == reply.counts, name
    notebook.run("%ddp auto on")
    reply = notebook.run("1/0")
    assert numbers(all_text(reply)) == reply.counts


def test_a_function_of_an_earlier_cell_keeps_its_number(notebook: Notebook) -> None:
    first = notebook.run("%%ddp --nproc 2\ndef f(): 1/0")
    second = notebook.run("%%ddp\nf()")
    assert numbers(all_text(second)) == first.counts | second.counts


SAYS = """%%ddp --nproc 2 --ranks 0
import faulthandler, sys, threading, warnings
def call():
    warnings.warn("warned")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    faulthandler.dump_traceback(all_threads=False)
    breakpoint()
    return 1
call();"""


def test_debugger_threads_warnings_and_faulthandler_name_the_cell(notebook: Notebook) -> None:
    reply = notebook.converse(SAYS, "c")
    [number] = reply.counts
    cell = f"<ipython-input-{number}>"
    for words in (
        f"{cell}:4: UserWarning: warned",
        f'File "{cell}", line 5, in <lambda>',
        f'File "{cell}", line 8 in call',
        f"> {cell}(9)call()",
    ):
        assert words in reply.text, words
    assert set(re.findall(r"ipython-input-(\d+)", reply.text)) == {str(number)}


@pytest.mark.full
def test_terminal_ipython_shows_output_as_text_with_the_prompt_number(folder: Path) -> None:
    fail = "get_ipython().run_cell_magic('ddp', '--nproc 2', 'print(rank)\\n1/0')"
    printed = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        input=f"%load_ext nbddp\nx = 1\n{fail}\n%ddp stop\nexit\n",
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    ).stdout
    prompt = printed.rpartition("In [3]: ")[2].partition("In [4]: ")[0]
    assert numbers(prompt) == {3}
    assert {"[rank 0] 0", "[rank 1] 1"} <= set(prompt.splitlines())


BAD = "%%ddp --nproc 2\nx = torch.ones(1)\nif rank * 0 == 1:\n    dist.all_reduce(x)\n"


def test_ddp_check_checks_the_last_cell_or_a_script(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\nif dist.get_rank():\n    dist.barrier()\n")
    text = notebook.run(f"%ddp check {script}").text  # no rank is needed for that
    assert str(script) in text
    assert re.search(r"ND101 line 3: dist\.barrier .*`if dist\.get_rank\(\)` \(line 2\)", text)
    notebook.run(BAD)
    reply = notebook.run("%ddp check")
    assert reply.status == "ok"
    found = r"ND101 line 4: dist\.all_reduce .*`if rank \* 0 == 1` \(line 3\)"
    assert re.search(found, reply.text)
    reply = notebook.run("%ddp check --strict")
    assert reply.status == "error"
    assert reply.error.startswith("FindingsError: 1 ")
    assert re.search(found, reply.error)
    notebook.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)")
    assert notebook.run("%ddp check --strict").status == "ok"
    notebook.run("%%ddp\nme, names = dist.get_rank(), {'a'}")  # the ranks report both values
    text = notebook.run("%%ddp\nif me * 0: dist.barrier()\nfor a in names: dist.barrier()").text
    assert "ND101 line 2: " in text
    assert "ND108 line 3: " in text
    assert notebook.run("%ddp check --explain nd101").text.startswith("ND101: ")
    assert "ND999" in notebook.run("%ddp check --explain ND999").text


SAMPLERS = """%%ddp
own = 10 ** rank
sampler = DistributedSampler(data, seed=own)
it = DataLoader(data, 2, sampler=sampler)
"""


def test_finding_is_shown_once_below_the_cell(notebook: Notebook) -> None:
    notebook.run(
        "%%ddp --nproc 2\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
        "data = torch.arange(8.0)\nx = torch.ones(1)"
    )
    assert notebook.run(SAMPLERS.replace("10 ** rank", "9")).text == ""
    title, line = notebook.run(SAMPLERS).text.splitlines()[:2]
    assert re.match("nbddp: possible mistake, line 4: .* rank 0 has 1, rank 1 has 10", title)
    assert line.startswith("  ND202 line 4: ")
    assert notebook.run("%%ddp\nlen(it)").text == "Out [ranks 0-1] 2\n"
    assert "ND202 line 2: " in notebook.run("%ddp check").text
    quiet = SAMPLERS.replace("rank", "(2 + rank)").replace("%%ddp", "%%ddp --quiet")
    assert notebook.run(quiet).text == ""
    assert "ND210 line 2: " in notebook.run("%%ddp\nfor _ in range(2): list(it)").text
