"""Makes a smaller model of the neurons that fire: python examples/prune.py RUN_DIR

No layer loses a neuron that fired, so the width is that of the layer with the most of them, rounded
up to a multiple of 128. Until a token of a sequence fires a removed neuron, outputs are the same up
to rounding.
"""

import sys

from flax import nnx

from twell_jax import data
from twell_jax.analysis.activity import measure_activity
from twell_jax.analysis.prune import fires_removed, prune_dead
from twell_jax.models.transformer import graphdef
from twell_jax.train.run_directory import load_run

config, tokenizer, model = load_run(sys.argv[1])
held_out = data.load(config).held_out

# One half of the held-out sequences says which neurons fire, the other whether others would have.
usage = measure_activity(model, held_out[::2], batch=16).usage
params, smaller, report = prune_dead(nnx.state(model), model.config, usage)
changed = fires_removed(model, report, held_out[1::2], batch=16)
pruned = nnx.merge(graphdef(smaller), params)

print(f"d_ff {model.config.d_ff} -> {pruned.config.d_ff}")
print(f"live neurons by layer: {report.live}")
print(f"{changed.any(0).mean():.2%} of other tokens fire a removed neuron")
