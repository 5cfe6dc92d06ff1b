"""`sparse_ffn` on Hopper GPUs, by the Pallas kernels."""

import jax


def obstacle(x, w_gate, w_up, w_down, *, b_gate, b_up, b_down, activation) -> str | None:
    """Why the kernels cannot serve these inputs here; None if they can."""
    if activation != "relu":
        return f"the activation must be relu, got {activation}"
    if b_gate is not None or b_up is not None or b_down is not None:
        return "it has no biases"
    if x.dtype.itemsize != 2:
        return f"the dtype must be bfloat16 or float16, got {x.dtype}"
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        return f"it needs a Hopper GPU, and this is {device.device_kind}"
    return "its kernels are not there yet"
