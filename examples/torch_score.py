"""Scores a text with a ReLU model of Hugging Face in PyTorch, its blocks replaced by sparse ones.

`python examples/torch_score.py MODEL TEXT` reads a model, from a directory or the hub, and a file.
Without arguments it scores its own source by a small random model.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from twell_jax.torch import collect_stats, replace_mlps

CONTEXT, SEQUENCES = 1024, 16

device = "cuda" if torch.cuda.is_available() else "cpu"
parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [MODEL TEXT]")
parser.add_argument("given", nargs="*", help=argparse.SUPPRESS)
given = parser.parse_args().given
if len(given) == 2:
    try:
        name, text = given[0], Path(given[1]).read_text()
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        ids = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]
    except (ValueError, OSError) as error:  # what is no model or text
        parser.error(str(error))
elif not given:
    shape = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_act="relu", **shape)).bfloat16()
    ids = torch.tensor(list(Path(__file__).read_bytes()))
else:
    parser.error("MODEL and TEXT are given together, or neither")

blocks = replace_mlps(model.to(device).eval())
for block in blocks.values():
    block.keep_stats = True
losses = []
with torch.no_grad():
    for batch in ids.split(CONTEXT * SEQUENCES):
        whole = batch[: len(batch) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
        rows = (whole if len(whole) else batch[None]).to(device)
        losses.append(model(rows, labels=rows).loss)
print(f"cross-entropy {torch.stack(losses).mean():.3f} nats per token")
for path, stats in collect_stats(model).items():
    print(f"{path}: {stats.nnz:.0f} neurons per token, {stats.fired.float().mean():.0%} fired")
