"""What 8-bit weights cost a trained model: cross-entropy, and which neurons are active.

    python -m benchmarks.quantised RUN_DIR ... [--sequences N] [--out DIRECTORY]

The models of runs read the held-out text of these runs, densely by XLA, which defines what 8-bit
weights mean. Every variant stands beside the same model in bfloat16. How far float32 is from it
shows what rounding does anyway.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import record
from twell_jax import config as config_lib
from twell_jax import data
from twell_jax.analysis.activity import activity_patterns
from twell_jax.config import ConfigError
from twell_jax.inference.language_model import in_compute_dtype
from twell_jax.models import Transformer, graphdef
from twell_jax.models.quantised import ATTENTION, COVERED, PARTS, Part
from twell_jax.train.checkpoint_errors import CheckpointError
from twell_jax.train.run_directory import load_run

VARIANTS: dict[str, tuple[str, tuple[Part, ...]]] = {  # the dtype, and the parts in 8 bits
    "float32": ("float32", ()),
    "fp8 gate": ("bfloat16", ("gate",)),
    "fp8 gate and up": ("bfloat16", ("gate", "up")),
    "fp8 gate, up and down": ("bfloat16", ("gate", "up", "down")),
    "fp8 gate, up and attention": ("bfloat16", ("gate", "up", *ATTENTION)),
    "fp8 all but down": ("bfloat16", COVERED["fp8-all-but-down"]),
    "fp8 all": ("bfloat16", PARTS),
}


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--sequences", type=int, help="default: the run's eval_sequences")
    args = parser.parse_args()
    rows = (
        {"run": Path(run_dir).name, **row}
        for run_dir in args.run_dirs
        for row in measure(run_dir, args.sequences)
    )
    try:
        record.write_as_they_come("quantised", rows, args.out)
    except (ConfigError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


def measure(run_dir: str, sequences: int | None) -> Iterator[dict[str, Any]]:
    """Yields a row for bfloat16 and one for each of VARIANTS.

    "ce" is in nats per token. "increase" is its relative difference from bfloat16, "uncertainty"
    the standard error of that over sequences. "changed" is how many activations are non-zero in one
    of the two models alone, over how many are in bfloat16, "changed_by_layer" that of each layer,
    and "fired" how many are non-zero over that number.
    """
    config, tokenizer, model = load_run(run_dir)
    if sequences is not None:
        config = config_lib.from_dict(config.model_dump() | {"eval_sequences": sequences})
    held_out = data.load(config, tokenizer).held_out
    end = tokenizer.eot_id if config.data.mask_documents else None
    size = {"sequences": len(held_out), "tokens": int(held_out[:, 1:].size)}

    def patterns(dtype, parts):
        made = variant(model, dtype, parts)
        return activity_patterns(made, held_out, batch=config.micro_batch, document_end=end)

    baseline = list(patterns("bfloat16", ()))
    yield {"implementation": "bfloat16", **size, **compare(zip(baseline, baseline, strict=True))}
    for name, (dtype, parts) in VARIANTS.items():
        pairs = zip(baseline, patterns(dtype, parts), strict=True)
        yield {"implementation": name, **size, **compare(pairs)}


def variant(model: Transformer, dtype: str, parts: tuple[Part, ...]) -> Transformer:
    """The model in a dtype, with parts of it in 8 bits."""
    settings = model.config.model_copy(update={"dtype": dtype})
    made = nnx.merge(graphdef(settings), nnx.state(model))
    made.quantise(parts)
    return in_compute_dtype(made)


def compare(pairs: Iterator[tuple[tuple, tuple]]) -> dict[str, Any]:
    """The entries of a row from batches of (CE, fired) of bfloat16 and of a variant."""
    ce, baseline_ce, counts = [], [], []
    for (one_ce, one_fired), (other_ce, other_fired) in pairs:
        baseline_ce.append(one_ce.mean(axis=1))
        ce.append(other_ce.mean(axis=1))
        patterns = (one_fired, other_fired, one_fired != other_fired)
        counts.append([jnp.sum(p, axis=(1, 2, 3), dtype=jnp.int32) for p in patterns])
    ce, baseline = (np.concatenate(a).astype(np.float64) for a in (ce, baseline_ce))
    before, fired, changed = np.sum(np.asarray(counts, np.float64), axis=0)
    difference = (ce - baseline) / baseline.mean()
    return {
        "ce": float(ce.mean()),
        "increase": float(difference.mean()),
        "uncertainty": float(difference.std() / len(difference) ** 0.5),
        "fired": float(fired.sum() / before.sum()),
        "changed": float(changed.sum() / before.sum()),
        "changed_by_layer": (changed / before).round(5).tolist(),
    }


if __name__ == "__main__":
    main()
