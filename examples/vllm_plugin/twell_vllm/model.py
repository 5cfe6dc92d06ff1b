"""vLLM's Llama with sparse feed-forward blocks. Its layers, and so its weights, are vLLM's."""

from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaMLP

from twell_jax.torch import sparse_ffn


@torch.library.custom_op("twell_vllm::block", mutates_args=())
def block(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, name: str) -> torch.Tensor:
    """The block of `x: [tokens, D]`, with `gate_up: [2 H, D]` and `down: [D, H]`.

    One operator, which vLLM's compiler does not look into: numbers of tokens are known when it
    runs. Graphs of CUDA are for few tokens, and hold the products of torch.
    """
    implementation = "torch" if torch.cuda.is_current_stream_capturing() else None
    gate, up = gate_up.chunk(2)
    return sparse_ffn(x, gate, up, down.t(), activation=name, implementation=implementation)


@block.register_fake
def _(x, gate_up, down, name):
    return torch.empty_like(x)


class SparseMLP(LlamaMLP):
    """vLLM's block with another activation; each GPU has a share of the neurons."""

    activation: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = block(x, self.gate_up_proj.weight, self.down_proj.weight, self.activation)
        return tensor_model_parallel_all_reduce(y)


class SparseLlamaForCausalLM(LlamaForCausalLM):
    """A Llama whose `hidden_act` is "relu" or "relu2", without biases and in 16 bits.

    Raises:
      ValueError: it is something else.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "", **others: Any) -> None:
        config = vllm_config.model_config.hf_config
        activation = config.hidden_act
        if activation not in ("relu", "relu2"):
            raise ValueError(f"hidden_act must be 'relu' or 'relu2', got {activation!r}")
        if vllm_config.quant_config is not None or getattr(config, "mlp_bias", False):
            raise ValueError("blocks must have no biases, and weights of 16 bits")
        config.hidden_act = "silu"  # the only one that vLLM's block takes
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix, **others)
        finally:
            config.hidden_act = activation
        for module in self.modules():
            if type(module) is LlamaMLP:
                module.__class__ = SparseMLP
                module.activation = activation
