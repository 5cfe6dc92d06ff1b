"""Measures runs of the study.

Runs with the same shapes share compiled programs, which take longer than what they measure.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import record
from benchmarks.study import downstream
from twell_jax import data
from twell_jax.analysis import timing
from twell_jax.analysis.activity import measure_activity, summarise
from twell_jax.analysis.speedup import measure_speedup
from twell_jax.config import ConfigError
from twell_jax.ffn import CannotServe
from twell_jax.models import Transformer, graphdef
from twell_jax.models.cross_entropy import mean_cross_entropy
from twell_jax.train import metrics, neurons
from twell_jax.train.run_directory import RunPaths, load_run

# The settings of the whole model by the kernels and by dense XLA.
_BY = {
    "mosaic": {"ffn_implementation": "mosaic", "ffn_gradients": "sparse"},  # first, as it may raise
    "xla": {"ffn_implementation": "xla", "ffn_gradients": None},
}


def measured(run_dir: Path) -> dict[str, Any]:
    """What is measured of a run that has ended, ready for JSON.

    These are: what its neurons do on held-out text, how many questions about it the model answers,
    the times of the layers and of the whole model, those of the layers without the neurons that
    were never active, and what the run logged.

    Raises:
      ConfigError: the run has not ended, or there is none.
      CheckpointError: its checkpoint is not whole.
    """
    config, tokenizer, model = load_run(str(run_dir))
    logged = of_training(run_dir)
    if dict(logged["evaluated"]).get(config.steps) is None:
        raise ConfigError(f"{run_dir}: the run was stopped; start the study again to continue it")
    held_out = data.load(config, tokenizer).held_out
    document_end = tokenizer.eot_id if config.data.mask_documents else None
    activity = measure_activity(
        model, held_out, batch=config.micro_batch, document_end=document_end
    )
    found = over_position_ranges(summarise(activity)) | logged
    return found | attempted(
        {
            "downstream": partial(downstream.scores, model, tokenizer, held_out),
            **times(model, activity.usage, held_out, config.micro_batch, document_end),
        }
    )


def attempted(parts: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    """What each part measures; None, and the reason in "failures", for one that cannot be had."""
    found: dict[str, Any] = {"failures": {}}
    for name, measure in parts.items():
        begin = time.monotonic()
        try:
            found[name] = measure()
        except CannotServe as error:
            found[name], found["failures"][name] = None, str(error)
        except Exception as problem:  # what was trained for minutes is not lost for it
            found[name], found["failures"][name] = None, record.failure(problem)
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    return found


def times(
    model: Transformer,
    usage: np.ndarray,
    sequences: np.ndarray,
    batch: int,
    document_end: int | None,
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Functions that time the layers and the whole model, by dense XLA and by the kernels.

    Args:
      model: the trained model.
      usage: `Activity.usage`; dead neurons are left out for "pruned" and "skipping".
      sequences: int [n, T + 1], held-out text.
      batch: sequences that the whole model reads in a call.
      document_end: see `Transformer`.

    Returns:
      speedup, training: give summaries of `Speedup`, of the forward pass and of both passes.
      pruned: that of the forward pass without these neurons, as `prune_dead` makes it, with the
        numbers of neurons that are computed. The width stays, so that runs share programs.
      skipping: that of both passes as `skip_dead_every` has them between two steps at full width,
        likewise.
      model: see `whole_model`.
    """

    def without_dead(**options):
        order, live = neurons.live_first(jnp.asarray(usage > 0))
        params = neurons.with_live(neurons.reorder(nnx.state(model), order), live)
        graph = graphdef(model.config.model_copy(update={"live_width": True}))
        found = speedup(nnx.merge(graph, params), **options).summarise()
        return found | {"live": live.tolist()}

    speedup = partial(measure_speedup, sequences=sequences, document_end=document_end)
    return {
        "speedup": lambda: speedup(model).summarise(),
        "training": lambda: speedup(model, backward=True).summarise(),
        "pruned": without_dead,
        "skipping": partial(without_dead, backward=True),
        "model": lambda: whole_model(model, sequences[:batch], document_end),
    }


def whole_model(
    model: Transformer, sequences: np.ndarray, document_end: int | None
) -> dict[str, dict[str, float]]:
    """Milliseconds of a model on sequences: int [n, T + 1], by the names of the back ends.

    "forward" computes the cross-entropy, "training" its gradients, too; both without an L1 term.

    Raises:
      CannotServe: the kernels cannot serve this model here.
    """

    operands = nnx.state(model), jnp.asarray(sequences), document_end
    found: dict[str, dict[str, float]] = {passes: {} for passes in _PASSES}
    for back_end, changes in _BY.items():
        graph = graphdef(model.config.model_copy(update=changes))
        for passes, compute in _PASSES.items():
            found[passes][back_end] = timing.milliseconds(compute, graph, *operands, calls=2)
    return found


def _cross_entropy(
    graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array, document_end: int | None
) -> jax.Array:
    transformer = nnx.merge(graph, params)
    hidden, _ = transformer.hidden(tokens[:, :-1], document_end=document_end)
    return mean_cross_entropy(*transformer.head(hidden), tokens[:, 1:])


_PASSES = {
    "forward": jax.jit(_cross_entropy, static_argnums=(0, 3)),
    "training": jax.jit(jax.value_and_grad(_cross_entropy, argnums=1), static_argnums=(0, 3)),
}


def of_training(run_dir: Path) -> dict[str, Any]:
    """What a run logged: its evaluations by step, and the median of its tokens per second.

    A run that logged but its first step, which compiles, has no such median.
    """
    lines = metrics.read(RunPaths(run_dir).metrics)
    rates = [rate for line in lines if (rate := line.get("tokens_per_second"))]
    evaluated = [(line["step"], line["held_out_ce"]) for line in lines if "held_out_ce" in line]
    return {"evaluated": evaluated} | ({"tokens_per_second": median(rates)} if rates else {})


def over_position_ranges(analysis: dict[str, Any]) -> dict[str, Any]:
    """Averages nnz_by_position over positions 0, 1, 2-3, 4-7, ...; `positions` has the ranges."""
    by_position = np.array(analysis["nnz_by_position"])
    length = by_position.shape[1]
    starts = [0, *(2**i for i in range((length - 1).bit_length()))]
    stops = [*starts[1:], length]
    means = np.add.reduceat(by_position, starts, axis=1) / np.subtract(stops, starts)
    positions = {"positions": list(zip(starts, stops, strict=True))}
    return analysis | positions | {"nnz_by_position": means.tolist()}
