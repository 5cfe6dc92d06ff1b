"""Whole models at inference: speed, memory and energy, sparse against the fastest dense twin.

    python -m benchmarks.inference [--shapes 0p5b 2b] [--directions forward decode]
    python -m benchmarks.inference --checkpoint DIRECTORY --text FILE

"forward" scores 64 sequences of 2048 tokens; if they do not fit for every variant, half of them, a
quarter, and so on. "prefill" reads the prompts of a few sequences, "decode" appends a token to each
of them, with keys and values that are drawn. "forward" and "decode" also measure the models with
8-bit weights of `fp8_models`, "decode" also those with keys and values in 8 bits. Without a
checkpoint, weights are random, and layers have the nnz of `NNZ` and `PROFILE`. "error" compares
cross-entropies or logits with those of the dense bfloat16 model of the same function and weights,
"logits_error" the logits after the sequences that "forward" scores. Of its first `EXACT` sequences,
"float32_error" and "float32_logits_error" compare with the same weights in float32, and
"twin_error" and "twin_logits_error" compare a sparse model in 8 bits with what XLA computes of its
weights. "decode" also lets `generate` write, greedily and, where kernels decode, at a temperature;
the tokens per second that it reports stand beside those of the step alone. Energy needs the package
nvidia-ml-py. Where torch with CUDA is installed, "torch, silu" is a dense decoder in torch; it
lives in the memory that JAX leaves free, 25 % of the GPU's by default.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import caches, fp8_models, record, scores
from benchmarks.calls import Call, measure, peak_bytes
from twell_jax import config as config_lib
from twell_jax import models
from twell_jax.analysis import patterns
from twell_jax.config import ModelConfig
from twell_jax.inference import GREEDY, Sampling, generate, language_model
from twell_jax.inference.rates import Timed
from twell_jax.models import (
    DECODE_OPTIONS,
    PREFILL_OPTIONS,
    QUANTISED_OPTIONS,
    KVCache,
    Transformer,
    graphdef,
)

try:
    from benchmarks import torch_decoder
except ModuleNotFoundError:
    torch_decoder = None

CONFIGS = Path(__file__).parents[1] / "configs"

# Mean non-zeros per token as arXiv 2603.23198 reports them; 1b's is between its neighbours'.
NNZ = {"0p5b": 39, "1b": 34, "1p5b": 29, "2b": 24}
# How they vary with depth: the mean non-zeros of each layer of the 6-layer model from which
# patterns.RECORDED was recorded.
PROFILE = (42, 18, 25, 41, 54, 139)

# The dense variants come first, and the faster one is the baseline. The last of them computes the
# same function as the sparse one.
VARIANTS = {
    "xla, silu": {"activation": "silu", "ffn_implementation": "xla"},
    "xla, relu": {"activation": "relu", "ffn_implementation": "xla"},
    "mosaic, relu": {"activation": "relu", "ffn_implementation": "mosaic"},
}
DENSE = ("xla, silu", "xla, relu")
BATCH, CONTEXT = 64, 2048
EXACT = 4  # sequences that references of `forward` score
DECODE_BATCHES, PROMPT, CAPACITY = (1, 8, 32), 512, 1024
GENERATED = 128  # steps of `generate`, around a cache with PROMPT tokens
SAMPLED = Sampling(temperature=0.8)  # as the command does by default


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=NNZ, default=list(NNZ))
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--checkpoint", help="a run or Hugging Face directory, for `shapes`")
    parser.add_argument("--text", type=Path, help="what the checkpoint reads")
    args = parser.parse_args()
    if (args.checkpoint is None) != (args.text is None):
        parser.error("--checkpoint and --text belong together")
    rows, path = [], record.new_path("inference", args.out)
    for name in [args.checkpoint] if args.checkpoint else args.shapes:
        config, params, tokens = from_checkpoint(name, args.text) if args.text else random(name)
        case = {"model": name, "dtype": config.dtype} | pattern(config, params, tokens)
        for direction in args.directions:
            for row in DIRECTIONS[direction](config, params, tokens):
                rows.append(case | {"direction": direction} | row)
                record.write("inference", rows, path)
                print(record.line(rows[-1]), flush=True)
    print(path)


def from_checkpoint(directory: str, text: Path) -> tuple[ModelConfig, nnx.State, np.ndarray]:
    """Configuration, parameters, and the text as token ids, int32 [BATCH, CONTEXT + 1]."""
    lm = language_model.load(directory)
    ids = np.array(lm.encode(text.read_text(encoding="utf-8"))[len(lm.prefix) :], np.int32)
    start = np.array(lm.prefix or [lm.tokenizer.eot_id], np.int32)
    rows = np.resize(ids, (BATCH, CONTEXT + 1 - len(start)))
    tokens = np.concatenate([np.tile(start, (BATCH, 1)), rows], axis=1)
    return lm.model.config, nnx.state(lm.model), tokens


def random(name: str) -> tuple[ModelConfig, nnx.State, np.ndarray]:
    """The model of configs/NAME.yaml in bfloat16, and random tokens; rows begin with token 0."""
    config = config_lib.load(CONFIGS / f"{name}.yaml").model
    config = config.model_copy(update={"param_dtype": "bfloat16", "remat": "none"})
    params = with_pattern(config, profile(config.layers, NNZ[name]), jax.random.key(0))
    return config, params, draw_tokens(config.vocab_size, BATCH, CONTEXT)


def draw_tokens(vocab_size: int, batch: int, context: int) -> np.ndarray:
    """Random tokens, int32 `[batch, context + 1]`; rows begin with 0, which uses most neurons."""
    shape = (batch, context + 1)
    tokens = np.random.default_rng(0).integers(1, vocab_size, shape, dtype=np.int32)
    tokens[:, 0] = 0
    return tokens


def profile(layers: int, nnz: float) -> np.ndarray:
    """Mean non-zeros per token by layer, `nnz` on average, spread as in `PROFILE`."""
    spread = np.interp(np.linspace(0, 1, layers), np.linspace(0, 1, len(PROFILE)), PROFILE)
    return spread * nnz / spread.mean()


def with_pattern(config: ModelConfig, nnz: np.ndarray, key: jax.Array) -> nnx.State:
    """Random parameters with which a token has `nnz[i]` active neurons in layer i, on average.

    Some neurons are often active, many never. The last feature of the residual stream is 1 and no
    block writes to it, so its weights are the gates' thresholds (`patterns.independent`). The other
    features of the embeddings are N(0, 1), and the blocks' outputs are small compared to them. The
    last feature of token 0 is -1, so it has most neurons active, like a sequence's first token.
    """
    model = Transformer(config, rngs=nnx.Rngs(key))
    embedding, blocks = model.embed.embedding, model.blocks
    embedding[...] = jax.random.normal(key, embedding.shape, embedding.dtype)
    embedding[...] = embedding[...].at[:, -1].set(1.0).at[0, -1].set(-1.0)
    blocks.attention.out.kernel[...] = blocks.attention.out.kernel[...].at[..., -1].set(0.0)
    blocks.mlp.w_down[...] = blocks.mlp.w_down[...].at[..., -1].set(0.0)
    w_gate = blocks.mlp.w_gate
    for layer, mean in enumerate(nnz):
        layer_key = jax.random.fold_in(key, layer)
        shape = (config.d_model, config.d_ff)
        _, w = patterns.independent(layer_key, "skewed", 1, *shape, float(mean), w_gate.dtype)
        w_gate[...] = w_gate[...].at[layer].set(w)
    return nnx.state(model)


def pattern(config: ModelConfig, params: nnx.State, tokens: np.ndarray) -> dict[str, Any]:
    """Mean non-zeros in two sequences: over all tokens, by layer, and over the first tokens."""
    graph = graphdef(config.model_copy(update=VARIANTS["xla, relu"]))

    @jax.jit
    def nnz(params, tokens):
        return nnx.merge(graph, params)(tokens, per_token_stats=True)[1].nnz

    counts = np.asarray(nnz(params, tokens[:2, :-1]), np.float64)
    return {
        "nnz_mean": counts.mean(),
        "nnz_by_layer": counts.mean(axis=(1, 2)).round(1).tolist(),
        "nnz_first_token": counts[:, :, 0].mean(),
    }


def forward(config: ModelConfig, params: nnx.State, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    """Scores sequences: computes the cross-entropy of every token."""
    more_errors = scores.references(config, params, jnp.asarray(tokens[:EXACT]))
    batch, rows = len(tokens), []
    while not rows:
        part = jnp.asarray(tokens[:batch])

        def prepare(graph, params=params, part=part, options=None):
            compiled = scores.compiled(graph, params, part, options)
            details = fp8_models.details(graph, params, compiled)
            run, peak = partial(compiled, params, part), peak_bytes(compiled)
            return Call(run, part[:, 1:].size, peak, details=details)

        def in_8_bits(name, prepare=prepare):
            return prepare(*fp8_models.quantised(name, config, params), options=QUANTISED_OPTIONS)

        try:
            others = {name: partial(in_8_bits, name) for name in fp8_models.VARIANTS}
            rows = compare(config, prepare, others, more_errors)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or batch == 1:
                raise
            batch //= 2
    for row in rows:
        yield {"batch": batch, "context": part.shape[1] - 1} | row


def prefill(config: ModelConfig, params: nnx.State, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    """Reads prompts into a cache; the result is the logits of each next token."""

    def read(graph, params, tokens):
        return nnx.merge(graph, params).prefill(tokens, CAPACITY)

    for batch in DECODE_BATCHES:
        part = jnp.asarray(tokens[:batch, :PROMPT])

        def prepare(graph, part=part):
            call = jax.jit(partial(read, graph), compiler_options=PREFILL_OPTIONS)
            compiled = call.lower(params, part).compile()
            # Drops the cache, as the caches of all queued calls would not fit into memory.
            return Call(lambda: compiled(params, part)[0], part.size, peak_bytes(compiled))

        for row in compare(config, prepare, torch_call(config, params, part, 0)):
            yield {"batch": batch, "context": PROMPT} | row


def decode(config: ModelConfig, params: nnx.State, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    """Reads one more token of each sequence, always into the same slot of a cache, in place."""

    def extend(graph, params, token, cache):
        logits, longer = models.decode(nnx.merge(graph, params), token[:, None], cache)
        return logits, replace(longer, lengths=cache.lengths)

    for batch in DECODE_BATCHES:
        token = jnp.asarray(tokens[:batch, PROMPT])

        def prepare(graph, params=params, token=token):
            model = models.laid_out(nnx.merge(graph, params), len(token), CAPACITY)
            graph, params = nnx.split(model)
            cache = drawn_cache(model.config, len(token))
            step = partial(extend, graph)
            step = jax.jit(step, donate_argnums=2, compiler_options=DECODE_OPTIONS)
            compiled = step.lower(params, token, cache).compile()

            def run():
                nonlocal cache
                logits, cache = compiled(params, token, cache)
                return logits

            return Call(run, len(token), peak_bytes(compiled))

        def in_8_bits(name, prepare=prepare):
            return prepare(*fp8_models.quantised(name, config, params))

        names = *fp8_models.SPARSE, *fp8_models.CACHED
        others = {name: partial(in_8_bits, name) for name in names}
        others |= torch_call(config, params, token[:, None], PROMPT)
        for row in compare(config, prepare, others):
            if "ms" in row and (changes := VARIANTS.get(row["implementation"])):
                model = nnx.merge(graphdef(config.model_copy(update=changes)), params)
                row["generate_greedy"] = generated(model, tokens[:batch], GREEDY)
                if row["implementation"] not in DENSE:
                    row["generate_sampled"] = generated(model, tokens[:batch], SAMPLED)
            yield {"batch": batch, "context": PROMPT} | row


@partial(jax.jit, static_argnums=(0, 1))
def drawn_cache(config: ModelConfig, batch: int) -> KVCache:
    """A cache that holds PROMPT tokens of each sequence."""
    cache = caches.drawn(config, batch, CAPACITY, jax.random.key(0))
    return replace(cache, lengths=jnp.full(batch, PROMPT, jnp.int32))


def generated(model: Transformer, tokens: np.ndarray, sampling: Sampling) -> float:
    """Tokens per second of decoding as `Timed` reports them of `generate`, the median of three.

    The cache has room for CAPACITY tokens and holds PROMPT on average; prompts are the first of
    `tokens: int32 [B, at least PROMPT]`.
    """
    prompts = tokens[:, : PROMPT - GENERATED // 2]
    steps = partial(
        generate, model, prompts, max_tokens=CAPACITY - prompts.shape[1], sampling=sampling
    )
    rates = []
    for count in (2, *[1 + GENERATED] * 3):  # the first one compiles
        timed = Timed(itertools.islice(steps(), count))
        for _ in timed:
            pass
        rates.append(timed.rates(prompts).tokens_per_second)
    return statistics.median(rates[1:])


DIRECTIONS = {"forward": forward, "prefill": prefill, "decode": decode}


def torch_call(
    config: ModelConfig, params: nnx.State, tokens: jax.Array, start: int
) -> dict[str, Callable[[], Call]]:
    """What makes the call of `torch_decoder` by the name of its row; empty without torch and CUDA.

    Args:
      config: the model's configuration.
      params: its parameters.
      tokens: int32 `[B, T]`, which the call reads.
      start: number of tokens that the cache holds before; 0 unless T is 1.
    """
    if torch_decoder is None or not torch_decoder.has_cuda():
        return {}

    def prepare():
        model = nnx.merge(graphdef(config), params)
        cache = drawn_cache(config, len(tokens))
        run, peak = torch_decoder.prepare(model, np.asarray(tokens), start, cache)
        return Call(run, tokens.size, peak, torch_decoder.wait, torch_decoder.milliseconds)

    return {"torch, silu": prepare}


def compare(
    config: ModelConfig,
    prepare: Callable[[nnx.GraphDef], Call],
    others: Mapping[str, Callable[[], Call]] = MappingProxyType({}),
    more_errors: Callable[[str, Any], dict[str, float]] = lambda name, out: {},
) -> list[dict[str, Any]]:
    """A row per variant and for each of `others`, compared with the fastest dense one of VARIANTS.

    Args:
      config: the model's configuration.
      prepare: makes the call of a model with this structure.
      others: what makes the call of a further row.
      more_errors: maps the name and the result of a call to further errors of its row.

    Raises:
      Exception: a dense variant failed, or any variant ran out of memory. Other failures become a
        row.
    """
    rows, references = [], {}
    calls = {
        name: partial(prepare, graphdef(config.model_copy(update=changes)))
        for name, changes in VARIANTS.items()
    }
    for name, make in (calls | dict(others)).items():
        activation = name.split(", ")[1]
        try:
            measured, out = measure(make())
            if name in DENSE:
                references[activation] = out
            else:
                measured |= jax.tree.map(record.relative_error, out, references[activation])
            measured |= more_errors(name, out)
        except Exception as problem:
            if name in DENSE or "RESOURCE_EXHAUSTED" in str(problem):
                raise
            measured = {"failed": record.failure(problem)}
        rows.append({"implementation": name} | measured)
    baseline = min((row for row in rows if row["implementation"] in DENSE), key=lambda r: r["ms"])
    for row in rows:
        if "ms" in row:
            row["baseline"], row["baseline_ms"] = baseline["implementation"], baseline["ms"]
            row["speedup"] = baseline["ms"] / row["ms"]
        if "joules_per_token" in row:
            row["energy"] = row["joules_per_token"] / baseline["joules_per_token"]
    return rows


if __name__ == "__main__":
    main()
