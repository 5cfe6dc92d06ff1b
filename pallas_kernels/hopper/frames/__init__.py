"""Frames: matmuls with an epilogue, the ring of stages and the queue of jobs that they share."""
