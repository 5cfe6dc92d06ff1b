"""One rule for numbers, wherever a caller gives one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twell_jax import Rectifier, SparseMLP, explain, sparse_ffn
from twell_jax.ffn import Windows
from twell_jax.ffn.numeric import are_int32, is_integer, is_number

X, W = np.ones((5, 4), np.float32), np.ones((6, 4), np.float32)
OFFSET = jnp.int32(0)


@pytest.mark.parametrize("value", [1, np.int64(1), np.uint8(1)])
def test_integers_of_python_and_numpy_are_numbers(value):
    assert is_integer(value) and is_number(value)


@pytest.mark.parametrize("value", [0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5)])
def test_floats_of_python_and_numpy_are_numbers_alone(value):
    assert is_number(value) and not is_integer(value)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, np.ones(1), np.float32("nan"), 1j])
def test_others_are_none(value):
    assert not is_number(value) and not is_integer(value)


@pytest.mark.parametrize("value", [float("inf"), -np.float32("inf"), 10**400])
def test_numbers_are_finite_floats(value):
    assert not is_number(value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (2**31 - 1, True), (-(2**31), True), (2**31, False), (-(2**31) - 1, False), (2**70, False),
        (np.array([0, 2**33]), False), (np.array([0, 2**31 - 1]), True), (np.empty(0, int), True),
        (np.uint32(2**31), False), (True, False), ([0, 1], True), (1.0, False), ("1", False),
        (jnp.int8(1), True), (jnp.int32(1), True), (jnp.uint32(1), False), (jnp.bool(1), False),
        (jax.ShapeDtypeStruct((), jnp.int32), True), (jnp.float32(1), False),
    ],
)  # fmt: skip
def test_integers_are_those_that_int32_holds(values, expected):
    assert are_int32(values) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": Rectifier(threshold=True)}, "Rectifier needs a threshold .*, got True"),
        ({"activation": Rectifier(threshold=np.inf)}, "Rectifier needs a threshold .*, got inf"),
        ({"live": jnp.uint32(3)}, "live on the device must be int32, got uint32"),
        ({"live": True}, r"live must be one integer, got bool \[\]"),
        ({"live": np.array(2**33)}, "live must be from 0 to 6, got 8589934592"),
        *(
            ({"windows": Windows(OFFSET, length=length)}, f"length must .* 2.31 - 1, got {length}")
            for length in (0, -3, True, 2.5, 2**40)
        ),
        *(
            ({"windows": Windows(offset, length=4)}, f"windows.offset must be from 0 to 3, got {n}")
            for offset, n in ((-1, -1), (4, 4), (np.int64(2**33), 2**33))
        ),
        ({"windows": Windows(True)}, r"windows.offset must be one integer, got bool \[\]"),
        ({"windows": Windows(jnp.arange(2))}, r"windows.offset must be one .*, got int32 \[2\]"),
        ({"windows": Windows(OFFSET, np.full(5, 2**32))}, "documents must be .*, got int64"),
        ({"windows": Windows(OFFSET, jnp.zeros(5))}, "documents must be .*, got float32"),
    ],
)
@pytest.mark.parametrize("function", [sparse_ffn, explain])
def test_other_numbers_are_refused_in_one_line(options, message, function):
    with pytest.raises(ValueError, match=message) as raised:
        function(X, W, W, W, **options)
    assert "\n" not in str(raised.value)


def test_a_threshold_of_numpy_is_one():
    x, w = X / 7, W
    given = Rectifier(threshold=np.float32(0.1)), Rectifier(threshold=float(np.float32(0.1)))
    ys = [sparse_ffn(x, w, w, w, activation=act)[0] for act in given]
    np.testing.assert_array_equal(*ys)
    assert explain(x, w, w, w, activation=given[0]) == explain(x, w, w, w, activation=given[1])


def test_a_size_is_no_bool():
    with pytest.raises(ValueError, match="d_model must be a positive integer, got True"):
        SparseMLP(True, 6, rngs=nnx.Rngs(0))


def test_integers_beyond_int32_do_not_wrap_round():
    mlp = SparseMLP(4, 6, rngs=nnx.Rngs(0))
    large = np.full((1, 4), 2**33 + 1)
    np.testing.assert_allclose(mlp(large), mlp(large.astype(np.float32)))
