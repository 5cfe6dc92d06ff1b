"""Kernels of the sparse feed-forward block: arrays in, arrays out.

`layouts` defines how packed activations lie in memory, and `reference` what each kernel computes;
`hopper` computes it on Hopper GPUs. `kernels` lists what a back end offers.
"""
