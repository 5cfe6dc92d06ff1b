"""Dense computations: a whole block for a prompt, and heavy rows."""
