"""The language model against float64 numpy, and the properties that its users rely on."""

import dataclasses
import functools
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.back_ends import changed
from tests.errors import ROUNDING, relative_error
from tests.twell_jax.drawn import SMALL
from tests.twell_jax.drawn import small as make
from tests.twell_jax.models.small import END, assert_close, draw_tokens, loss_and_gradients
from twell_jax import config
from twell_jax.config import ModelConfig
from twell_jax.ffn import CannotServe, SparseMLP, capture_stats
from twell_jax.models import KVCache, Transformer, graphdef

QWEN = {"kv_heads": 2, "sliding_window": 4, "qk_norm": True}


# Compiled once for each configuration and shape, so that most tests take tokens of shape [2, 12].
compiled = nnx.jit(lambda module, tokens, end: module(tokens, document_end=end), static_argnums=2)
decode = nnx.jit(lambda module, tokens, cache: module.decode(tokens, cache))
prefill = nnx.jit(
    lambda module, tokens, capacity, lengths: module.prefill(tokens, capacity, lengths),
    static_argnums=2,
)


def forward(module, tokens, document_end=None):
    """The logits and statistics, as NumPy arrays."""
    return jax.device_get(compiled(module, tokens, document_end))


def weights(module):
    """{"a.b.c": float64 array} of all parameters."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(path): np.asarray(leaf.get_value(), np.float64) for path, leaf in flat}


def reference_logits(module, tokens):
    """The decoder of `module` on one sequence, in float64, position by position."""
    c, w = module.config, weights(module)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + c.norm_eps) * scale

    def linear(x, layer, name):
        return x @ layer[f"{name}.kernel"] + layer.get(f"{name}.bias", 0)

    def rotate(x):  # [T, heads, head_dim]: pairs (i, i + head_dim / 2) turn by t * theta^(-2i/d)
        half = c.head_dim // 2
        angle = np.outer(np.arange(len(x)), c.rope_theta ** (-np.arange(half) * 2 / c.head_dim))
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    x = w["embed.embedding"][tokens]
    for i in range(c.layers):
        layer = {n.removeprefix("blocks."): v[i] for n, v in w.items() if n.startswith("blocks.")}
        normed = norm(x, layer["attention_norm.scale"])
        q, k, v = (
            linear(normed, layer, f"attention.{name}").reshape(len(x), -1, c.head_dim)
            for name in ("query", "key", "value")
        )
        q, k = rotate(q), rotate(k)
        attended = np.zeros_like(q)
        for t in range(len(x)):
            for head in range(c.heads):
                kv_head = head * c.num_kv_heads // c.heads
                score = np.exp(k[: t + 1, kv_head] @ q[t, head] / np.sqrt(c.head_dim))
                attended[t, head] = score / score.sum() @ v[: t + 1, kv_head]
        x = x + linear(attended.reshape(len(x), -1), layer, "attention.out")
        normed = norm(x, layer["mlp_norm.scale"])
        h = up = normed @ layer["mlp.w_up"].T
        gate = normed @ layer["mlp.w_gate"].T if c.gated else up
        h = np.maximum(gate, 0) * (up if c.gated else 1)
        x = x + h @ layer["mlp.w_down"]
    unembed = w["embed.embedding"].T if c.tie_embeddings else w["unembed.kernel"]
    return norm(x, w["norm.scale"]) @ unembed


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 1, "gated": False, "layers": 3},
        {"kv_heads": 2, "tie_embeddings": False, "head_size": 6, "attention_bias": True},
    ],
    ids=["default", "multi-query, not gated", "grouped, untied, narrow heads, biases"],
)
def test_logits_match_float64(changes):
    module, tokens = make(**changes), draw_tokens(2, 12)
    # Norm scales start at 1, biases at 0; here they must matter.
    for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if path[-1] in ("scale", "bias"):
            leaf[...] = np.linspace(0.5, 2.0, leaf.size, dtype=np.float32).reshape(leaf.shape)
    logits, stats = forward(module, tokens)
    assert logits.dtype == jnp.float32
    assert_close(logits, [reference_logits(module, row) for row in tokens])
    layers = (module.config.layers,)
    assert stats.fired.shape == (*layers, 48)
    assert all(a.shape == layers for a in (stats.l1, stats.nnz, stats.max_nnz, stats.overflow))


def test_bfloat16_is_close_to_float32():
    module, tokens = make(), draw_tokens(200, 12)  # a few tokens may be off by more
    half = make(dtype="bfloat16")
    nnx.update(half, nnx.state(module))
    logits, _ = forward(half, tokens)
    assert logits.dtype == jnp.float32
    assert_close(logits, forward(module, tokens)[0], tolerance=3e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("float32")}


def test_a_token_has_no_effect_before_itself():
    module, tokens = make(), draw_tokens(1, 12)
    for t in range(12):
        both = np.repeat(tokens, 2, axis=0)
        both[1, t] = (both[1, t] + 1) % END
        before, after = forward(module, both)[0]
        assert_close(after[:t], before[:t], tolerance=1e-5)
        assert np.abs(after[t:] - before[t:]).max(-1).min() > 1e-4


def test_grouped_heads_equal_repeated_ones():
    grouped, full, tokens = make(kv_heads=2), make(), draw_tokens(2, 12)
    state = nnx.to_flat_state(nnx.state(grouped))
    repeated = []
    for path, leaf in state:
        if path[-2:] in (("key", "kernel"), ("value", "kernel")):
            heads = np.reshape(leaf[...], (2, 32, 2, 8))
            leaf = leaf.replace(np.repeat(heads, 2, axis=2).reshape(2, 32, 32))
        repeated.append((path, leaf))
    nnx.update(full, nnx.from_flat_state(repeated))
    assert_close(forward(full, tokens)[0], forward(grouped, tokens)[0])


def test_tied_and_untied_parameters():
    tied, untied = weights(make()), weights(make(tie_embeddings=False))
    assert untied.pop("unembed.kernel").shape == (32, 61)
    assert {n: v.shape for n, v in tied.items()} == {n: v.shape for n, v in untied.items()}


def test_initial_scale_of_the_residual_branches():
    config = ModelConfig(**(SMALL | {"layers": 8, "init_scale": 0.02}))
    seed = seeds.integer()
    w = weights(nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(seed)))())
    assert w["blocks.mlp.w_up"].std() == pytest.approx(0.02, rel=0.05)
    for name in ("blocks.mlp.w_down", "blocks.attention.out.kernel"):
        assert w[name].std() == pytest.approx(0.02 / 4, rel=0.05)
    # Layers are drawn one by one, not copied.
    assert not np.array_equal(w["blocks.mlp.w_up"][0], w["blocks.mlp.w_up"][1])


def test_packed_documents_are_as_if_alone():
    module = make()
    documents = [[5, 7, 9, END], [END], [8, 5, 7, 9, 30, END]]
    rows = [[*documents, [5]], [*documents[::-1], [5]]]
    packed = np.array([[token for document in row for token in document] for row in rows])
    logits, _ = forward(module, packed, END)
    for row, found in zip(rows, logits, strict=True):
        start = 0
        for document in row:
            alone, _ = forward(module, np.resize(document, packed.shape))  # what follows is unseen
            assert_close(found[start : start + len(document)], alone[0, : len(document)])
            start += len(document)
    # and without masking they are not
    assert np.abs(forward(module, packed)[0] - logits)[:, 4:].max() > 1e-2


def test_document_masking_keeps_a_whole_sequence_whole():
    module, tokens = make(), draw_tokens(2, 12)
    assert_close(forward(module, tokens, END)[0], forward(module, tokens)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("split", "changes"),
    [((5, 1, 1, 5), {}), ((1, 5, 5, 1), {}), ((1,) * 12, {"kv_heads": 2}), ((5, 1, 1, 5), QWEN)],
)
def test_decoding_in_any_pieces_equals_the_forward_pass(split, changes):
    module, tokens = make(**changes), draw_tokens(2, 12)
    expected, _ = forward(module, tokens)
    cache, end = KVCache.empty(module.config, batch=2, capacity=15), 0
    for count in split:
        logits, cache = decode(module, tokens[:, end : end + count], cache)
        end += count
        np.testing.assert_array_equal(cache.lengths, end)
        assert_close(logits, expected[:, end - 1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("capacity", [5, 15])
@pytest.mark.parametrize("lengths", [None, (5, 5)])
def test_prompts_fill_a_cache_as_decoding_does(capacity, lengths):
    module, tokens = make(kv_heads=2), draw_tokens(2, 5)
    lengths = None if lengths is None else np.array(lengths, np.int32)
    found, cache = prefill(module, tokens, capacity, lengths)
    expected, stored = decode(module, tokens, KVCache.empty(module.config, 2, capacity=15))
    assert_close(found, expected)
    for ours, theirs in ((cache.k, stored.k), (cache.v, stored.v)):
        assert ours.shape[2] == capacity
        assert_close(ours[:, :, :5], theirs[:, :, :5])
    np.testing.assert_array_equal(cache.lengths, 5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 5)])
def test_slots_without_a_token_have_no_influence(lengths, poison):
    module, tokens = make(kv_heads=2), draw_tokens(2, 12)
    _, cache = prefill(module, tokens[:, :5], 15, np.array(lengths, np.int32))
    is_empty = (np.arange(15) >= np.array(lengths)[:, None])[:, :, None, None]

    def filled(k, v):
        k, v = jnp.where(is_empty, k, cache.k), jnp.where(is_empty, v, cache.v)
        return dataclasses.replace(cache, k=k, v=v)

    poisoned, zeros = filled(poison, -poison), filled(0, 0)
    for first, end in ((5, 6), (6, 9), (9, 12)):
        logits, poisoned = decode(module, tokens[:, first:end], poisoned)
        expected, zeros = decode(module, tokens[:, first:end], zeros)
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 3])
def test_sequences_of_their_own_length_are_as_if_alone(window):
    module, tokens = make(kv_heads=2, sliding_window=window), draw_tokens(2, 12)
    lengths = np.array([1, 3], np.int32)
    logits, cache = prefill(module, tokens[:, :5], 15, lengths)
    expected, _ = forward(module, tokens)
    for end in lengths + np.arange(8)[:, None]:
        assert_close(logits, expected[[0, 1], end - 1])
        logits, cache = decode(module, tokens[[0, 1], end][:, None], cache)


def test_a_prompt_takes_the_place_of_a_sequence_while_others_go_on():
    module, tokens = make(kv_heads=2), draw_tokens(3, 12)
    expected, _ = forward(module, np.resize(tokens, (4, 12)))
    _, cache = prefill(module, tokens[:2, :5], 15, np.array([5, 2], np.int32))
    for _ in range(2):
        logits, cache = decode(module, tokens[[0, 1], np.array(cache.lengths)][:, None], cache)
    found, prompt = prefill(module, tokens[2:, :4], 4, None)
    assert_close(found[0], expected[2, 3])
    cache = nnx.jit(lambda cache, prompt: cache.insert(1, prompt))(cache, prompt)
    np.testing.assert_array_equal(cache.lengths, [7, 4])
    for _ in range(4):
        rows, ends = [0, 2], np.array(cache.lengths)
        logits, cache = decode(module, tokens[rows, ends][:, None], cache)
        assert_close(logits, expected[rows, ends])


def test_decoding_in_bfloat16():
    module, tokens = make(dtype="bfloat16"), draw_tokens(200, 12)
    cache = KVCache.empty(module.config, batch=200, capacity=12)
    assert cache.k.dtype == jnp.bfloat16
    for t in range(12):
        logits, cache = decode(module, tokens[:, t : t + 1], cache)
    assert_close(logits, forward(module, tokens)[0][:, -1], tolerance=3e-2)


def test_its_statistics_can_be_captured_from_around_it():
    module, tokens = make(), draw_tokens(2, 12)
    (logits, stats), captured = nnx.jit(lambda module: capture_stats(module)(tokens))(module)
    assert list(captured.modules) == ["blocks/mlp"]
    jax.tree.map(np.testing.assert_array_equal, captured.modules["blocks/mlp"], stats)
    np.testing.assert_array_equal(logits, forward(module, tokens)[0])


def test_silu_is_the_dense_twin():
    module, tokens = make(activation="silu"), draw_tokens(2, 12)
    _, grads, stats = loss_and_gradients(module, tokens)
    np.testing.assert_array_equal(stats.max_nnz, 48)
    assert all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [("0p5b", 8, 0.5), ("1b", 18, 1.0), ("1p5b", 28, 1.5), ("2b", 38, 2.1)],
)
def test_published_shapes(name, layers, billions):
    path = Path(__file__).parents[3] / f"configs/{name}.yaml"
    shape = config.load(path).model
    abstract = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract)))
    attention, feed_forward, norms = 4 * 2048**2, 3 * 2048 * 5632, 2 * 2048
    assert count == 49152 * 2048 + layers * (attention + feed_forward + norms) + 2048
    assert round(count / 1e9, 1) == billions


@pytest.mark.slow
@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "block"])
def test_layers_of_a_model_may_differ_in_their_gradients(remat, monkeypatch):
    module, tokens = make(layers=4, remat=remat), draw_tokens(2, 12)
    original, asked = SparseMLP.__call__, []

    def record(mlp, x, *, gradients=None, **options):
        asked.append(gradients)
        return original(mlp, x, **options)

    monkeypatch.setattr(SparseMLP, "__call__", record)

    def loops(ffn_gradients):
        """What the model computes, and the gradients that each of its loops asks for."""
        asked.clear()
        model = nnx.jit(lambda module, tokens: module(tokens, ffn_gradients=ffn_gradients))
        return model(module, tokens), [value for value, _ in groupby(asked)]

    expected, of_one = loops(None)
    assert of_one == [None]
    assert loops(("sparse",) * 4)[1] == ["sparse"]
    mixed, of_three = loops(("sparse", "dense", "dense", "sparse"))
    assert of_three == ["sparse", "dense", "sparse"]
    assert loops((0.5, 0.5, None, 0.25))[1] == [0.5, None, 0.25]
    for ours, theirs in zip(*map(jax.tree.leaves, (mixed, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_every_layer_needs_its_gradients():
    with pytest.raises(ValueError, match="ffn_gradients must have a value for each of 2 layers"):
        make()(draw_tokens(1, 4), ffn_gradients=("dense",))


def test_the_gradients_are_those_of_the_config_unless_the_call_names_others():
    module, tokens = make(ffn_gradients="sparse"), draw_tokens(1, 128)
    with pytest.raises(CannotServe):  # float32 with d_model=32 suits no kernel anywhere
        nnx.eval_shape(module, tokens)
    nnx.eval_shape(functools.partial(module, ffn_gradients=("dense",) * 2), tokens)


def test_kernels_serve_a_model(back_end):
    """Scoring, a prompt into a cache and a next token, by kernels and densely."""
    common = {"vocab_size": 512, "context": 512, "d_model": 128, "layers": 3, "d_ff": 384}
    dense = make(**common, dtype="bfloat16", init_scale=0.1, ffn_implementation="xla")
    settings = dense.config.model_copy(update={"ffn_implementation": "mosaic"})
    sparse = nnx.merge(graphdef(settings), nnx.state(dense))
    tokens = seeds.rng().integers(0, 512, (4, 512))
    (logits, stats), (reference, expected) = (forward(m, tokens) for m in (sparse, dense))
    results = [(logits, reference)]
    caches = [KVCache.empty(m.config, 4, 512) for m in (sparse, dense)]
    for part in (tokens[:, :300], tokens[:, 300:301]):
        (logits, caches[0]), (reference, caches[1]) = (
            decode(m, part, cache) for m, cache in zip((sparse, dense), caches, strict=True)
        )
        results.append((logits, reference))
    for ours, ref in results:
        assert_close(ours, ref, tolerance=3e-2)
    np.testing.assert_allclose(stats.nnz, expected.nnz, rtol=2e-2)
    np.testing.assert_allclose(stats.l1, expected.l1, rtol=2e-2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "dots"])
@pytest.mark.parametrize("matmul_dtype", [None, "float8"])
def test_kernels_differentiate_what_lies_around_blocks(matmul_dtype, remat, back_end, serve):
    called = []

    def recorded(name):
        def call(*args, **options):
            called.append(name)
            return getattr(back_end, name)(*args, **options)

        return call

    names = "norm_grads", "round_both"
    serve(changed(back_end, **{name: recorded(name) for name in names}))
    common = {"vocab_size": 512, "context": 128, "d_model": 128, "d_ff": 256, "heads": 2}
    options = {"dtype": "bfloat16", "init_scale": 0.1, "remat": remat, "matmul_dtype": matmul_dtype}
    by_xla = make(**common, **options, ffn_implementation="xla")

    def gradients(**changes):
        settings = by_xla.config.model_copy(update=changes)
        _, found, _ = loss_and_gradients(nnx.merge(graphdef(settings), nnx.state(by_xla)), tokens)
        return jax.tree.leaves(found)

    tokens = seeds.rng().integers(0, 512, (4, 128))
    theirs, exact = gradients(), gradients(dtype="float32", matmul_dtype=None)
    assert not called
    if not back_end.recorded:  # its kernels serve only who asks for them
        gradients(ffn_implementation=None)
        assert not called
    ours = gradients(ffn_implementation=None if back_end.recorded else "mosaic")
    assert set(called) == set(names[: 2 if matmul_dtype else 1])
    for found, of_xla, expected in zip(ours, theirs, exact, strict=True):
        # They round less often, but a few numbers the other way.
        bound = 1.1 * relative_error(of_xla, expected) + ROUNDING
        assert relative_error(found, expected) < bound
        assert relative_error(found, of_xla) < bound
