"""Frames, the matmul loops that kernels share, with their ring of stages and queue of jobs."""
