"""How packed activations, weights and lists lie in memory, and what they mean."""
