"""What kernels are estimated to gain by the model that a run ended with, from held-out text."""

import jax
import numpy as np
from flax import nnx

from twell_jax.analysis.activity import measure_activity
from twell_jax.analysis.estimate import Estimate, estimate, without_activity
from twell_jax.config import Config
from twell_jax.data import Data
from twell_jax.models.transformer import graphdef

_SEQUENCES = 16


def estimated(
    config: Config, data: Data, params: nnx.State, mesh: jax.sharding.Mesh
) -> Estimate | None:
    """Estimates what sparsity gains on a GPU.

    Neurons are looked at only where records tell of such a model. Each device reads a sequence at a
    time, which takes less memory than a step.

    Args:
      config: the run.
      data: its data, of which a few held-out sequences are read.
      params: of its model.
      mesh: the devices, which all take part.

    Returns:
      None if several processes share the run, of which none sees all that is measured.
    """
    if jax.process_count() > 1:
        return None
    if nothing := without_activity(config.model, data.held_out.shape[1] - 1):
        return nothing
    sequences = data.held_out[:_SEQUENCES]
    rows = -(-len(sequences) // mesh.size) * mesh.size  # the first ones fill a row for each device
    activity = measure_activity(
        nnx.merge(graphdef(config.model), params),
        np.resize(sequences, (rows, *sequences.shape[1:])),
        batch=mesh.size,
        document_end=data.tokenizer.eot_id if config.data.mask_documents else None,
    )
    return estimate(config.model, activity)
