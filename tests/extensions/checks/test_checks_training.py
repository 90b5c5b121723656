"""Findings in training loops, and code that the rules accept."""

import gc
import time

import pytest
from checked_code import (
    COMMON,
    IMPORTS_DDP,
    ON_FIRST,
    assert_found,
    assert_no_findings,
    rules_in,
    under,
)

from nbddp.extensions.checks.checker import check_source
from nbddp.extensions.checks.source import CellSource

# ---- models under DDP and FSDP

IS_DDP = {"model": "ddp"}
WRAPPED = COMMON + IMPORTS_DDP + "m = DDP(net)\n"
UNEVEN = under(ON_FIRST, "m(x).sum().backward()\n")


def test_a_ddp_forward_in_every_branch_of_a_rank_condition_is_accepted() -> None:
    assert_found("ND102", "rank == 0 and model(x)\n", kinds=IS_DDP)
    every = "if rank == 0:\n  y = model(x)\nelse:\n  y = model(z)\n"
    assert_no_findings(every, kinds=IS_DDP)


@pytest.mark.parametrize("is_cell", [True, False])
def test_ranks_under_a_join_may_make_unequal_numbers_of_steps(is_cell: bool) -> None:
    assert_no_findings(
        under("with m.join()", UNEVEN),
        under("with Join([m])", UNEVEN),
        under("with Join([m, optimizer], throw_on_early_termination=True)", UNEVEN),
        under("with torch.autograd.profiler.profile(), m.join()", UNEVEN),
        under("with m.join() if is_uneven else nullcontext()", UNEVEN),
        under("with ExitStack() as stack", "stack.enter_context(m.join())\n", UNEVEN),
        "joined = Join([m])\n" + under("with joined", UNEVEN),
        under("def fit()", UNEVEN) + under("with m.join()", "fit()\n"),
        under("def fit()", UNEVEN) + under("def main()", under("with m.join()", "fit()\n")),
        head=WRAPPED,
        is_cell=is_cell,
    )


def test_unequal_numbers_of_steps_without_a_join_are_found() -> None:
    assert_found(
        "ND102",
        UNEVEN,
        under("with m.no_sync()", UNEVEN),
        under("with open(os.path.join('a', 'b'))", UNEVEN),
        under("with m.join(enable=False)", UNEVEN),
        under("with m.join()", "pass\n") + UNEVEN,
        under(ON_FIRST, under("with m.join()", "m(x).sum().backward()\n")),
        "process.join()\n" + UNEVEN,
        head=WRAPPED,
    )
    # a join takes part in no collective of the user's own
    uneven = under("with m.join()", UNEVEN + "    dist.all_reduce(y)\n")
    assert_found("ND101", uneven, head=WRAPPED)


def test_a_model_counts_as_a_ddp_model_only_after_it_is_wrapped() -> None:
    alone = under(ON_FIRST, "m(x).sum().backward()\n")
    wrap = WRAPPED.removeprefix(COMMON)
    assert_no_findings(COMMON + "m = net()\n" + alone + wrap, is_cell=False)
    assert_found(
        "ND102",
        COMMON + under("for i in range(2)", alone + wrap),
        under("def fit()", alone) + WRAPPED + "fit()\n",
        is_cell=False,
    )


TEST = under("with torch.no_grad()", "y = model(x)\n")
NORM = "class Net(nn.Module):\n    def __init__(self):\n        self.norm = nn.BatchNorm2d(8)\n"


@pytest.mark.parametrize(
    ("text", "kind", "is_found"),
    [
        ("", "ddp with buffers", True),
        ("", "ddp with buffers in training", True),
        ("", "ddp", False),
        ("", "ddp in training", False),
        (NORM + "model = DDP(Net())\n", "", True),
        (NORM + "net = Net().to(device)\nmodel = DDP(net)\n", "", True),
        ("model = DDP(nn.Sequential(nn.BatchNorm1d(8)))\n", "", True),
        (NORM + "model = DDP(Net(), broadcast_buffers=False)\n", "", False),
        (NORM + "model = DDP(Net(), **options)\n", "", False),
        (NORM + "model = DDP(nn.Linear(4, 2))\n", "", False),
    ],
)
def test_evaluation_on_one_rank_is_found_if_ddp_broadcasts_buffers(
    text: str, kind: str, *, is_found: bool
) -> None:
    head = IMPORTS_DDP + text if text else ""
    found = check_source(CellSource(head + under(ON_FIRST, TEST), {"model": kind}))
    assert [each.rule for each in found] == (["ND102"] if is_found else [])
    assert all("buffers" in each.text for each in found)
    assert_no_findings(head + under(ON_FIRST, TEST.replace("model(", "model.module(")))
    assert_no_findings(head + TEST, kinds={"model": kind})


def test_an_fsdp_model_on_one_rank_is_found_with_gradients_and_without() -> None:
    imports = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard\n"
    for made in ("model = FSDP(net)\n", "fully_shard(model)\n"):
        head = imports + made
        calls = under(ON_FIRST, TEST), under(ON_FIRST, "model(x)\n")
        assert_found("ND102", *calls, head=head)
        assert_no_findings(under("if pp_rank == 0", "model(x)\n"), head=head)
    assert_found("ND102", under(ON_FIRST, TEST), kinds={"model": "fsdp in training"})


# ---- training


def test_steps_of_several_optimizers_are_no_accumulation() -> None:
    for other, is_found in (("optimizers[1].step()\n", False), ("print(i)\n", True)):
        step = under("if i % 2 == 0", other) + under("else", "optimizer.step()\nzero_grad()\n")
        text = under("for i, x in enumerate(train)", "model(x).sum().backward()\n", step)
        assert ("ND121" in rules_in(text)) is is_found
    rare = under("if i % 2 == 0", "model(x).sum().backward()\noptimizers[1].step()\n")
    loop = "model(x).sum().backward()\noptimizers[0].step()\n"
    assert "ND121" not in rules_in(under("for i, x in enumerate(train)", loop, rare))


def test_clipping_is_accepted_on_paths_without_the_scaler() -> None:
    scaled = "scaler.scale(loss).backward()\n"
    updated = "scaler.step(optimizer)\nscaler.update()\n"
    clipped = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
    unscaled = clipped + "optimizer.step()\n"
    plain = under("else", unscaled)
    has_scaler = "if scaler is not None"
    before_unscaling = (
        scaled + under("if limit", clipped) + updated,
        scaled + under("if limit", clipped, updated) + under("else", updated),
        under(has_scaler, scaled, clipped, updated) + plain,
        under("if amp", scaled) + clipped + under("if amp", updated),
    )
    without_scaler = (
        under(has_scaler, scaled, updated) + plain,
        under("if scaler is None", unscaled) + under("else", scaled, updated),
        under(has_scaler, scaled)
        + under("else", "loss.backward()\n")
        + under("if scaler", updated)
        + plain,
        under("if amp", scaled) + under(has_scaler, updated) + plain,
        under("def update()", under("if scaler", scaled, updated, "return\n"), unscaled),
        under("if not amp", unscaled) + under("if amp", scaled, updated),
    )
    assert [text for text in before_unscaling if "ND123" not in rules_in(text)] == []
    assert [text for text in without_scaler if "ND123" in rules_in(text)] == []


def test_an_evaluation_under_inference_mode_or_no_grad_is_recognized() -> None:
    loop = "for x in loader:\n    total += model(x).sum()\n"
    assert_found(
        "ND132",
        under("with torch.inference_mode()", loop),
        "@torch.no_grad()\n" + under("def test()", loop),
        kinds={"model": "module in training"},
    )


def test_saving_under_any_kind_of_rank_condition_is_accepted() -> None:
    save = "def save(path):\n    torch.save(model.state_dict(), 'x.pt')\n"
    assert_found(
        "ND141",
        save + "save(1)\n",
        "for i in range(3):\n    torch.save(model, f'{i}.pt')\n",
        kinds=IS_DDP,
    )
    assert_no_findings(
        save + "if rank == 0:\n    save(1)\n",
        save + "if args.is_master:\n    save(1)\n",
        save + "match rank:\n    case 0:\n        save(1)\n",
        save + "match mode:\n    case 'x' if rank == 0:\n        save(1)\n",
        "torch.save(model.state_dict(), f'{rank}.pt')\n",
        "path = f'{rank}.pt'\ntorch.save(model, path)\n",
        "torch.save(model, folder / 'x.pt')\n",  # of another cell
        "with open(path, 'wb') as f:\n    torch.save(model, f)\n",
        kinds=IS_DDP,
    )
    fit = "def fit():\n    torch.save(1, 'x.pt')\nfit()\n"
    assert_found(
        "ND141",
        "torch.save(1, 'x.pt')\n",
        "net.save_pretrained('out')\n",
        "net.save_pretrained('local-folder')\n",  # a name that all ranks write alike
        "torch.save(model.state_dict(), 'rank.pt')\n",
        "import accelerate\ntorch.save(1, 'x.pt')\n",  # no library has a part in this line
    )
    assert_no_findings(
        f"import accelerate\n{fit}",  # which may be called on one rank
        "torch.save(1, '/dev/null')\n",
        "net.save_pretrained(f'out{rank}')\n",
        "net.save_pretrained('out', is_main_process=rank == 0)\n",
        "if rank == 0:\n    net.save_pretrained('out')\n",
    )


def test_files_that_python_numpy_and_pandas_write_are_found() -> None:
    function = "def save():\n    open('f', 'w').write(text)\n"
    assert_found(
        "ND141",
        "open('f', 'w').write(text)\n",
        "with open('f', mode='wb') as f:\n    pickle.dump(x, f)\n",
        "json.dump(x, open('f.json', 'w'))\n",
        "from pathlib import Path\nPath('f').write_text(text)\n",
        "from pathlib import Path\nwith (Path('out') / 'f').open('w') as f:\n    f.write(text)\n",
        "Path('f').write_text(text)\n",  # imported in another cell
        "np.savetxt('f', x)\n",
        "df.to_csv('f.csv', index=False)\n",
        "df.to_parquet(path='f')\n",
        "import numpy as np\nnp.save('f', x)\n",
        "import numpy as np\nf = open('f', 'wb')\nnp.save(f, x)\n",  # once, for open()
        f"{function}save()\n",
        "if epoch % 10 == 0:\n    open('f', 'w').write(text)\n",
    )
    assert_no_findings(
        "open('f').read()\n",
        "open('f', 'a').write(text)\n",
        "open('f', 'rb')\n",
        "open('f', mode)\n",
        "open(f'{rank}.txt', 'w').write(text)\n",
        "folder = f'out/{rank}'\nopen(folder + '/f', 'w').write(text)\n",
        "import os\nos.chdir(f'out/{rank}')\nopen('f', 'w').write(text)\n",
        "with TemporaryDirectory() as d:\n    open(f'{d}/f', 'w').write(text)\n",
        "import os, sys\nsys.stderr = open(os.devnull, 'w')\n",
        "import time\nopen(f'{time.time_ns()}.txt', 'w').write(text)\n",
        "open(folder / 'f', 'w').write(text)\n",  # of another cell, perhaps with the rank in it
        function,  # another cell may call it on one rank
        f"{function}if rank == 0:\n    save()\n",
        "if rank == 0:\n    df.to_csv('f.csv')\n",
        "with FileLock('f.lock'):\n    open('f', 'w').write(text)\n",
        "text = df.to_csv(index=False)\n",
        "df.to_csv('f.csv', mode='a')\n",
        "import sys\ndf.to_csv(sys.stdout)\n",
        "import numpy as np\nnp.save(f'{rank}.npy', x)\n",
        "import gzip\ngzip.open('w')\n",
    )
    script = "with TemporaryDirectory() as d:\n    open(f'{d}/f', 'w').write(x)\n"
    assert_no_findings(script, head=COMMON + IMPORTS_DDP + "model = DDP(model)\n")


def test_a_printed_count_that_names_its_rank_is_accepted() -> None:
    text = "right = 0\nfor x, y in test:\n    right += 1\nprint({}right)\n"
    dealt = {"test": "loader divided"}
    assert_found("ND133", text.format(""), kinds=dealt)
    assert_no_findings(text.format("rank, "), kinds=dealt)


# ---- how long it takes

SHAPES = {
    "conditions": "def f{i}(rank, m):\n  if rank == 0:\n    dist.barrier()\n  dist.all_reduce(m)\n",
    "leavers": "def f{i}(rank, m):\n  if rank: return\n  dist.barrier()\n",
    "excepts": "try:\n  x = {i}\nexcept OSError:\n  dist.barrier()\n",
    "saves": "class A{i}:\n  def go(self, m, rank):\n    m = DDP(m)\n    if rank == 0:\n"
    "      self.save(m)\n    self.go(m)\n  def save(self, m):\n    torch.save(m, 'a{i}')\n"
    "    x = torch.load('a{i}')\n",
    "training": "def train{i}(model, loader, opt):\n  model = DDP(model)\n  total = 0\n"
    "  dl = DataLoader(loader, sampler=DistributedSampler(loader))\n  for e in range(3):\n"
    "    for x, y in dl:\n      scaler.scale(model(x).sum()).backward()\n"
    "      clip_grad_norm_(model.parameters(), 1.0)\n      scaler.step(opt)\n"
    "      dist.barrier()\n    model.eval()\n    for x, y in dl:\n"
    "      total += model(x).sum().item()\n    print(total / len(dl))\n"
    "    dist.all_reduce(p.grad)\n    model.to('cuda:0')\n",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_ten_times_as_much_code_takes_about_ten_times_as_long(shape: str) -> None:
    head = f"{COMMON}{IMPORTS_DDP}from torch.utils.data import DataLoader, DistributedSampler\n"
    head += "from torch.nn.utils import clip_grad_norm_\n"

    def took(count: int) -> float:
        text = head + "".join(SHAPES[shape].replace("{i}", str(i)) for i in range(count))
        source = CellSource(text, is_cell=False)
        began = time.thread_time()
        check_source(source)
        return time.thread_time() - began

    took(5)
    gc.collect()
    gc.disable()  # one collection of all that a test run holds takes half a second
    try:
        assert took(300) < 40 * took(30) + 0.1
    finally:
        gc.enable()
