"""Few tokens: a block for up to 64 of them, and decoding steps of whole layers."""
