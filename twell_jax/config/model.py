"""The section `model` of a configuration."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from twell_jax.config.section import Section
from twell_jax.ffn import Activation, Gradients, Implementation, Rectifier, activations
from twell_jax.ffn.algorithms import Request

# Those of `sparse_ffn`, and "fatrelu", whose threshold is a key of its own.
ActivationName = Literal["relu", "relu2", "fatrelu", "drelu", "silu"]

# The keys of `rope_scaling` that not every type uses, and the types that do.
_ONLY_FOR = {
    "original_context": ("llama3", "yarn"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "truncate": ("yarn",),
    "attention_factor": ("yarn",),
}


class RopeScaling(Section):
    """How the rotary frequencies of a model were changed, for contexts longer than its first one.

    A share of each frequency is divided by `factor`: all of it (linear); none of it for pairs that
    turn often in the original context and all for those that turn rarely, between them a part, by
    the number of turns (llama3, as in Llama 3.1) or by the pair's index (yarn, arXiv 2309.00071).
    """

    type: Literal["linear", "llama3", "yarn"] = Field(description="rule by which they are scaled")
    factor: float = Field(ge=1, description="what low frequencies are divided by")
    original_context: int | None = Field(
        None, gt=1, description="context before the change; llama3 and yarn need it"
    )
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: up to so many turns, all of it")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: from so many turns on, none")
    beta_fast: float = Field(32.0, gt=0, description="yarn: from so many turns on, none of it")
    beta_slow: float = Field(1.0, gt=0, description="yarn: up to so many turns, all of it")
    truncate: bool = Field(True, description="yarn: round the indices of these pairs outwards")
    attention_factor: float | None = Field(
        None, gt=0, description="yarn: times cosine and sine; null: 0.1 log(factor) + 1"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, types in _ONLY_FOR.items():
            default = type(self).model_fields[key].default
            if self.type not in types and getattr(self, key) != default:
                raise ValueError(
                    f"model.rope_scaling.{key}: type={self.type} does not use it; leave it out, or "
                    f"write {'null' if default is None else default}"
                )
        if self.type != "linear" and self.original_context is None:
            raise ValueError(
                f"model.rope_scaling.original_context: {self.type} needs the context that the "
                "model had before, got null"
            )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "model.rope_scaling.high_freq_factor: must be above low_freq_factor="
                f"{self.low_freq_factor:g}, got {self.high_freq_factor:g}"
            )
        return self

    @property
    def table_factor(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.type != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1


class ModelConfig(Section):
    """A decoder: norms, RoPE, causal attention, (gated) feed-forward blocks.

    The defaults make a Llama. What other architectures do differently are keys of their own.
    """

    vocab_size: int = Field(gt=0, description="rows of the embedding; the tokenizer must fit in")
    context: int = Field(gt=1, description="tokens per training sequence")
    d_model: int = Field(gt=0, description="width of the residual stream")
    layers: int = Field(gt=0, description="number of transformer blocks")
    heads: int = Field(gt=0, description="query heads")
    kv_heads: int | None = Field(None, gt=0, description="key/value heads (default: heads)")
    head_size: int | None = Field(
        None, gt=0, description="features of a head (default: d_model is divided among them)"
    )
    attention_bias: bool = Field(False, description="add biases to the attention's projections")
    qk_norm: bool = Field(False, description="RMS norms of each head's queries and keys")
    sliding_window: int | None = Field(
        None, gt=0, description="tokens that a token attends to, itself included; null: all before"
    )
    d_ff: int = Field(gt=0, description="hidden units (neurons) of a feed-forward block")
    activation: ActivationName = Field(
        "relu",
        description="relu; relu2, its square; fatrelu, zero up to a threshold; drelu, ReLU on both "
        "factors; or silu for the dense model to compare with, which no kernel serves",
    )
    activation_threshold: float = Field(0.0, ge=0, description="threshold of fatrelu; else 0")
    gated: bool = Field(True, description="h = act(x Wg) * (x Wu), else h = act(x Wu)")
    mlp_bias: bool = Field(
        False, description="add biases in the feed-forward blocks; kernels only decode with them"
    )
    live_width: bool = Field(
        False,
        description="beside its weights, each layer has a number of live neurons, which pruning "
        "sets; neurons from it on are never active",
    )
    tie_embeddings: bool = Field(True, description="use the embedding as the output projection")
    rope_theta: float = Field(1e5, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(
        None, description="change of the rotary frequencies; null: none"
    )
    rotary_fraction: float = Field(
        1.0, gt=0, le=1, description="share of a head's features that are rotated"
    )
    norm: Literal["rms", "layer"] = Field(
        "rms", description="RMS norms, or layer norms, which subtract the mean and add a bias"
    )
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of the norms")
    embed_scale: float = Field(1.0, gt=0, description="times the embedding of each token")
    residual_scale: float = Field(
        1.0, gt=0, description="times what attention and feed-forward add to the residual stream"
    )
    logit_scale: float = Field(1.0, gt=0, description="times the output of the last norm")
    init_scale: float = Field(0.02, gt=0, description="standard deviation of the initial weights")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="dtype of the compute")
    param_dtype: Literal["bfloat16", "float32"] = Field("float32", description="master weights")
    matmul_dtype: Literal["float8"] | None = Field(
        None,
        description="dtype of the operands of dense products while training: of attention's "
        "projections, feed-forward blocks without kernels, the gate of unions, logits; null: dtype",
    )
    remat: Literal["none", "dots", "block"] = Field(
        "none",
        description="recompute in the backward pass: nothing, all but matmuls and cuDNN's "
        "attention, whole blocks",
    )
    ffn_implementation: Implementation | None = Field(
        None, description="back end of the feed-forward blocks; null: what is faster here"
    )
    decode_implementation: Implementation | None = Field(
        None, description="back end of generation, token by token; null: kernels where they serve"
    )
    kv_cache_dtype: Literal["float8"] | None = Field(
        None,
        description="dtype of keys and values that generation stores, with a scale for each token "
        "and head; null: dtype",
    )
    ffn_gradients: Gradients | None = Field(
        None, description="whether their gradients are computed on the sparse pattern; null: dense"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_size is not None and self.head_size % 2:
            raise ValueError(f"model.head_size: must be even, got {self.head_size}")
        if self.head_size is None and self.d_model % (2 * self.heads):
            raise ValueError(
                f"model.heads: d_model={self.d_model} must split into heads of an even size, "
                f"got heads={self.heads}"
            )
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ValueError(
                f"model.rotary_fraction: must make an even number of the {self.head_dim} features "
                f"of a head, got {self.rotary_fraction:g}"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.kv_heads: must divide heads={self.heads}, got {self.num_kv_heads}"
            )
        if self.activation == "fatrelu" and not self.activation_threshold:
            raise ValueError(
                "model.activation: 'fatrelu' needs a threshold above 0, such as 0.01, got "
                f"{self.activation_threshold!r}"
            )
        if self.activation != "fatrelu" and self.activation_threshold:
            raise ValueError(
                f"model.activation: {self.activation!r} has no threshold, which must then be 0, "
                f"got {self.activation_threshold!r}"
            )
        if problem := activations.problem(self.ffn_activation, self.gated):
            raise ValueError(f"model.activation: {problem}")
        if Request(self.ffn_implementation, gradients=self.ffn_gradients).contradiction:
            raise ValueError(
                "model.ffn_gradients: xla computes dense gradients only, so with sparse "
                "model.ffn_implementation must be mosaic or null"
            )
        return self

    @property
    def ffn_activation(self) -> Activation:
        """The activation with its threshold, as `sparse_ffn` takes it."""
        if self.activation == "fatrelu":
            return Rectifier(threshold=self.activation_threshold)
        return self.activation

    @property
    def head_dim(self) -> int:
        """Features of a head: `head_size`, or its default."""
        return self.head_size or self.d_model // self.heads

    @property
    def rotary_size(self) -> int:
        """Features of a head that are rotated, from the first on."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def attended(self) -> float:
        """Tokens to which one of a whole context attends, on average."""
        window = min(self.sliding_window or self.context, self.context)
        return window - window**2 / (2 * self.context)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads: `kv_heads`, or its default."""
        return self.kv_heads or self.heads
