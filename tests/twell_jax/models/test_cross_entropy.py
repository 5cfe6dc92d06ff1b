"""Cross-entropy in chunks: that of whole logits, in a fraction of their memory, on any mesh."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import seeds
from tests.equations import equations
from tests.errors import relative_error
from tests.float8 import E4M3, rounded
from tests.twell_jax import drawn
from twell_jax.models import cross_entropy, sharding
from twell_jax.models.cross_entropy import chunks, mean_cross_entropy, token_cross_entropy

B, T, D, VOCAB = 8, 12, 16, 61


def draw(batch=B, tokens=T, dtype=jnp.float32):
    rng = seeds.rng()
    hidden = rng.standard_normal((batch, tokens, D))
    unembedding = rng.standard_normal((VOCAB, D)).astype(np.float32)
    labels = rng.integers(0, VOCAB, (batch, tokens), np.int32)
    return jnp.asarray(hidden, dtype), jnp.asarray(unembedding), labels


def of_whole_logits(hidden, unembedding, labels):
    logits = (hidden @ unembedding.astype(hidden.dtype).T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def loss_and_gradients(mean, hidden, unembedding, labels):
    """Of a loss of which the cross-entropy is one term, and the unembedding is in both."""

    def loss(hidden, unembedding):
        return 3.7 * mean(hidden, unembedding, labels) + 1e-3 * jnp.sum(unembedding**2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, unembedding)


def mean_of_whole_logits(*operands):
    return jnp.mean(of_whole_logits(*operands))


@pytest.fixture(params=[1, 5, 8], ids="{} chunks".format)
def split(request, monkeypatch):
    """8 x 12 tokens are split into so many chunks; into 5 only with padding."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * VOCAB * B * T // request.param + 1)
    if request.param == 5:
        monkeypatch.setattr(cross_entropy, "chunks", lambda tokens, vocab: 5)
    jax.clear_caches()  # of what was traced for another number
    assert cross_entropy.chunks(B * T, VOCAB) == request.param


@pytest.mark.sampled(2)
def test_loss_and_gradients_are_those_of_whole_logits(split):
    operands = draw()
    loss, gradients = loss_and_gradients(mean_cross_entropy, *operands)
    expected, reference = loss_and_gradients(mean_of_whole_logits, *operands)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for ours, theirs in zip(gradients, reference, strict=True):
        assert ours.dtype == theirs.dtype == jnp.float32
        assert relative_error(ours, theirs) < 1e-6
    by_token = jax.jit(token_cross_entropy)(*operands)
    np.testing.assert_allclose(by_token, of_whole_logits(*operands), rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
def test_bfloat16_rounds_no_more_than_with_whole_logits(split):
    operands = draw(dtype=jnp.bfloat16)
    loss, gradients = loss_and_gradients(mean_cross_entropy, *operands)
    expected, reference = loss_and_gradients(mean_of_whole_logits, *operands)
    np.testing.assert_allclose(loss, expected, rtol=1e-3)
    exact_operands = operands[0].astype(jnp.float32), *operands[1:]
    _, exact = loss_and_gradients(mean_of_whole_logits, *exact_operands)
    for ours, theirs, true in zip(gradients, reference, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, true) < 1.1 * relative_error(theirs, true) < 2e-2


def test_a_mean_without_gradients_is_that_of_its_tokens(split):
    operands = draw()
    by_token = jax.jit(token_cross_entropy)(*operands)
    np.testing.assert_allclose(jax.jit(mean_cross_entropy)(*operands), by_token.mean(), rtol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("weighted", [False, True])
def test_operands_of_8_bits_are_those_of_logits(split, weighted):
    hidden, unembedding, labels = draw()
    weights = jnp.asarray(seeds.rng().integers(0, 3, (B, T)), jnp.float32) if weighted else None
    mean = partial(mean_cross_entropy, weights=weights, in_8_bits=True)
    loss, gradients = jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))(hidden, unembedding, labels)
    x, matrix = (np.asarray(a, np.float64) for a in (hidden.reshape(-1, D), unembedding))
    logits = rounded(x, E4M3) @ rounded(matrix, E4M3).T
    log_p = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    factor = np.ones((B * T, 1)) if weights is None else np.asarray(weights, float).reshape(-1, 1)
    wanted = np.eye(VOCAB)[np.asarray(labels).ravel()]
    error = np.exp(log_p) - wanted
    expected = -np.mean(factor * np.sum(wanted * log_p, axis=1, keepdims=True))
    of_logits = error * factor / (B * T)
    np.testing.assert_allclose(loss, expected, rtol=1e-3)
    # An operand next to the middle of two numbers may become the other one, an eighth away.
    assert relative_error(gradients[0], (of_logits @ matrix).reshape(hidden.shape)) < 2.0**-7
    assert relative_error(gradients[1], of_logits.T @ x) < 2.0**-7
    np.testing.assert_allclose(jax.jit(mean)(hidden, unembedding, labels), loss, rtol=1e-6)
    if not weighted:  # rounding is seen
        exact = mean_of_whole_logits(hidden, unembedding, labels)
        assert abs(loss - exact) > 10 * abs(loss - expected)


def test_matmuls_take_bfloat16_and_gradients_are_summed_in_float32():
    gradient = jax.grad(mean_cross_entropy, argnums=(0, 1))
    found = [
        ({x.aval.dtype.name for x in equation.invars}, *equation.outvars)
        for equation in equations(gradient, *draw(dtype=jnp.bfloat16))
        if equation.primitive.name == "dot_general"
    ]
    assert all(operands == {"bfloat16"} for operands, _ in found)
    results = {(result.aval.dtype.name, result.aval.shape) for _, result in found}
    assert results == {
        ("bfloat16", (B * T, VOCAB)), ("bfloat16", (B * T, D)), ("float32", (VOCAB, D))
    }  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_models_head_gives_the_loss_of_its_logits(tied):
    module = drawn.transformer(
        vocab_size=VOCAB, context=16, d_model=D, layers=1, heads=2, d_ff=8, dtype="float32",
        init_scale=0.4, logit_scale=0.5, tie_embeddings=tied,
    )  # fmt: skip
    x, _, labels = draw()

    def chunked(module):
        return mean_cross_entropy(*module.head(x), labels)

    def whole(module):
        logits = module.logits(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    (loss, gradients), (expected, reference) = (
        nnx.jit(nnx.value_and_grad(mean))(module) for mean in (chunked, whole)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for ours, theirs in zip(*map(jax.tree.leaves, (gradients, reference)), strict=True):
        assert relative_error(ours, theirs) < 2e-6


def test_weights_multiply_the_loss_and_gradients_of_tokens(split):
    operands = draw()
    weights = jnp.asarray(seeds.rng().integers(0, 3, (B, T)), jnp.float32)
    loss, gradients = loss_and_gradients(
        lambda *operands: mean_cross_entropy(*operands, weights), *operands
    )
    expected, reference = loss_and_gradients(
        lambda *operands: jnp.mean(weights * of_whole_logits(*operands)), *operands
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for ours, theirs in zip(gradients, reference, strict=True):
        assert relative_error(ours, theirs) < 1e-6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(8, 1), (2, 4)], ids=["data 8", "data 2 x fsdp 4"])
def test_devices_split_the_tokens_and_reduce_once(shape, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * VOCAB * T // 4)
    operands = draw()
    expected, reference = loss_and_gradients(mean_of_whole_logits, *operands)
    mesh = sharding.make_mesh(shape, jax.devices("cpu")[:8])
    by_embed = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    specs = sharding.of_batch(mesh), by_embed, sharding.of_batch(mesh)
    with jax.set_mesh(mesh):
        gradient = jax.jit(
            jax.value_and_grad(mean_cross_entropy, argnums=(0, 1)), in_shardings=specs
        )
        operands = jax.device_put(operands, specs)
        loss, gradients = gradient(*operands)
        loops, entry = gradient.lower(*operands).compile().as_text().split("\nENTRY ")
    np.testing.assert_allclose(3.7 * loss + 1e-3 * np.sum(operands[1] ** 2), expected, rtol=1e-6)
    terms = 0, 2e-3 * np.asarray(operands[1])
    for ours, theirs, term in zip(gradients, reference, terms, strict=True):
        assert relative_error(3.7 * np.asarray(ours) + term, theirs) < 1e-6
    assert "all-reduce" in entry and not re.search("all-(reduce|gather)", loops)
    assert f"f32[3,{VOCAB}]" in loops  # each device has the logits of a quarter of its 12 tokens


def test_logits_never_exist_whole(monkeypatch):
    batch, tokens, vocab = 4, 512, 2048
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 2**20)
    shapes = (batch, tokens, D), (vocab, D)
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    labels = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)

    def compiled(mean, *differentiated):
        function = jax.value_and_grad(mean, differentiated) if differentiated else mean
        return jax.jit(function).lower(*operands, labels).compile()

    def arrays_of_logits(program):
        """Their numbers of elements, the largest last."""
        found = re.findall(rf"(?:f32|bf16)\[([\d,]*\b{vocab})\]", program.as_text())
        return sorted(int(np.prod([int(size) for size in shape.split(",")])) for shape in found)

    whole, *chunked = (
        compiled(mean_of_whole_logits, 0, 1),
        compiled(mean_cross_entropy, 0, 1),
        compiled(token_cross_entropy),
    )
    logits = batch * tokens * vocab
    assert arrays_of_logits(whole)[-1] == logits
    before = whole.memory_analysis().temp_size_in_bytes
    for program in chunked:
        assert arrays_of_logits(program)[-1] == logits // 16  # 2**20 of 2**24 bytes
        assert before - program.memory_analysis().temp_size_in_bytes > 0.8 * 4 * logits


@pytest.mark.parametrize(
    ("tokens", "vocab", "count"),
    [
        (24 * 2048, 49152, 12),  # at least 9, and 12 divides
        (2**14, 2**14, 1),
        (2**14 + 1, 2**14, 2),
        (65521, 49152, 12),  # a prime: padded
        (1, 2**20, 1),
    ],
)
def test_chunks_are_few_and_their_logits_below_a_gibibyte(tokens, vocab, count):
    assert chunks(tokens, vocab) == count
    assert 4 * vocab * (tokens // count) <= 2**30
