"""A Llama of transformers scores text in torch: as it is, and after `twell_jax.torch.replace_mlps`.

    python -m benchmarks.torch_scoring [configs/2b.yaml] [key=value ...] [--sequences N]
        [--out DIRECTORY]

Weights are random, with the pattern of active neurons that benchmarks.inference draws; a sequence
has `model.context` tokens. The decoder is called from Python, and the head and the cross-entropies
follow sequence by sequence, as the logits of all would not fit into memory. Rows "compiled" have
each layer, and head and cross-entropies, behind torch.compile: compiled as a whole, the decoder
gives attention a mask, with which torch has no flash attention. Blocks choose what computes them,
as a user's do: "computed_by" says it. Before, `lay_out` and `order_by_use` have prepared them, the
latter by the first micro-batch.
Errors compare with the same model, eager, whose feed-forward modules compute in float32: "error"
the cross-entropies of all tokens, "logits_error" the logits after each sequence. After
torch.compile, which rounds less often, they may be larger for that alone. It needs transformers.
"""

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from torch.nn import functional
from transformers import LlamaForCausalLM

from benchmarks import inference, record, torch_decoder
from twell_jax import config as config_lib
from twell_jax.config import ModelConfig
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models import Transformer, graphdef
from twell_jax.models.pretrained import save_pretrained
from twell_jax.torch import (
    choice,
    lay_out,
    order_by_use,
    replace_mlps,
)  # has JAX leave memory to torch

type Scores = dict[str, torch.Tensor]


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("config", nargs="?", default="configs/2b.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--sequences", type=int, default=inference.BATCH, metavar="N")
    args = parser.parse_intermixed_args()
    if (name := Path(args.config).stem) not in inference.NNZ:
        parser.error(f"config: must be of {', '.join(inference.NNZ)}, got {name}")
    config = config_lib.load(args.config, args.overrides).model
    model = in_torch(draw(config, inference.NNZ[name]))
    tokens = inference.draw_tokens(config.vocab_size, args.sequences, config.context)
    rows = ({"model": name} | row for row in measure(model, tokens))
    record.write_as_they_come("torch_scoring", rows, args.out)


def draw(config: ModelConfig, nnz: float) -> Transformer:
    """A bfloat16 model in the host's memory, of which a token has `nnz` neurons active on average.

    JAX would not give memory of the GPU back.
    """
    config = config.model_copy(update={"param_dtype": "bfloat16", "remat": "none"})
    spread = inference.profile(config.layers, nnz)
    with jax.default_device(jax.devices("cpu")[0]):
        params = jax.device_get(inference.with_pattern(config, spread, jax.random.key(0)))
    return nnx.merge(graphdef(config), params)


def in_torch(model: Transformer) -> LlamaForCausalLM:
    """The model as transformers loads its export, on the GPU if torch has one."""
    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(directory, model, ByteTokenizer())  # any that fits: there is no text
        llama = LlamaForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        return llama.to("cuda" if torch_decoder.has_cuda() else "cpu").eval()


def measure(
    model: LlamaForCausalLM, tokens: np.ndarray, micro_batch: int = 8
) -> Iterator[dict[str, Any]]:
    """Yields a row for each way to compute; on the way, the model's blocks are replaced.

    Args:
      model: a Llama with ReLU, in bfloat16.
      tokens: int32 `[B, T + 1]`.
      micro_batch: number of sequences that the decoder reads at a time.
    """
    ids = torch.from_numpy(tokens).long().to(model.device)
    exact, nnz = reference(model, ids, micro_batch)
    batch, context = ids[:, 1:].shape
    case = {"batch": batch, "context": context, "micro_batch": micro_batch, "nnz_mean": nnz}

    def row(name: str, **more: str) -> dict[str, Any]:
        compiles = name.endswith("compiled")
        try:
            parts = model.model, partial(scores_of, model.lm_head)
            run = partial(score, *(compiled(*parts) if compiles else parts), ids, micro_batch)
            return {"implementation": name} | case | more | timed(run, exact)
        except Exception as problem:  # compilers and kernels raise many kinds
            if name == "torch":
                raise
            return {"implementation": name} | case | more | {"failed": record.failure(problem)}

    dense = [row("torch"), row("torch, compiled")]
    baseline = min((found for found in dense if "ms" in found), key=lambda found: found["ms"])
    named = {"baseline": baseline["implementation"], "baseline_ms": baseline["ms"]}
    replace_mlps(model.requires_grad_(False))
    lay_out(model)
    widths = model.config.hidden_size, model.config.intermediate_size
    facts = model.device.type, "bfloat16", min(batch, micro_batch) * context, *widths
    by = choice.implementation(*facts, gated=True, y_alone=True)
    if by == "mosaic":
        order_by_a_call(model, ids[:micro_batch, :-1])
    sparse = map(partial(row, computed_by=by), ("kernels", "kernels, compiled"))
    for found in itertools.chain(dense, sparse):
        speedup = {"speedup": baseline["ms"] / found["ms"]} if "ms" in found else {}
        yield found | named | speedup


@torch.no_grad()
def order_by_a_call(model: LlamaForCausalLM, ids: torch.Tensor) -> None:
    """Puts the neurons of blocks in the order in which `ids: [B, T]` use them, by kernels."""
    blocks = [layer.mlp for layer in model.model.layers]
    for block in blocks:
        block.keep_stats = True
    model.model(ids, use_cache=False)
    order_by_use(model)
    for block in blocks:
        block.keep_stats, block.stats = None, None


def reference(model: LlamaForCausalLM, ids: torch.Tensor, micro_batch: int) -> tuple[Scores, float]:
    """Scores by feed-forward modules in float32, and their active neurons per token and layer."""
    exact, active = copy.deepcopy(model), []
    for layer in exact.model.layers:
        mlp = layer.mlp.float()
        mlp.register_forward_pre_hook(lambda _, args: args[0].float())
        mlp.register_forward_hook(lambda _, args, y: y.to(model.dtype))
        mlp.gate_proj.register_forward_hook(lambda _, args, z: active.append((z > 0).sum()))
    scores = score(exact.model, partial(scores_of, exact.lm_head), ids, micro_batch)
    return scores, int(sum(active)) / (len(exact.model.layers) * ids[:, 1:].numel())


@torch.no_grad()
def score(decoder: Callable, head: Callable, ids: torch.Tensor, micro_batch: int) -> Scores:
    """Cross-entropies and the last logits of `ids: [B, T + 1]`, by the names of their errors.

    Args:
      decoder: that of transformers.
      head: `scores_of` some weights.
      ids: the tokens.
      micro_batch: how many sequences the decoder reads at a time.

    Returns:
      "error" `[B, T]` and "logits_error" `[B, vocab]`, float32.
    """
    entropies, last = [], []
    for part in ids.split(micro_batch):
        hidden = decoder(part[:, :-1], use_cache=False).last_hidden_state
        for states, following in zip(hidden, part[:, 1:], strict=True):
            of_tokens, of_last = head(states, following)
            entropies.append(of_tokens)
            last.append(of_last)
    return {"error": torch.stack(entropies), "logits_error": torch.stack(last)}


def scores_of(
    head: Callable, states: torch.Tensor, following: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross-entropies `[T]` of a sequence and its last logits `[vocab]`, float32."""
    logits = head(states).float()
    entropies = functional.cross_entropy(logits, following, reduction="none")
    return entropies, logits[-1].clone()  # a view would keep the others


def compiled(decoder: torch.nn.Module, head: Callable) -> tuple[torch.nn.Module, Callable]:
    """The decoder with each layer behind torch.compile, and the head so, with the same weights."""
    torch.compiler.reset()  # before, layers may have had other blocks
    made = copy.copy(decoder)
    layers = torch.nn.ModuleList(torch.compile(a, dynamic=False) for a in decoder.layers)
    made._modules = decoder._modules | {"layers": layers}
    return made, torch.compile(head, dynamic=False)


def timed(run: Callable[[], Scores], exact: Scores) -> dict[str, Any]:
    """Time, speed, mean cross-entropy in nats and errors of what scores."""
    found = run()
    ms = torch_decoder.milliseconds(run, calls=1)
    return {
        "ms": ms,
        "tokens_per_second": found["error"].numel() / ms * 1e3,
        "cross_entropy": found["error"].mean().item(),
        **{key: ((found[key] - exact[key]).norm() / exact[key].norm()).item() for key in found},
    }


if __name__ == "__main__":
    main()
