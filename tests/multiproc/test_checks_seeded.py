"""A notebook checks a cell or a script, and shows each finding about its ranks once."""

from __future__ import annotations

import re
from pathlib import Path

from notebook import Notebook

SHARES_KERNEL = True

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
    assert title.startswith("nbddp: 1 ")
    assert re.match("  ND202 line 4: .* rank 0 has 1, rank 1 has 10", line)
    assert notebook.run("%%ddp\nlen(it)").text == "Out [ranks 0-1] 2\n"
    assert "ND202 line 2: " in notebook.run("%ddp check").text
    quiet = SAMPLERS.replace("rank", "(2 + rank)").replace("%%ddp", "%%ddp --quiet")
    assert notebook.run(quiet).text == ""
    assert "ND210 line 2: " in notebook.run("%%ddp\nfor _ in range(2): list(it)").text
