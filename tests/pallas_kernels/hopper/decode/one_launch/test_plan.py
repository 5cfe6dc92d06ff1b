"""Which thread block has what."""

import numpy as np
import pytest

from pallas_kernels.hopper.decode.one_launch import plan
from pallas_kernels.hopper.decode.one_launch.plan import Matrix

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
