"""Cells that train with other people's trainers, on a tiny model and a tokenizer made on the spot.

Each cell defines ``train()``, which trains a new model from the same seed and returns it.
"""

LANGUAGE_MODEL = """
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["a", "big", "bird", "cat", "dog", "eats", "fish", "runs", "sees", "small", "the"]

def make_tokenizer():
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({each: n for n, each in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )

def make_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=14, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=32, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    ))

TEXTS = [f"the {WORDS[i % 11]} {WORDS[i * 3 % 11]} a {WORDS[i * 7 % 11]}" for i in range(32)]
COMMON = dict(
    output_dir="out", per_device_train_batch_size=4, num_train_epochs=2, logging_steps=2,
    learning_rate=0.01, save_strategy="no", report_to=[], seed=1,
)
"""

TRAIN = """
def train():
    trainer = make_trainer()
    trainer.train()
    return trainer.model
"""

TRAINER = f"""{LANGUAGE_MODEL}
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

def make_trainer(**options):
    tokenizer = make_tokenizer()
    data = Dataset.from_list([dict(tokenizer(text)) for text in TEXTS])
    return Trainer(
        make_model(), TrainingArguments(**{{**COMMON, **options}}), train_dataset=data,
        eval_dataset=data, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )

def train():
    trainer = make_trainer(eval_strategy="epoch")
    trainer.train()
    return trainer.model
"""

SFT_WITH_LORA = f"""{LANGUAGE_MODEL}
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

def make_trainer(**options):
    return SFTTrainer(
        make_model(), SFTConfig(**{{**COMMON, "max_length": 16, "use_cpu": True, **options}}),
        train_dataset=Dataset.from_dict({{"text": TEXTS}}), processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
{TRAIN}"""

DPO = f"""{LANGUAGE_MODEL}
from trl import DPOConfig, DPOTrainer

def make_trainer(**options):
    pairs = [{{"prompt": "the cat", "chosen": text, "rejected": text[::-1]}} for text in TEXTS]
    return DPOTrainer(
        make_model(), make_model(), args=DPOConfig(**{{**COMMON, "use_cpu": True, **options}}),
        train_dataset=Dataset.from_list(pairs), processing_class=make_tokenizer(),
    )
{TRAIN}"""

GRPO = f"""{LANGUAGE_MODEL}
from trl import GRPOConfig, GRPOTrainer

def reward_length(completions, **options):
    return [float(len(set(each.split()))) for each in completions]

def make_trainer(**options):
    settings = dict(num_generations=2, max_completion_length=8, max_steps=6, use_cpu=True)
    return GRPOTrainer(
        make_model(), reward_length, args=GRPOConfig(**{{**COMMON, **settings, **options}}),
        train_dataset=Dataset.from_dict({{"prompt": TEXTS}}), processing_class=make_tokenizer(),
    )
{TRAIN}"""

PEFT = f"""{LANGUAGE_MODEL}
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

def train():
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"]))
    data = torch.utils.data.DataLoader(
        [torch.arange(8) + i % 5 for i in range(32)], batch_size=4
    )
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), data
    )
    for step, ids in enumerate(data):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({{"loss": loss}}, step=step)
    return accelerator.unwrap_model(model)
"""

VECTORS = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)

def make_loader():
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    return torch.utils.data.DataLoader(data, batch_size=4)
"""

ACCELERATE = f"""{VECTORS}
from accelerate import Accelerator

def train():
    accelerator = Accelerator()
    model = make_model()
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader()
    )
    for step, (x, y) in enumerate(data):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({{"loss": loss.item(), "step": step}})
    return accelerator.unwrap_model(model)
"""

LIGHTNING = f"""{VECTORS}
import lightning

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def make_trainer(**options):
    return lightning.Trainer(**{{
        **dict(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False),
        **dict(enable_checkpointing=False, enable_progress_bar=False), **options,
    }})

def train():
    net = Net()
    make_trainer().fit(net, make_loader(), make_loader())
    return net
"""

FABRIC = f"""{VECTORS}
from lightning.fabric import Fabric

def train():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, (x, y) in enumerate(fabric.setup_dataloaders(make_loader())):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        fabric.log("loss", loss, step=step)
    return model.module
"""

# what trains, by its name: the cell, the metrics that it reports, and the number of steps
CELLS = {
    "Trainer": (TRAINER, {"loss", "grad_norm", "learning_rate", "epoch", "eval_loss"}, 8),
    "SFTTrainer with LoRA": (SFT_WITH_LORA, {"loss", "learning_rate"}, 8),
    "DPO": (DPO, {"loss", "rewards/margins"}, 8),
    "GRPO": (GRPO, {"reward"}, 6),
    "PEFT": (PEFT, {"loss"}, 3),
    "Accelerate": (ACCELERATE, {"loss"}, 3),
    "Lightning": (LIGHTNING, {"loss", "val_loss", "learning_rate", "epoch"}, 8),
    "Fabric": (FABRIC, {"loss"}, 3),
}
