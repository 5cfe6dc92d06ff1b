"""Models whose projections multiply in 8 bits while training."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.twell_jax.drawn import small as make
from tests.twell_jax.models.small import assert_close, draw_tokens, loss_and_gradients


@pytest.mark.slow
def test_a_model_trains_with_them_and_remat_changes_nothing():
    plain, tokens = make(init_scale=0.1), draw_tokens(2, 12)
    loss, grads, _ = loss_and_gradients(plain, tokens)
    of_remat = {}
    for remat in ("none", "dots"):  # "block" keeps nothing
        model = make(remat=remat, matmul_dtype="float8", init_scale=0.1)
        nnx.update(model, nnx.state(plain))
        of_remat[remat] = loss_and_gradients(model, tokens)
    in_8_bits, of_8_bits, _ = of_remat["none"]
    # A slip in a scale is at least a factor of two; what operands are rounded by is a sixteenth.
    assert 0 < abs(in_8_bits - loss) < loss / 16
    jax.tree.map(lambda a, b: assert_close(a, b, 1 / 4), of_8_bits, grads)
    for other_loss, other_grads, _ in of_remat.values():
        np.testing.assert_allclose(other_loss, in_8_bits, rtol=1e-6)
        jax.tree.map(assert_close, other_grads, of_8_bits)


def test_inference_has_operands_of_the_compute_dtype():
    plain, tokens = make(), draw_tokens(2, 12)
    model = make(matmul_dtype="float8")
    nnx.update(model, nnx.state(plain))
    logits, cache = model.prefill(tokens[:, :-1], 16)
    expected, other = plain.prefill(tokens[:, :-1], 16)
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(
        model.decode(tokens[:, -1:], cache)[0], plain.decode(tokens[:, -1:], other)[0]
    )
