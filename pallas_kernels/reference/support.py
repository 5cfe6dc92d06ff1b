"""What the reference can serve: any block that the packed formats can hold, on any device."""

import jax

from pallas_kernels.layouts import tile_union


def unsupported(w):
    """Why the packed formats cannot hold the activations of a block; None if they can.

    Args:
      w: `[H, D]`, any of the block's weights.
    """
    try:
        tile_union.check_columns("w_down^T", jax.ShapeDtypeStruct(w.shape[::-1], w.dtype))
    except ValueError as error:
        return str(error)
    return None


def no_8_bits():
    """None: any device multiplies the rounded operands."""
