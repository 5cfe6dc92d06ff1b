"""The gradients of rectifiers, by hand, also where a factor of the hidden activation is 0."""

import numpy as np
import pytest

from pallas_kernels.rectifiers import RELU
from tests.pallas_kernels.rectified import ABOVE_TWO, EVERYTHING, SQUARED, gate_of, linear_of

L1_GRAD = 0.25
# Every pre-activation with every up projection, of which some are 0.
Z, U = map(np.float32, np.meshgrid([-1, 0, 0.5, 1.5, 3], [-2, -0.5, 0, 1, 4]))
DH = np.linspace(-3, 3, Z.size, dtype=np.float32).reshape(Z.shape)


@pytest.mark.parametrize("act", [RELU, SQUARED, ABOVE_TWO, EVERYTHING])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_those_of_h_and_its_magnitude(act, gated):
    gate, linear = gate_of(act, Z, np.float32), linear_of(act, U) if gated else 1
    h = gate * linear
    dh = DH + L1_GRAD * np.sign(h)  # |h| has no slope where h is 0, as where u is
    slope = 2 * np.sqrt(gate) if act.squared else gate > 0
    passes = (U > 0) | (not act.both)
    expected = [dh * linear * slope, dh * gate * passes] if gated else [dh * slope]
    found = act.gradients(DH, gate if gated else None, h, np.float32(L1_GRAD))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
