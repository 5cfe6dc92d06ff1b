"""The block on tile unions, and its sparse gradients: matmuls with gathered rows."""
