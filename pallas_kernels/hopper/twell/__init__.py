"""The block by TwELL: the gate is packed row by row, and each row gathers its own neurons."""
