"""Makes a smaller model from the active neurons: python examples/prune.py RUN_DIR

No layer loses a neuron that was active. So the width is their number in the layer with the most,
rounded up to a multiple of 128. Beside its weights each layer has its own number of live neurons,
rounded up likewise; kernels leave out the others, if there are any. In each sequence, outputs are
the same up to rounding until a removed neuron is active. For a model that holds its layers apart,
see `twell_jax.analysis.prune.prune_mlp`.
"""

import argparse

from flax import nnx

from twell_jax import data
from twell_jax.analysis.activity import measure_activity
from twell_jax.analysis.prune import fires_removed, prune_dead
from twell_jax.models.transformer import graphdef
from twell_jax.train.run_directory import load_run

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("run_dir", metavar="RUN_DIR", help="of a run, such as runs/tiny")
try:
    config, tokenizer, model = load_run(parser.parse_args().run_dir)
    held_out = data.load(config).held_out
except (ValueError, OSError) as error:  # what is no run
    parser.error(str(error))

# Half of the held-out sequences decide which neurons stay; the others test what pruning changes.
usage = measure_activity(model, held_out[::2], batch=16).usage
params, smaller, report = prune_dead(nnx.state(model), model.config, usage)
changed = fires_removed(model, report, held_out[1::2], batch=16)
pruned = nnx.merge(graphdef(smaller), params)

print(f"d_ff {model.config.d_ff} -> {pruned.config.d_ff}")
print(f"live neurons by layer: {report.live}")
print(f"{changed.any(0).mean():.2%} of other tokens have an active neuron that was removed")
