"""Compares steps of decoding by kernels with the same model in float32, sequence by sequence.

    python -m benchmarks.soak_decoding [--rows 1e6] [--seed N] [--out DIRECTORY]

A step appends a token to sequences of random length, with random caches. A row is the logits of one
sequence. It is wrong if its error is larger than twice the largest of the same step by XLA in
bfloat16, relative to the logits; with 8-bit weights four times. Blocks add about as much to the
residual stream as is there, so that a neuron that is lost is more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.stats import norm

from benchmarks import caches, record
from benchmarks.soak import parser
from twell_jax import models
from twell_jax.config import ModelConfig
from twell_jax.models import DECODE_OPTIONS, Transformer, graphdef
from twell_jax.models.quantised import COVERED

ALLOWED, ALLOWED_IN_8_BITS = 2.0, 4.0  # what 16 bits round otherwise may get another 8-bit value
CAPACITY = 576  # of which keys in 8 bits fill no whole number of stages
DENSE = 7  # every so many-th token of the vocabulary has nearly all neurons active
SHARED = 16.0  # what all gates share: the largest feature of a token, which 8 bits do not round
MODEL = {
    "vocab_size": 1024, "context": CAPACITY, "d_model": 1024, "layers": 2, "heads": 16,
    "kv_heads": 4, "head_size": 64, "d_ff": 2816, "dtype": "bfloat16", "param_dtype": "bfloat16",
    "tie_embeddings": False, "activation": "relu",
    "ffn_implementation": "mosaic", "decode_implementation": "mosaic",
}  # fmt: skip
XLA = {"ffn_implementation": "xla", "decode_implementation": "xla"}
WIDE = XLA | {"dtype": "float32", "param_dtype": "float32"}


@dataclass(frozen=True)
class Case:
    """A program of the soak.

    Attributes:
      name: of the model, as the record has it.
      batch: sequences of a step.
      share: of the neurons that are active for a usual token.
      changes: to MODEL.
      parts: which are in 8 bits, a key of `COVERED`; "" for none.
    """

    name: str
    batch: int
    share: float
    changes: tuple[tuple[str, Any], ...] = ()
    parts: str = ""


CASES = [
    *(
        Case("sparse", batch, share)
        for batch, share in ((1, 0.01), (8, 0.1), (32, 0.01), (64, 0.1))
    ),
    *(Case("no gate", batch, 0.01, (("gated", False),)) for batch in (1, 32)),
    *(Case("live", batch, 0.03, (("live_width", True),)) for batch in (8, 64)),
    *(Case("drelu", batch, 0.03, (("activation", "drelu"),)) for batch in (1, 64)),
    *(Case("8 bits", batch, 0.03, parts="fp8-all-but-down") for batch in (8, 32)),
    *(
        Case("keys and values in 8 bits", batch, 0.03, (("kv_cache_dtype", "float8"),))
        for batch in (1, 32)
    ),
    Case("heads of 80 features", 8, 0.03, (("head_size", 80),)),
    Case("16 heads of 96 features together", 3, 0.03, (("head_size", 96), ("kv_heads", 1))),
    Case("heads of 256 features", 1, 0.01, (("head_size", 256), ("heads", 8))),
    Case("dense, d_model 3072", 8, 0.5, (("d_model", 3072), ("ffn_implementation", "xla"))),
    Case("sparse, d_model 3072", 16, 0.01, (("d_model", 3072), ("d_ff", 8192))),
]


def draw(case: Case) -> tuple[ModelConfig, nnx.State]:
    """The configuration and parameters of a model.

    The last feature of the residual stream is SHARED, or its negative for tokens with most neurons
    active; no block writes to it, no logit reads it, and its weights are the gates' thresholds.
    """
    config = ModelConfig(**MODEL | dict(case.changes))
    model = Transformer(config, rngs=nnx.Rngs(0))
    embedding, blocks = model.embed.embedding, model.blocks
    keys = iter(jax.random.split(jax.random.key(1), 8))
    embedding[...] = jax.random.normal(next(keys), embedding.shape, embedding.dtype)
    shared = jnp.where(jnp.arange(config.vocab_size) % DENSE == 0, -SHARED, SHARED)
    embedding[...] = embedding[...].at[:, -1].set(shared.astype(embedding.dtype))
    up, down, out = blocks.mlp.w_up, blocks.mlp.w_down, blocks.attention.out.kernel
    gate = blocks.mlp.w_gate if config.gated else up
    active = case.share * config.d_ff
    for weight, terms in ((up, config.d_model), (gate, config.d_model), (down, active)):
        weight[...] = jax.random.normal(next(keys), weight.shape, weight.dtype) / terms**0.5
    threshold = norm.ppf(1 - case.share) / SHARED
    gate[...] = gate[...].at[..., -1].set(-threshold.astype(gate.dtype))
    head = model.unembed.kernel
    head[...] = head[...].at[-1].set(0)
    for written in (down, out):
        written[...] = written[...].at[..., -1].set(0)
    if config.live_width:
        blocks.mlp.live[...] = jnp.array([config.d_ff * 5 // 8 + 3, config.d_ff], jnp.int32)
    if case.parts:
        model.quantise(COVERED[case.parts])
    return config, nnx.state(model)


def step(config: ModelConfig, parts: tuple[str, ...], changes, params, tokens, cache):
    """The logits of a step by the model with other settings, float32 `[B, vocab]`."""
    config = config.model_copy(update=changes)
    if changes.get("param_dtype"):
        params, cache = _wide((params, cache))
    model = nnx.merge(graphdef(config, parts), params)
    return models.decode(model, tokens, cache)[0]


def _wide(tree: Any) -> Any:
    """With float32 in place of bfloat16."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, tree)


def check(case: Case, config: ModelConfig, params: nnx.State, key: jax.Array) -> jax.Array:
    """The errors of the rows as a share of what is allowed, float32 `[B]`."""
    keys = jax.random.split(key, 3)
    tokens = jax.random.randint(keys[0], (case.batch, 1), 0, config.vocab_size)
    cache = caches.drawn(config, case.batch, CAPACITY, keys[2])
    cache = replace(cache, lengths=jax.random.randint(keys[1], (case.batch,), 0, CAPACITY))
    run = partial(step, config, COVERED[case.parts] if case.parts else ())
    ours, theirs = (run(changes, params, tokens, cache) for changes in ({}, XLA))
    with jax.default_matmul_precision("highest"):
        exact = run(WIDE, params, tokens, cache)
    ours, theirs = (
        jnp.linalg.norm(out - exact, axis=1) / jnp.linalg.norm(exact, axis=1)
        for out in (ours, theirs)
    )
    return ours / (jnp.max(theirs) * (ALLOWED_IN_8_BITS if case.parts else ALLOWED))


def compiled(case: Case) -> Callable[[jax.Array], jax.Array]:
    """`check` of a case, as a program of a key."""
    config, params = draw(case)
    call = jax.jit(partial(check, case, config), compiler_options=DECODE_OPTIONS)
    return partial(call.lower(params, jax.random.key(0)).compile(), params)


def soak(cases: list[Case], rows: float, seed: int) -> Iterator[dict[str, Any]]:
    """A row of the record for each case, of at least this number of rows together."""
    for number, case in enumerate(cases):
        call, worst, wrong, count = compiled(case), 0.0, 0, 0
        while count < rows / len(cases):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), count)
            shares = [call(key) for key in jax.random.split(key, 32)]
            for share in jax.device_get(shares):
                wrong += int((~(share <= 1)).sum())
                worst = max(worst, float(share.max()))
                count += len(share)
        yield {
            "model": case.name,
            "batch": case.batch,
            "active": case.share,
            "rows": count,
            "wrong": wrong,
            "worst": worst,
        }


def main() -> None:
    args = parser(__doc__, rows=1e6).parse_args()
    rows = soak(CASES, args.rows, args.seed)
    record.write_as_they_come("soak_decoding", rows, args.out)


if __name__ == "__main__":
    main()
