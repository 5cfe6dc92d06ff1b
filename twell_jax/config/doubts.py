"""What a configuration may say, but can hardly mean."""

import math
from collections.abc import Iterator

from twell_jax.config.sections import Config

# Ranges far beyond what models are trained with; outside of them a zero too many is likelier.
_USUAL = {
    "optimizer.lr": (1e-8, 1.0),
    "optimizer.eps": (1e-20, 1e-2),
    "optimizer.clip_norm": (1e-4, 1e4),
    "optimizer.weight_decay": (0.0, 10.0),
    "model.init_scale": (1e-6, 1.0),
    "model.norm_eps": (1e-20, 1e-1),
}

_FEWEST_OF_BPE = 512  # 256 for bytes, the end of the text, and as many for what is merged


def doubts(config: Config) -> Iterator[str]:
    """Yields a line for each setting that has no effect, or is outside of any usual range."""
    for key, (least, most) in _USUAL.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if not least <= value <= most:
            yield f"{key}: {value:g} is far from what is usual, {least:g} to {most:g}"
    warmup, steps = config.optimizer.warmup_steps, config.steps
    if warmup >= steps:
        yield (
            f"optimizer.warmup_steps: {warmup} of {steps} steps, so the learning rate never "
            f"reaches optimizer.lr={config.optimizer.lr:g}"
        )
    if config.profile_steps and config.profile_steps[0] >= steps:
        yield (
            f"profile_steps: begins at step {config.profile_steps[0]} of {steps}, so nothing is "
            "traced"
        )
    _, end = config.l1_warmup
    if config.l1_coefficient and not config.targets and end >= steps:
        yield (
            f"l1_warmup: ends at step {end} of {steps}, so no step has the whole "
            f"l1_coefficient={config.l1_coefficient:g}"
        )
    if config.targets and config.sparsity_control_start >= steps:
        yield (
            f"{next(iter(config.targets))}: the L1 coefficient is not moved towards it before step "
            f"{config.sparsity_control_start} of {steps}, where l1_warmup and "
            "optimizer.warmup_steps end"
        )
    least = math.ceil(1500 * config.least_union) / 1000
    if config.union_target is not None and config.union_target < least:
        yield (
            f"union_target: {config.union_target:g} is hardly more than a layer has as soon as one "
            f"neuron is active, {config.least_union:.3g} with model.d_ff={config.model.d_ff}, so "
            f"the L1 coefficient would grow until hardly any is; write {least:g} or more"
        )
    if config.skip_dead_every and config.model.ffn_implementation == "xla":
        yield (
            "skip_dead_every: gains nothing with model.ffn_implementation=xla, which computes all "
            "neurons; leave it out, and kernels serve where they can"
        )
    if config.data.tokenizer == "bpe" and config.model.vocab_size < _FEWEST_OF_BPE:
        yield (
            f"model.vocab_size: {config.model.vocab_size} is hardly more than the 257 of "
            "data.tokenizer=byte, so a bpe would write nearly every byte as a token of its own; "
            "write 4096 or more"
        )
    if config.l1_coefficient and config.model.activation == "silu":
        yield (
            f"l1_coefficient: {config.l1_coefficient:g} makes activations of model.activation=silu "
            "small, but none of them zero; with relu most become zero"
        )
