"""Other people's trainers, pasted into a cell: torchrun's weights, and metrics in the record."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conditions import interrupt_at
from drivers.extensions import findings_of
from drivers.ranks import MakeRanks, Ranks
from notebook import Notebook
from processes import under_torchrun, wait_until
from trainer_cells import CELLS, LANGUAGE_MODEL

trl = pytest.importorskip("trl")
load_file = pytest.importorskip("safetensors.torch").load_file
pytestmark = pytest.mark.timeout(300)

SAVE = """
torch.save([each.detach().clone() for each in train().parameters()], f"{folder}/{rank}.pt")
"""


def run_torchrun(command: list[str], folder: Path, threads: int) -> list[str]:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "ACCELERATE_USE_CPU": "true"}
    return under_torchrun(*command, cwd=folder, env=env, timeout=250)


@pytest.mark.parametrize("name", CELLS)
def test_trainer_has_the_weights_of_torchrun_and_reports_its_metrics(
    group: Ranks, tmp_path: Path, name: str
) -> None:
    source, metrics, steps = CELLS[name]
    group.run(source)
    for number in ("first", "second"):  # the second run in the same session
        (tmp_path / number).mkdir()
        cell = f"folder = {str(tmp_path / number)!r}\n{SAVE}"
        assert findings_of(group, group.run(cell), f"{source}\n{cell}") == []
    threads = group.pull("torch.get_num_threads()", rank=0)
    folder = tmp_path / "torchrun"
    folder.mkdir()
    script = folder / "script.py"
    place = f"folder, rank = {str(folder)!r}, os.environ['RANK']"
    script.write_text(f"import os\n{place}\n{source}\n{SAVE}")
    run_torchrun([str(script)], folder, threads)
    saved = {
        (run, rank): torch.load(tmp_path / run / f"{rank}.pt")
        for run in ("first", "second", "torchrun")
        for rank in range(2)
    }
    expected = saved["torchrun", 0]
    for weights in saved.values():
        assert len(weights) == len(expected) > 0
        assert all(map(torch.equal, weights, expected))
    rows = group.read_lines("metrics.jsonl")
    for rank in range(2):
        of_rank = [each for each in rows if each["rank"] == rank]
        assert metrics <= {key for each in of_rank for key in each}
        assert max(each["step"] for each in of_rank) == steps


@pytest.mark.parametrize("name", ["Trainer", "SFTTrainer with LoRA", "Accelerate", "Lightning"])
def test_trainer_that_does_not_use_the_other_ranks_is_found(
    make_group: MakeRanks, name: str
) -> None:
    group = make_group(2, env={"ACCELERATE_USE_CPU": "false"})
    alone = {'devices=2, strategy="ddp"': "devices=1", '"use_cpu": True': '"bf16": False'}
    source = CELLS[name][0]
    for right, wrong in alone.items():
        source = source.replace(right, wrong)
    cell = f"{source}\ntrain();"
    [finding] = findings_of(group, group.run(cell), cell)
    assert finding.rule == "ND218"
    assert finding.text.endswith("each rank trains alone, on all the data.")


SPLITS = {
    "no seed": ("data.train_test_split(test_size=8)['train']", "has other rows"),
    "seed": ("data.train_test_split(test_size=8, seed=0)['train']", ""),
    "shuffled": ("data.shuffle()", "has other rows"),
    "length": ("data.select(range(32 - 8 * rank))", "rank 0 has 32, rank 1 has 24 samples"),
    "random fingerprint": ("data.map(lambda row: {'n': str(numbers)[:5]})", ""),
    "augmented": ("data.map(lambda row: {'input_ids': [randrange(11)] * 4})", ""),
    "stream": ("data.shuffle().to_iterable_dataset()", ""),
}


@pytest.mark.parametrize("name", SPLITS)
def test_train_sets_that_differ_between_ranks_are_found(group: Ranks, name: str) -> None:
    split, expected = SPLITS[name]
    group.run(
        f"{CELLS['Trainer'][0]}\n"
        "import numpy\n"
        "from random import randrange\n"
        "numpy.random.seed(rank)  # ranks of a new notebook differ, too\n"
        "numbers = (each for each in range(3))  # cannot be pickled\n"
        "data = Dataset.from_list([\n"
        "    dict(input_ids=[i % 11] * 4, labels=[i // 3] * 4) for i in range(32)\n"
        "])"
    )
    cell = (
        f"train_set = {split}\n"
        "trainer = make_trainer(max_steps=2)\n"
        "trainer.train_dataset = train_set\n"
        "trainer.train();"
    )
    found = findings_of(group, group.run(cell), cell)
    assert [(each.rule, each.line) for each in found] == ([("ND223", 4)] if expected else [])
    assert all(expected in each.text for each in found)
    if name == "random fingerprint":
        assert len(set(group.pull("train_set._fingerprint"))) == 2


@pytest.mark.parametrize("seed", ["rank", "0"])
def test_splits_of_lightning_that_differ_between_ranks_are_found(group: Ranks, seed: str) -> None:
    cell = (
        f"data, generator = make_loader().dataset, torch.manual_seed({seed})\n"
        "data, _ = torch.utils.data.random_split(data, [0.5, 0.5], generator)\n"
        "make_trainer().fit(Net(), torch.utils.data.DataLoader(data, batch_size=4))"
    )
    group.run(CELLS["Lightning"][0])
    found = findings_of(group, group.run(cell), cell)
    assert [(each.rule, each.line) for each in found] == [("ND223", 3)] * (seed == "rank")


def test_evaluation_that_only_one_rank_calls_is_found(group: Ranks) -> None:
    group.run(f"{CELLS['Trainer'][0]}\ntrainer = make_trainer()")
    result = group.run("trainer.evaluate();")
    assert findings_of(group, result, "trainer.evaluate();") == []
    [finding] = findings_of(group, result, "if rank == 0:\n    print(trainer.evaluate())")
    assert (finding.rule, finding.line) == ("ND101", 2)
    assert finding.text.startswith("trainer.evaluate() is under `if rank == 0` (line 1)")


DIE = """
import os
from transformers import TrainerCallback

class Die(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        if rank == 1 and state.global_step == 5:
            os.kill(os.getpid(), 9)
"""
WEIGHTS = "[each.detach() for each in trainer.model.parameters()]"


@pytest.mark.parametrize("name", ["Trainer", "SFTTrainer with LoRA", "DPO", "GRPO"])
def test_healed_trainer_resumes_to_the_weights_of_an_undisturbed_run(
    group: Ranks, name: str
) -> None:
    saves = "save_strategy='steps', save_steps=2"
    group.run(f"{CELLS[name][0]}\ntrainer = make_trainer({saves})")
    group.run("trainer.train()")
    expected = group.pull(WEIGHTS, rank=0)
    group.run(f"trainer = make_trainer({saves}, output_dir='again')")
    group.failure_of(f"{DIE}\ntrainer.add_callback(Die)\ntrainer.train()")
    healed = group.heal(rerun=True)
    assert "cell [3] makes it, on all ranks (`%ddp heal --rerun`)" in str(healed)
    assert group.pull("trainer.state.is_world_process_zero, trainer.args.process_index") == [
        (True, 0),
        (False, 1),
    ]
    group.run("trainer.train(resume_from_checkpoint=True)")
    for weights in group.pull(WEIGHTS):
        assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("name", ["PEFT", "Accelerate", "Fabric"])
def test_training_after_a_heal_has_the_weights_of_an_undisturbed_run(
    group: Ranks, name: str
) -> None:
    group.run(CELLS[name][0])
    weights = "[each.detach() for each in train().parameters()]"
    expected = group.evaluate(weights)[0]
    group.failure_of("nbddp.faults.at(step=2, rank=1, kind='kill')\ntrain()")
    group.heal(rerun=True)
    for tensors in group.evaluate(weights):
        assert all(map(torch.equal, tensors, expected))


def test_healed_lightning_trainer_resumes_to_the_weights_of_an_undisturbed_run(
    group: Ranks,
) -> None:
    die = (
        "import os\n"
        "class Die(lightning.Callback):\n"
        "    def on_train_batch_end(self, trainer, *_):\n"
        "        if rank == 1 and trainer.global_step == 6: os.kill(os.getpid(), 9)\n"
    )
    weights = "[each.detach() for each in net.parameters()]"
    made = "net, trainer = Net(), make_trainer(enable_checkpointing=True, default_root_dir='{}')"
    data = "make_loader(), make_loader()"
    group.run(f"{CELLS['Lightning'][0]}\n{die}\n{made.format('one')}\ntrainer.fit(net, {data})")
    expected = group.pull(weights, rank=0)
    group.run(made.format("two"))
    group.failure_of(f"trainer.callbacks.append(Die())\ntrainer.fit(net, {data})")
    healed = group.heal(rerun=True)
    assert "cell [2] makes it, on all ranks (`%ddp heal --rerun`)" in str(healed)
    assert group.pull("trainer.global_rank") == [0, 1]
    group.run(
        "from pathlib import Path\n[path] = Path('two').rglob('*.ckpt')\n"
        f"trainer.fit(net, {data}, ckpt_path=path)"
    )
    for tensors in group.pull(weights):
        assert all(map(torch.equal, tensors, expected))


def test_notebook_cell_reports_trainers_unless_told_not_to(notebook: Notebook) -> None:
    source = f"{CELLS['Trainer'][0]}\ntrain()"
    notebook.run(f"%%ddp --nproc 2 --no-trainer-metrics\n{source}")
    [path] = notebook.folder.rglob("metrics.jsonl")
    assert path.read_text() == ""
    notebook.run(f"%%ddp\n{source}")
    assert '"eval_loss": ' in path.read_text()


def test_heal_command_makes_trainers_again(notebook: Notebook) -> None:
    made = f"%%ddp --nproc 2\n{CELLS['Trainer'][0]}\ntrainer = make_trainer()"
    assert notebook.run(made).status == "ok"
    notebook.run("%ddp kill 1")
    assert "`%ddp heal --rerun`" in notebook.run("%ddp heal").text
    assert "`%ddp heal --rerun`" in notebook.run("%%ddp --ranks 1\ntrainer.train()").traceback
    assert "ran again: cell" in notebook.run("%ddp heal --rerun").text
    notebook.run("%ddp kill 1")
    again = notebook.run("%ddp heal --rerun").text
    assert re.search(r"trainer \(.*; cell \[\d+\] makes it, and runs again now\n", again)
    reply = notebook.run("%%ddp\nprint(trainer.args.process_index)\ntrainer.train();")
    assert reply.status == "ok", reply.traceback
    assert reply.lines(1)[0] == "1"


def test_report_trainers_sends_metrics_to_the_logger_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import logging, sys, nbddp\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        f"nbddp.report_trainers()\n{CELLS['Lightning'][0]}\ntrain()"
    )
    output = "\n".join(run_torchrun([str(script)], tmp_path, threads=1))
    assert "INFO:nbddp:step 8: " in output
    assert "val_loss=" in output


FSDP = {
    "Trainer": "make_trainer(fsdp='full_shard', fsdp_config={'version': 2}).train();",
    "Accelerator": (
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
        "plugin = FullyShardedDataParallelPlugin(fsdp_version=2)\n"
        "Accelerator(fsdp_plugin=plugin).prepare(make_model());"
    ),
}


@pytest.mark.parametrize("name", FSDP)
def test_fsdp_without_a_gpu_is_found(group: Ranks, name: str) -> None:
    group.run(CELLS["Trainer"][0])
    [finding] = findings_of(group, group.run(FSDP[name]), FSDP[name])
    assert finding.rule == "ND222"
    assert finding.text.startswith(f"{name} was asked for FSDP")


@pytest.mark.parametrize("name", CELLS)
def test_interrupted_trainer_trains_again_to_the_same_weights(group: Ranks, name: str) -> None:
    group.run(CELLS[name][0])
    weights = "[each.detach() for each in train().parameters()]"
    expected = group.evaluate(weights)[0]
    path = group.run_folder / "metrics.jsonl"
    size = path.stat().st_size
    cell = group.begin("while True: train()")
    assert wait_until(lambda: path.stat().st_size > size, timeout=120)
    group.interrupt()
    verdict = group.finish(cell).verdict
    assert verdict is not None
    assert verdict.is_interrupt
    for tensors in group.evaluate(weights):
        assert all(map(torch.equal, tensors, expected))
    cell = group.begin("open(f'begun{rank}', 'w').close()\nwhile True: pass")
    interrupt_at(group, cell, "begun0", "begun1")  # Lightning makes its processes deaf to SIGINT


@pytest.mark.parametrize("strategy", ["ddp_notebook", "ddp_spawn"])
def test_lightning_strategy_that_spawns_is_refused_with_an_alternative(
    group: Ranks, strategy: str
) -> None:
    source = CELLS["Lightning"][0].replace('"ddp"', f'"{strategy}"')
    error = str(group.failure_of(f"{source}\ntrain()"))
    assert re.search('strategy="ddp".*devices=world_size', error)
    group.assert_works()


def test_notebook_launcher_is_refused_with_an_alternative(group: Ranks) -> None:
    launch = (
        "from accelerate import notebook_launcher\nnotebook_launcher(train, (), num_processes=2)"
    )
    assert "train()" in str(group.failure_of(f"{CELLS['Accelerate'][0]}\n{launch}"))
    group.assert_works()


def test_script_of_trl_has_the_weights_and_files_of_torchrun(group: Ranks, folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(LANGUAGE_MODEL, names)
    names["make_model"]().save_pretrained("tiny")
    names["make_tokenizer"]().save_pretrained("tiny")
    Path("texts").mkdir()
    rows = [json.dumps({"text": text}) for text in names["TEXTS"]]
    Path("texts/train.jsonl").write_text("\n".join(rows))
    options = {
        "--model_name_or_path": "tiny",
        "--dataset_name": "texts",
        "--max_steps": "4",
        "--logging_steps": "2",
        "--seed": "1",
        "--report_to": "none",
    }
    arguments = ["--use_cpu", *(word for option in options.items() for word in option)]
    script = str(Path(trl.__file__).parent / "scripts" / "sft.py")
    result = group.run_script(script, *arguments, "--output_dir", "ours")
    assert result.is_ok
    run_torchrun([script, *arguments, "--output_dir", "theirs"], folder, threads=1)
    ours, theirs = (
        {path.name: path for path in Path(name).iterdir() if path.is_file()}
        for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    first, second = (load_file(each["model.safetensors"]) for each in (ours, theirs))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_accelerator_in_mixed_precision_goes_on_after_a_heal(group: Ranks) -> None:
    group.run(f"{CELLS['Accelerate'][0]}\naccelerator = Accelerator(mixed_precision='bf16')")
    group.run(
        "model = make_model()\n"
        "model, optimizer, loader = accelerator.prepare(\n"
        "    model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader()\n"
        ")\n"
        "def train():\n"
        "    for x, _ in loader:\n"
        "        loss = model(x).sum()\n"
        "        accelerator.backward(loss)\n"
        "        optimizer.step()\n"
        "    return loss.dtype, accelerator.gather(loss).tolist(), model.module.weight.tolist()\n"
        "train()"
    )
    group.kill(1)
    assert "not carried" not in str(group.heal())
    first, second = group.evaluate("train()")
    assert first == second
    places = "accelerator.process_index, PartialState().process_index, PartialState().num_processes"
    assert group.evaluate(f"from accelerate.state import PartialState\n{places}") == [
        (rank, rank, 2) for rank in range(2)
    ]


def test_a_metric_of_torchmetrics_covers_all_ranks(group: Ranks) -> None:
    found = group.evaluate(
        "from torchmetrics.regression import SpearmanCorrCoef\n"
        "metric, values = SpearmanCorrCoef(), torch.arange(10.0)\n"
        "values = values[6:] if rank else values[:6]\n"  # lists of different lengths
        "metric.update(values, values - 100 * rank)\nmetric.compute().item()"
    )
    assert found == [pytest.approx(-5 / 11)] * 2  # 1 on each rank alone
