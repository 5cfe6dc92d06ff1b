"""Kernels for what lies around the feed-forward block in a layer of a transformer."""
