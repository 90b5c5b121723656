"""Hugging Face's Trainer in a cell, with a model made from a configuration: nothing is fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from notebook import Notebook
from processes import wait_until

from nbddp import WorkerGroup

pytest.importorskip("transformers")
pytestmark = [pytest.mark.multiproc, pytest.mark.ecosystem, pytest.mark.timeout(180)]

TRAINING = """
import torch
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        Path('begun').touch()
        words = torch.arange(index, index + 8) % 50
        return {
            'input_ids': words, 'attention_mask': torch.ones_like(words),
            'labels': torch.tensor(index % 2),
        }

def make_trainer(epochs=2, batch=4):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))
    args = TrainingArguments(
        output_dir='out', per_device_train_batch_size=batch, num_train_epochs=epochs,
        use_cpu=True, report_to=[], logging_steps=2, save_strategy='no', optim='sgd',
        learning_rate=0.1, lr_scheduler_type='constant', max_grad_norm=0,
        ddp_find_unused_parameters=False,
    )
    return Trainer(model=model, args=args, train_dataset=Sentences())
"""
WEIGHTS = "torch.cat([each.detach().flatten() for each in trainer.model.parameters()]).tolist()"


def test_transformers_trainer_trains_as_under_torchrun(group: WorkerGroup, folder: Path) -> None:
    group.run(f"{TRAINING}\ntrainer = make_trainer()\nsaid = trainer.train()")
    assert group.pull("trainer.args.world_size, said.global_step") == [(2, 8)] * 2
    first, second = group.pull(WEIGHTS)
    assert first == second
    script = folder / "script.py"
    script.write_text(
        f"{TRAINING}\nimport json\ntrainer = make_trainer()\ntrainer.train()\n"
        f"Path(f'{{trainer.args.process_index}}.json').write_text(json.dumps({WEIGHTS}))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    threads = str(group.pull("torch.get_num_threads()", rank=0))
    env = {**os.environ, "OMP_NUM_THREADS": threads}
    subprocess.run([*torchrun, str(script)], check=True, capture_output=True, env=env, timeout=120)
    assert first == json.loads((folder / "1.json").read_text())


def test_interrupted_training_keeps_its_names_and_can_continue(notebook: Notebook) -> None:
    begun = notebook.folder / "begun"
    begun.unlink(missing_ok=True)
    reply = notebook.run(f"%%ddp --nproc 2\n{TRAINING}\nkept = rank\ntrainer = make_trainer(10**5)")
    assert reply.status == "ok", reply.traceback
    request = notebook.begin("%%ddp\ntrainer.train()")
    assert wait_until(begun.exists, timeout=60)
    notebook.interrupt()
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    reply = notebook.run(
        f"%%ddp\ntrainer = make_trainer()\ntrainer.train()\nprint(kept, {WEIGHTS})"
    )
    assert reply.status == "ok", reply.traceback
    assert reply.lines(0)[-1][2:] == reply.lines(1)[-1][2:]
