"""A plugin of vLLM: Llamas whose feed-forward blocks have ReLU, as `SparseLlamaForCausalLM`."""


def register() -> None:
    """Called by vLLM in each process, before it has a GPU: so the model is not imported here."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(
        "SparseLlamaForCausalLM", "twell_vllm.model:SparseLlamaForCausalLM"
    )
