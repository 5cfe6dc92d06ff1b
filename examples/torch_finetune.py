"""Fine-tunes a model of Hugging Face by transformers' `Trainer` with L1: fewer neurons are active.

`python examples/torch_finetune.py MODEL TEXT OUT` makes a ReLU model of MODEL, from a directory or
the hub, trains it on a file and writes it to OUT. Without arguments it trains a small random model
on its own source.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from twell_jax.torch import collect_l1, collect_stats, replace_mlps

CONTEXT, L1_COEFFICIENT = 64, 1e-2


class SparseTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        loss = loss + L1_COEFFICIENT * collect_l1(model)
        return (loss, outputs) if return_outputs else loss


def neurons_per_token(model, windows):
    rows = torch.stack([window["input_ids"] for window in windows[:8]]).to(model.device)
    with torch.no_grad():
        loss = model.train()(rows, labels=rows).loss
    nnz = torch.stack([stats.nnz for stats in collect_stats(model).values()]).mean()
    return f"cross-entropy {loss:.2f}, neurons per token: {nnz:.0f}"


parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [MODEL TEXT OUT]")
parser.add_argument("given", nargs="*", help=argparse.SUPPRESS)
given = parser.parse_args().given
if len(given) == 3:
    name, file, out = given
    try:
        text = Path(file).read_text()
        model = AutoModelForCausalLM.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.save_pretrained(out)
    except (ValueError, OSError) as error:  # what is no text or model
        parser.error(str(error))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
elif not given:
    out = tempfile.mkdtemp()
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    ids = torch.tensor(list(Path(__file__).read_bytes()))
else:
    parser.error("MODEL, TEXT and OUT are given together, or none")

replace_mlps(model, activation="relu")
model.config.hidden_act = "relu"  # what is written to OUT
windows = [
    {"input_ids": window, "labels": window} for window in ids.unfold(0, CONTEXT, CONTEXT // 4)
]
print(f"before: {neurons_per_token(model, windows)}")
arguments = TrainingArguments(
    out, max_steps=60, per_device_train_batch_size=16, learning_rate=3e-3, save_strategy="no",
    report_to="none", bf16=torch.cuda.is_available(), disable_tqdm=True,
)  # fmt: skip
SparseTrainer(model, arguments, train_dataset=windows).train()
print(f"after: {neurons_per_token(model, windows)}")
model.save_pretrained(out)
