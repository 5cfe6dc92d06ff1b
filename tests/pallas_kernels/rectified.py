"""Rectifiers for tests of single kernels, and what they make, by NumPy in float64."""

import numpy as np

from pallas_kernels.rectifiers import Rectifier

EVERYTHING = Rectifier(threshold=0.7, squared=True, both=True)  # whatever a rectifier can do
SQUARED = Rectifier(squared=True)
ABOVE_TWO = Rectifier(threshold=2.0)


def gate_of(act, z, dtype):
    """The gate; z is rounded where it is compared with the threshold, and nowhere else."""
    gate = np.where(z.astype(dtype).astype(np.float64) <= act.threshold, 0, z)  # keeps NaN
    return gate**2 if act.squared else gate


def linear_of(act, u):
    """What the gate is multiplied with."""
    return np.where(u <= 0, 0, u) if act.both else u
