"""Digests are those of versions before, so that what these saved is still known to be whole."""

import jax.numpy as jnp
import numpy as np
import pytest

from twell_jax.train.checkpoint import digest_of_json, digest_texts, digests_of_arrays


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (jnp.float32, "30a848e688aa528c"),
        (jnp.bfloat16, "aecf92b67010568c"),
        (jnp.int32, "3848f1ebdbbbea89"),
    ],
)
def test_of_an_array(dtype, expected):
    array = jnp.asarray(np.arange(-3, 9).reshape(3, 4), dtype)
    (digest,) = digests_of_arrays({"x": array}).values()
    assert digest_texts(digest) == [expected]


def test_of_json():
    expected = "50bde8676de56e30d818708f0a657a23ea58f22e467619d6f8a5b645e6fffb8c"
    assert digest_of_json({"b": (1, 0.1), "a": {"c": None}}) == expected
