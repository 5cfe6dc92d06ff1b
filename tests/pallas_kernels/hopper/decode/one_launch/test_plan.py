"""Which thread block has what."""

import itertools

import numpy as np
import pytest

from pallas_kernels.hopper.decode.one_launch import plan
from pallas_kernels.hopper.decode.one_launch.plan import Matrix
from tests.pallas_kernels.hopper.decode.one_launch.drawn import Case

GROUP = 65536  # bytes of 16 rows of 2048 numbers


@pytest.mark.parametrize("units", [8, 32, 256])
def test_all_is_shared_out_evenly(units):
    matrices = [Matrix(384, GROUP), Matrix(128, GROUP), Matrix(352, GROUP, least=1)]
    shares = plan.shares(132, units, 2 * GROUP, matrices)
    for share, whole in zip(shares, [units, *(matrix.groups for matrix in matrices)], strict=True):
        ends = share.first + share.number
        assert share.first[0] == 0
        assert ends[-1] == whole
        np.testing.assert_array_equal(share.first[1:], ends[:-1])
    of_units, *of_matrices = (share.number for share in shares)
    loads = of_units * 2 * GROUP + sum(of_matrices) * GROUP
    assert loads.max() <= loads.mean() + GROUP
    assert shares[-1].number.min() > 0  # each block posts which of its gates are open


def test_fewer_groups_than_blocks_are_refused():
    with pytest.raises(ValueError, match="100 groups of rows for 132 blocks"):
        plan.shares(132, 32, GROUP, [Matrix(384, GROUP), Matrix(100, GROUP, least=1)])


LLAMA = Case(32, 1, 4096, 14336, 32, 8, 128, 1024)
QWEN = Case(28, 1, 1024, 3072, 16, 8, 128, 32768, is_sparse=False)


@pytest.mark.parametrize(
    "case, splits",
    [
        (Case(38, 1, 2048, 5632, 32, 32, 64, 1024), 4),  # of 132 blocks
        (Case(38, 8, 2048, 5632, 32, 32, 64, 1024), 1),
        (LLAMA, 8),  # more would not fit into the memory of the block that merges them
        (LLAMA._replace(batch=8), 2),
        (LLAMA._replace(capacity=200), 4),  # stages
        (QWEN, 16),
        (QWEN._replace(capacity=64), 1),
    ],
)
def test_keys_are_split_over_blocks_without_a_unit(case, splits):
    shape = case.shape(132)
    assert shape.key_splits == splits
    units, heads = shape.shares[0].number, case.batch * case.kv_heads
    assert units.sum() == heads * splits
    assert splits == 1 or units.max() == 1
    others = (splits - 1) * shape.group * (case.size + 2)
    assert 4 * others <= 16 * 1024
    assert shape.words >= heads * others
    alone = case.shape(heads)  # whose keys are not split
    for name in ("values", "tops"):
        rows, more = (of.scratch_words[name][0][0] for of in (alone, shape))
        assert more == rows + splits - 1


@pytest.mark.parametrize("parts", [1, 3, 16])
def test_parts_follow_each_other_and_are_even(parts):
    for count in range(40):
        found = [plan.part(which, parts, count) for which in range(parts)]
        assert (found[0][0], found[-1][1]) == (0, count)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(found))
        sizes = [end - first for first, end in found]
        assert max(sizes) <= min(sizes) + 1
