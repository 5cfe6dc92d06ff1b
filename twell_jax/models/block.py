"""One layer of the model: attention and the feed-forward block, each after a norm."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.kernels import TransformerKernels
from twell_jax.config import ModelConfig
from twell_jax.ffn import FFNStats, SparseMLP, Windows, dispatch
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.models.attention import Attention, Bounds
from twell_jax.models.cache import KVCache
from twell_jax.models.layers import branch, longest, norm, residual_init, scaled
from twell_jax.models.remat import MIDDLE
from twell_jax.models.rope import Table


class Block(nnx.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(config, rngs)
        self.mlp = SparseMLP(
            config.d_model,
            config.d_ff,
            gated=config.gated,
            activation=config.ffn_activation,
            use_bias=config.mlp_bias,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            up_init=nnx.initializers.normal(config.init_scale),
            down_init=residual_init(config),
            implementation=config.ffn_implementation,
            gradients=config.ffn_gradients,
            live=config.d_ff if config.live_width else None,
            rngs=rngs,
        )

    def __call__(
        self,
        x: jax.Array,
        rope: Table,
        mask: jax.Array | None,
        cache: KVCache | None = None,
        layer: jax.Array | None = None,
        *,
        gradients: LayerGradients = None,
        per_token_stats: bool = False,
        windows: Windows | None = None,
        bounds: Bounds | None = None,
    ) -> tuple[jax.Array, FFNStats, KVCache | None]:
        """Maps `x: [B, T, D]` to the same shape; for the rest see `Attention` and `Transformer`."""
        # Inference has a cache, and statistics of tokens belong to it.
        kernels = _kernels(self.config)
        matmul_dtype = self.config.matmul_dtype if cache is None and not per_token_stats else None
        normed, x = branch(self.attention_norm, x, kernels)
        attended, cache = self.attention(
            normed, rope, mask, cache, layer, bounds=bounds, kernels=kernels
        )
        residual_scale = self.config.residual_scale
        x = checkpoint_name(x + scaled(attended, residual_scale), MIDDLE)

        def mlp(normed: jax.Array, residual: jax.Array | None) -> tuple[jax.Array, FFNStats]:
            return self.mlp(
                normed,
                return_stats=True,
                gradients=gradients,
                windows=windows,
                residual=residual,
                matmul_dtype=matmul_dtype,
            )

        mlp = jax.vmap(jax.vmap(mlp)) if per_token_stats else mlp
        normed, x = branch(self.mlp_norm, x, kernels)
        is_plain = residual_scale == 1  # the block adds y as it is
        y, stats = mlp(normed, x if is_plain else None)
        return y if is_plain else x + scaled(y, residual_scale), stats, cache

    def bounds(self) -> Bounds | None:
        """Those of attention, for products with operands of 8 bits."""
        return self.attention.bounds(longest(self.attention_norm))


def _kernels(config: ModelConfig) -> TransformerKernels | None:
    """Those that may differentiate what lies around a layer's parts; None if XLA does."""
    if config.ffn_implementation == "xla":
        return None
    w = jax.ShapeDtypeStruct((config.d_ff, config.d_model), config.dtype)
    if config.ffn_implementation == "mosaic":  # also those of a card that nobody measured
        kernels, _ = dispatch.back_end(w)
        return kernels
    return dispatch.recorded_back_end(w)
