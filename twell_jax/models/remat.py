"""What a block keeps for the backward pass, and what is computed again (rematerialised)."""

from typing import Any

import jax
import jax.extend.core

from twell_jax.ffn import RESIDUALS, float8

# Names of arrays, for `jax.ad_checkpoint.checkpoint_name`.
ROTATED = "rotated"  # queries and keys after RoPE
MIDDLE = "middle"  # the residual stream between attention and feed-forward

_KEPT = jax.checkpoint_policies


def _keeps_results_of_cudnn(primitive: jax.extend.core.Primitive, *_: Any, **__: Any) -> bool:
    """Keeps what cuDNN's backward takes from its forward: the output and the softmax statistics.

    They have no name that a policy could keep, as JAX's rule of differentiation makes them; a name
    for the output alone would not spare its forward, which the statistics need as well.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


# Policies by `ModelConfig.remat`. As "dots" keeps the middle of a block, nothing needs the output
# of attention, which is then not kept, and nothing is added up again.
POLICIES = {
    "dots": _KEPT.save_from_both_policies(
        _KEPT.save_from_both_policies(
            _KEPT.dots_with_no_batch_dims_saveable,
            _KEPT.save_only_these_names(RESIDUALS, ROTATED, MIDDLE, float8.KEPT),
        ),
        _keeps_results_of_cudnn,
    ),
    "block": _KEPT.nothing_saveable,
}
