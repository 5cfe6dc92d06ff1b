"""Kernels of the sparse feed-forward block: arrays in, arrays out.

`layouts` says how packed activations lie in memory, `reference` what each kernel computes, `hopper`
computes it on Hopper GPUs. `kernels` says what a back end offers.
"""
