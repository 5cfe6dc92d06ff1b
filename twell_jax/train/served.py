"""Whether this machine serves what a run asks for, and what it does if not."""

import logging

import jax

from twell_jax.config import Config
from twell_jax.ffn import CannotServe
from twell_jax.train.gradient_plan import GradientPlan
from twell_jax.train.trainer import ModelGradients, Trainer

log = logging.getLogger(__name__)


def first_plan(config: Config, trainer: Trainer) -> GradientPlan | None:
    """The plan that a run begins with; None if it does not plan its gradients, or cannot.

    It warns if sparse gradients cannot be computed here, such as without a GPU.

    Raises:
      CannotServe: they cannot, and the config asks for kernels.
    """
    if not trainer.plans_every:
        return None
    plan = GradientPlan.dense(config.model.layers)
    gradients = plan.all_sparse.ffn_gradients
    is_served = _is_served("sparse_gradients_every", config, trainer, gradients)
    return plan if is_served else None


def with_gradients_served(
    config: Config, document_end: int, mesh: jax.sharding.Mesh
) -> tuple[Config, Trainer]:
    """The settings of a run on this machine, and their `Trainer`.

    It warns if `model.ffn_gradients` asks for sparse gradients that cannot be computed here; they
    are then dense.

    Raises:
      CannotServe: they cannot, and the config asks for kernels.
    """
    trainer, asked = Trainer(config, document_end, mesh), config.model.ffn_gradients
    if asked in (None, "dense") or _is_served("model.ffn_gradients", config, trainer, None):
        return config, trainer
    model = config.model.model_copy(update={"ffn_gradients": None})
    config = config.model_copy(update={"model": model})
    return config, Trainer(config, document_end, mesh)


def warn_of_products(config: Config, device: jax.Device) -> None:
    """Warns if `model.matmul_dtype` asks for products of 8 bits that the device has none for."""
    if config.model.matmul_dtype is None or jax.process_index() > 0:
        return
    # Ada's and all later ones have them.
    if float(getattr(device, "compute_capability", 0)) < 8.9:
        log.warning(
            "model.matmul_dtype=float8: %s does not multiply 8-bit floats; operands are rounded to "
            "them, but nothing becomes faster",
            device.device_kind,
        )


def _is_served(
    key: str, config: Config, trainer: Trainer, gradients: ModelGradients | None
) -> bool:
    """Whether a step with these gradients, for which `key` asks, can be computed here; warns if
    not."""
    step = trainer.step_with(gradients)
    try:
        jax.eval_shape(step, trainer.abstract_state, trainer.abstract_batch, 0.0)
    except CannotServe as error:
        if config.model.ffn_implementation == "mosaic":
            raise
        if jax.process_index() == 0:
            log.warning("%s: %s; here all gradients are dense", key, error.why)
        return False
    return True
