"""All layers of a decoding step in one launch, against the definition in plain JAX."""

import jax
import numpy as np
import pytest

from pallas_kernels.hopper.decode.one_launch.call import decode_layers
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.reference import decode as reference
from tests.errors import relative_error
from tests.pallas_kernels.hopper.decode.one_launch import drawn
from tests.pallas_kernels.hopper.decode.one_launch.drawn import Case

SMALL = Case(1, 1, 512, 256, 4, 2, 64, 128)
LARGE = {
    "2b": Case(2, 1, 2048, 5632, 32, 32, 64, 1024, offset=2.87),
    "2b, half of the gates open": Case(2, 8, 2048, 5632, 32, 32, 64, 1024),
    "Llama-3.1-8B": Case(2, 8, 4096, 14336, 32, 8, 128, 1024, offset=2.87),
    "Qwen3-0.6B": Case(
        2, 3, 1024, 3072, 16, 8, 128, 512, is_sparse=False, rectifier=None, has_head_norms=True
    ),
    "SmolLM2-360M": Case(2, 5, 960, 2560, 15, 5, 64, 256, is_sparse=False, rectifier=None),
    "Qwen2.5-0.5B": Case(
        2, 1, 896, 4864, 14, 2, 64, 1024, is_sparse=False, rectifier=None, has_biases=True
    ),
    "2b, dense": Case(2, 8, 2048, 5632, 32, 32, 64, 1024, is_sparse=False),
    "2b in 8 bits": Case(2, 3, 2048, 5632, 32, 32, 64, 1024, offset=2.87, in_8_bits="all"),
    "2b, dense, in 8 bits": Case(
        2, 1, 2048, 5632, 32, 32, 64, 1024, is_sparse=False, in_8_bits="mlp"
    ),
    "narrow": Case(2, 2, 960, 2560, 15, 5, 64, 256, offset=2.87),
    "Qwen3-0.6B, 21 sequences": Case(
        2, 21, 1024, 3072, 16, 8, 128, 1024, is_sparse=False, rectifier=None, has_head_norms=True
    ),
    "2b, splits without keys": Case(2, 1, 2048, 5632, 32, 32, 64, 1024, offset=2.87, lengths=(1,)),
    "Qwen3-0.6B, splits without keys": Case(
        2, 3, 1024, 3072, 16, 8, 128, 4096, lengths=(0, 65, 3000), has_head_norms=True
    ),
    "Qwen3-0.6B, most splits": Case(2, 1, 1024, 3072, 16, 8, 128, 4096, lengths=(1111,)),
    "granite-3b-code": Case(
        2, 3, 2560, 10240, 32, 32, 80, 1024, is_sparse=False, rectifier=None, has_biases=True,
        has_mlp_biases=True,
    ),
    "biases, sparse": Case(2, 3, 2560, 10240, 32, 32, 80, 1024, offset=2.87, has_mlp_biases=True),
    "one key/value head": Case(2, 3, 2048, 5632, 32, 1, 64, 1024, offset=2.87),
    "2b, 32 sequences": Case(2, 32, 2048, 5632, 32, 32, 64, 1024, offset=2.87),
    "2b, dense, 31 sequences": Case(2, 31, 2048, 5632, 32, 32, 64, 1024, is_sparse=False),
    "2b, pruned": Case(2, 2, 2048, 5632, 32, 32, 64, 1024, offset=2.87, live=(4000, 33)),
    "2b, pruned, dense": Case(
        2, 8, 2048, 5632, 32, 32, 64, 1024, is_sparse=False, live=(5631, 1000)
    ),
    "heads of 96 features": Case(
        2, 1, 3072, 8192, 32, 8, 96, 1024, offset=2.87, has_head_norms=True
    ),
    "heads of 192 features": Case(2, 2, 3072, 8192, 16, 4, 192, 1024, offset=2.87),
    "2b, pruned, half of the gates open": Case(
        2, 8, 2048, 5632, 32, 32, 64, 1024, live=(5632, 3000)
    ),
    "heads of 256 features": Case(2, 5, 2048, 8192, 8, 1, 256, 1024, has_head_norms=True),
    "2b, cache in 8 bits": Case(
        2, 3, 2048, 5632, 32, 32, 64, 1024, offset=2.87, has_8_bit_cache=True
    ),
    "Qwen3-0.6B, cache in 8 bits": Case(
        2, 21, 1024, 3072, 16, 8, 128, 1024, is_sparse=False, rectifier=None, has_head_norms=True,
        has_8_bit_cache=True,
    ),
    "heads of 96 features, cache in 8 bits": Case(
        2, 1, 3072, 8192, 32, 8, 96, 1024, offset=2.87, has_8_bit_cache=True
    ),
    "heads of 256 features, cache in 8 bits": Case(
        2, 5, 2048, 8192, 8, 1, 256, 1000, has_8_bit_cache=True, lengths=(999, 0, 1, 63, 700)
    ),
    "2b, cache in 8 bits, windows": Case(
        2, 8, 2048, 5632, 32, 32, 64, 1024, is_sparse=False, has_8_bit_cache=True, in_8_bits="all",
        window=300,
    ),
    "Minitron-4B": Case(
        2, 8, 3072, 9216, 24, 8, 128, 1024, offset=2.87, gated=False,
        rectifier=Rectifier(squared=True), rotated=64, has_layer_norms=True,
    ),
    "layer norms, dense, in 8 bits": Case(
        2, 5, 2048, 5632, 32, 32, 64, 1024, is_sparse=False, in_8_bits="all", has_layer_norms=True
    ),
}  # fmt: skip


def run(function, stream, layers, k, v, lengths, rope):
    """The stream, keys and values after a step."""
    k, v = (jax.tree.map(jax.new_ref, of) for of in (k, v))
    stream = function(stream, layers, k, v, lengths, rope)
    return stream, *(jax.tree.map(lambda ref: ref[...], of) for of in (k, v))


def assert_matches(got, operands, case):
    """Where both round to 8 bits, a difference of 2^-9, as in bfloat16, takes one in 64 numbers to
    its neighbour, which is up to 2^-3 away: 0.016 of each product on average."""
    bound = 0.03 if case.in_8_bits else 0.01

    def definition(*of):
        return reference.decode_layers(*of, **case.options)

    expected = run(definition, *operands)
    for found, wanted in zip(got[0][:2], expected[0][:2], strict=True):
        assert relative_error(found[: case.batch], wanted[: case.batch]) < bound
    padded = got[0][:1] if case.has_layer_norms else got[0][:2]
    assert not any(np.asarray(a[case.batch :], np.float32).any() for a in padded)
    if not case.has_layer_norms:
        squares = [np.asarray(of.squares).sum(axis=1)[: case.batch] for of in (got[0], expected[0])]
        assert relative_error(*squares) < bound
    for found, wanted in zip(*map(jax.tree.leaves, (got[1:], expected[1:])), strict=True):
        found, wanted = (np.asarray(a, np.float32) for a in (found, wanted))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        assert relative_error(np.nan_to_num(found), np.nan_to_num(wanted)) < bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        SMALL._replace(layers=2, batch=3, kv_heads=1, size=128, capacity=192),
        SMALL._replace(batch=2, neurons=1280),  # more open rows than are listed
        SMALL._replace(gated=False, rectifier=Rectifier(squared=True)),
        SMALL._replace(rectifier=Rectifier(threshold=0.1, both=True)),
        SMALL._replace(
            is_sparse=False,
            rectifier=None,
            batch=3,
            neurons=640,
            has_biases=True,
            has_head_norms=True,
        ),
        SMALL._replace(is_sparse=False, gated=False),
        SMALL._replace(layers=2, batch=3, in_8_bits="all"),
        SMALL._replace(is_sparse=False, in_8_bits="mlp", gated=False),
        SMALL._replace(is_sparse=False, rectifier=None, in_8_bits="all"),
        SMALL._replace(capacity=384, lengths=(300,), window=150, residual_scale=0.22),
        SMALL._replace(
            is_sparse=False,
            rectifier=None,
            size=128,
            rotated=96,
            has_head_norms=True,
            batch=2,
            capacity=192,
            lengths=(40, 150),
            window=64,
            residual_scale=0.22,
        ),
        SMALL._replace(rotated=16),
        SMALL._replace(size=80, rotated=40, capacity=256, lengths=(150,)),
        SMALL._replace(kv_heads=1, size=96, capacity=256, lengths=(150,), has_head_norms=True),
        SMALL._replace(heads=2, kv_heads=1, size=192, capacity=128, lengths=(100,)),
        SMALL._replace(layers=2, batch=2, neurons=1280, live=(1280, 700)),  # more than are listed
        SMALL._replace(
            heads=2, kv_heads=1, size=256, batch=2, has_head_norms=True, is_sparse=False
        ),
        SMALL._replace(layers=2, batch=6, has_layer_norms=True),
        SMALL._replace(batch=2, width=576, has_layer_norms=True, is_sparse=False, in_8_bits="mlp"),
        SMALL._replace(layers=2, batch=3, has_mlp_biases=True, residual_scale=0.5),
        SMALL._replace(heads=12, kv_heads=1),  # two groups of six
        SMALL._replace(heads=9, kv_heads=1, capacity=384, lengths=(300,)),
        SMALL._replace(layers=3, live=(100, 0, 300), has_mlp_biases=True),
        SMALL._replace(layers=2, is_sparse=False, batch=2, live=(-1, 77)),
        SMALL._replace(gated=False, has_mlp_biases=True, in_8_bits="mlp"),
        SMALL._replace(batch=2, is_sparse=False, rectifier=None, has_mlp_biases=True),
        SMALL._replace(layers=2, has_8_bit_cache=True, capacity=512, lengths=(300,)),
        SMALL._replace(has_8_bit_cache=True, capacity=128, lengths=(100,)),  # half of a stage
        SMALL._replace(size=96, has_8_bit_cache=True, capacity=200, lengths=(190,)),
        SMALL._replace(
            batch=2,
            kv_heads=1,
            size=128,
            has_8_bit_cache=True,
            capacity=256,
            lengths=(150, 255),
            rotated=64,
        ),
        SMALL._replace(
            heads=2,
            kv_heads=1,
            size=256,
            has_8_bit_cache=True,
            capacity=256,
            window=70,
            lengths=(200,),
            is_sparse=False,
        ),
        SMALL._replace(batch=9, kv_heads=1),
        SMALL._replace(batch=9, kv_heads=1, launches=2),
        SMALL._replace(batch=27, layers=2, in_8_bits="all", gated=False, has_layer_norms=True),
        SMALL._replace(batch=32, is_sparse=False, neurons=1600, has_biases=True, live=(1590,)),
    ],
)
def test_interpreted(interpreted, case):
    assert_matches_interpreted(interpreted, case, sms=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        SMALL._replace(layers=2, kv_heads=1, size=128, capacity=256, lengths=(150,)),
        SMALL._replace(heads=5, kv_heads=1, capacity=256, lengths=(1,)),  # the first has no keys
        SMALL._replace(is_sparse=False, kv_heads=1, capacity=256, lengths=(0,)),  # none has
    ],
)
def test_splits_of_the_keys_interpreted(interpreted, case):
    assert case.shape(2).key_splits == 2
    assert_matches_interpreted(interpreted, case, sms=2)


def assert_matches_interpreted(interpreted, case, sms):
    operands = drawn.operands(case)
    with interpreted(sms=sms, detect_races=False):
        got = jax.block_until_ready(run(lambda *of: decode_layers(*of, **case.options), *operands))
    assert_matches(got, operands, case)


QUICK = "SmolLM2-360M", "narrow"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LARGE]
)
def test_lowers(lower, name):
    case = LARGE[name]
    operands = jax.eval_shape(lambda: drawn.operands(case))
    text = lower(lambda *of: run(lambda *of: decode_layers(*of, **case.options), *of), *operands)
    assert text.count("mosaic_gpu") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_on_the_gpu(name):
    case = LARGE[name]
    operands = drawn.operands(case)
    got = jax.jit(lambda *of: run(lambda *of: decode_layers(*of, **case.options), *of))(*operands)
    assert_matches(got, operands, case)
