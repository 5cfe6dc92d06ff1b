"""What a training step costs on paper: python -m twell_jax.train.roofline CONFIG --devices N

The costs are those of dense matmuls, forward and backward. Over "fsdp" every micro-batch gathers
the weights twice and reduces their gradients, all in 16 bits. Over "data" the gradients are reduced
once a step, in float32. docs/scaling.md explains and uses the formulas.
"""

import argparse
from dataclasses import dataclass

from twell_jax import config as config_lib
from twell_jax.config import Config, ConfigError, ModelConfig


@dataclass(frozen=True)
class Hardware:
    """The data sheet of a GPU in a cluster.

    Attributes:
      flops: FLOP/s of dense bfloat16 matmuls.
      memory: bytes of its memory.
      hbm: bytes/s to and from its memory.
      nvlink: bytes/s to GPUs of the same host, per direction.
      network: bytes/s to other hosts, per direction.
      per_host: GPUs in a host.
    """

    flops: float
    memory: float
    hbm: float
    nvlink: float
    network: float
    per_host: int = 8


# From NVIDIA's data sheets of H100 SXM and H200 SXM (FLOP/s without structured sparsity; NVLink's
# 900 GB/s count both directions), with one 400 Gb/s port per GPU, as in a DGX H100.
HARDWARE = {
    "h100": Hardware(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Hardware(989e12, 141e9, 4.8e12, 450e9, 50e9),
}


@dataclass(frozen=True)
class Step:
    """The cost of one optimizer step, per device.

    Attributes:
      flops: FLOPs of the matmuls, attention's included.
      hbm: bytes that weights, gradients and the optimizer move; activations are left out.
      fsdp, data: bytes sent over each axis of the mesh.
      state: bytes of the parameters, the moments, a gradient and the sum of gradients.
      seconds: for each resource, a lower bound of the time; the largest bounds the step.
    """

    flops: float
    hbm: float
    fsdp: float
    data: float
    state: float
    seconds: dict[str, float]


def parameters(model: ModelConfig) -> int:
    """The number of parameters of the model, norms included."""
    d = model.d_model
    width, kv = (n * model.head_dim for n in (model.heads, model.num_kv_heads))
    bias = width + 2 * kv + d if model.attention_bias else 0
    head_norms = 2 * model.head_dim if model.qk_norm else 0
    attention = d * (2 * width + 2 * kv) + bias + head_norms
    matrices = 3 if model.gated else 2
    ffn = matrices * d * model.d_ff
    if model.mlp_bias:
        ffn += (matrices - 1) * model.d_ff + d
    norm = d if model.norm == "rms" else 2 * d
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * d
    return model.layers * (attention + ffn + 2 * norm) + embeddings + norm


def flops_per_token(model: ModelConfig, ffn_share: float = 1.0) -> float:
    """FLOPs of forward and backward for one token.

    The backward takes twice as many as the forward. Causal attention reads half the context on
    average, and with a sliding window no more than that.

    Args:
      model: the shapes.
      ffn_share: the share of the up and down projections' work that sparsity leaves; without a gate
        it applies to the down projection alone.
    """
    d = model.d_model
    looked_up = 0 if model.tie_embeddings else model.vocab_size * d
    skipped = (1 - ffn_share) * model.layers * (2 if model.gated else 1) * d * model.d_ff
    weights = parameters(model) - looked_up - skipped
    attention = model.layers * 2 * model.attended * model.heads * model.head_dim
    return 6 * weights + 6 * attention


def step(
    config: Config, devices: int, hardware: Hardware = HARDWARE["h100"], ffn_share: float = 1.0
) -> Step:
    """The cost of a step on a number of devices.

    Raises:
      ConfigError: the mesh or the batch does not divide over the devices.
    """
    data, fsdp = config.mesh.shape(devices)
    count = parameters(config.model)
    micro_batches = config.accumulation_steps(devices)
    flops = config.batch_tokens / devices * flops_per_token(config.model, ffn_share)
    weights = 2 * count  # bytes of the weights, or of their gradients, in 16 bits
    fsdp_bytes = micro_batches * 3 * weights * (fsdp - 1) / fsdp
    data_bytes = 2 * 4 * count / fsdp * (data - 1) / data  # a ring's all-reduce
    # AdamW reads a gradient, and reads and writes a parameter and two moments, all in float32. Each
    # micro-batch reads 16-bit weights twice and adds its gradient to the sum.
    hbm = 7 * 4 * count / fsdp + micro_batches * (2 * weights + 3 * 4 * count / fsdp)
    fsdp_rate = hardware.nvlink if fsdp <= hardware.per_host else hardware.network
    data_rate = hardware.nvlink if devices <= hardware.per_host else hardware.network
    return Step(
        flops=flops,
        hbm=hbm,
        fsdp=fsdp_bytes,
        data=data_bytes,
        state=5 * 4 * count / fsdp,
        seconds={
            "compute": flops / hardware.flops,
            "memory": hbm / hardware.hbm,
            "fsdp collectives": fsdp_bytes / fsdp_rate,
            "data collectives": data_bytes / data_rate,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", help="YAML file or shipped name, such as configs/2b.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--hardware", choices=HARDWARE, default="h100")
    parser.add_argument("--ffn-share", type=float, default=1.0, help="see flops_per_token")
    args = parser.parse_intermixed_args()
    try:
        config = config_lib.load(args.config, args.overrides)
        cost = step(config, args.devices, HARDWARE[args.hardware], args.ffn_share)
    except ConfigError as error:
        parser.exit(1, f"error: {error}\n")
    print(f"{parameters(config.model) / 1e9:.2f} billion parameters; per device and step:")
    print(f"  {cost.flops / 1e12:.1f} TFLOP, {cost.hbm / 1e9:.1f} GB of memory traffic")
    print(f"  {cost.fsdp / 1e9:.2f} GB over fsdp, {cost.data / 1e9:.2f} GB over data")
    memory = HARDWARE[args.hardware].memory
    print(f"  {cost.state / 1e9:.1f} of {memory / 1e9:.0f} GB hold state; activations come on top")
    for name, seconds in cost.seconds.items():
        print(f"  {name}: at least {seconds * 1e3:.1f} ms")
    print(f"bound by {max(cost.seconds, key=cost.seconds.__getitem__)}")


if __name__ == "__main__":
    main()
