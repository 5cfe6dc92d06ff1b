"""The sections of a training configuration: each key is declared here, with its meaning.

Those of the model are in `model`, those of the text in `data`.
"""

import math
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from twell_jax import untrusted
from twell_jax.config.data import DataConfig
from twell_jax.config.model import ModelConfig
from twell_jax.config.section import ConfigError, Section
from twell_jax.ffn.algorithms import Request, lasso_problem
from twell_jax.ffn.stats import UNION_NEURONS, UNION_TOKENS

_MOST = 2**31 - 1  # steps and counts of them are int32 on the devices


class OptimizerConfig(Section):
    """AdamW with warm-up, a decaying learning rate and clipping by the global norm."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, le=_MOST, description="steps of linear warm-up from zero")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="decay: cosine, or warm-up, stable, decay (linear at the end)"
    )
    decay_fraction: float = Field(0.2, gt=0, le=1, description="share of the steps wsd decays over")
    final_lr_fraction: float = Field(0.1, ge=0, le=1, description="last over peak learning rate")
    b1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    b2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not applied to norms")
    clip_norm: float = Field(1.0, gt=0, description="largest global norm of the gradient")


class MeshConfig(Section):
    """The mesh of devices, (data, fsdp); data = -1 takes all devices that fsdp leaves."""

    data: int = Field(-1, ge=-1, description="copies of the model that see different data")
    fsdp: int = Field(1, gt=0, description="devices that share one copy's state")
    heartbeat_seconds: int = Field(
        100,
        gt=0,
        le=_MOST,
        description="a process silent for so long counts as lost; all others then end",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data == 0:
            raise ValueError("mesh.data: must be positive, or -1 for all remaining devices")
        return self

    def shape(self, devices: int) -> tuple[int, int]:
        """The mesh's shape (data, fsdp) on this number of devices.

        Raises:
          ConfigError: data * fsdp is not the number of devices, or there are no devices.
        """
        if devices < 1:
            raise ConfigError(f"devices: there must be at least one, got {devices}")
        if devices % self.fsdp:
            raise ConfigError(f"mesh.fsdp: {self.fsdp} does not divide {devices} devices")
        data = devices // self.fsdp if self.data == -1 else self.data
        if data * self.fsdp != devices:
            raise ConfigError(
                f"mesh.data: {self.data} x fsdp={self.fsdp} must use all {devices} devices"
            )
        return data, self.fsdp


class Config(Section):
    """Settings of a training run."""

    run_dir: str = Field(description="checkpoints, metrics and plots go here")
    init_from: str | None = Field(
        None,
        description="what the first parameters are taken from: a run, or a model in Hugging Face's "
        "format, which also decides the tokenizer and the keys of model that are not given "
        "(directory; or org/name, org/name@revision on the hub); null: draw from seed",
    )
    seed: int = Field(
        0, ge=0, lt=2**32, description="decides the initial weights and the order of the data"
    )
    steps: int = Field(gt=0, le=_MOST, description="optimizer steps")
    batch_tokens: int = Field(gt=0, description="tokens per optimizer step, over all devices")
    micro_batch: int = Field(gt=0, description="sequences per device in one forward pass")
    l1_coefficient: float = Field(
        0.0,
        ge=0,
        description="times the mean over tokens and layers of sum_n |h_n|; with sparsity_target "
        "or union_target where the search begins",
    )
    sparsity_target: float | None = Field(
        None,
        ge=0.01,
        description="wanted non-zeros per token, mean over layers; the run then moves the L1 "
        "coefficient, from l1_coefficient (0: from 1e-5), until so many neurons are active; "
        "null: l1_coefficient holds",
    )
    union_target: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="wanted share of the neurons that 256 neighbouring tokens use between them, U, "
        "mean over layers, which the time of kernels follows; reached like sparsity_target, and "
        "with both neither is exceeded; null: none",
    )
    lasso_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the L1 term that becomes a group lasso over windows of tokens, "
        "which asks for neurons that are active in few windows; 1: all of it; kernels compute it "
        "with sparse gradients alone",
    )
    lasso_window: int = Field(
        256, gt=0, le=_MOST, description="consecutive tokens of a window of the lasso"
    )
    l1_warmup: tuple[int, int] = Field(
        (0, 0),
        description="steps between which the L1 coefficient rises linearly from zero; null: none",
    )
    l1_stages: int = Field(
        0,
        ge=0,
        le=10_000,
        description="equal stages in which the L1 coefficient rises instead; 0: linearly",
    )
    dead_window_tokens: int = Field(
        10_000_000, gt=0, description="a neuron that was active for none of so many tokens is dead"
    )
    reinit_every: int = Field(
        0,
        ge=0,
        le=_MOST,
        description="steps between re-initialisations of dead neurons' gates; 0: never",
    )
    skip_dead_every: int = Field(
        0,
        ge=0,
        description="steps from one at full width to the next; in those between, neurons that "
        "were not active for so many steps are skipped, which kernels leave out; 0: never",
    )
    sparse_gradients_every: int | Literal["auto"] = Field(
        "auto",
        description="steps after which the run plans anew which layers compute sparse gradients, "
        "and orders their neurons, from what they measured (on Hopper GPUs; elsewhere all "
        "gradients are dense); auto: where kernels serve, every 10 to 100 steps; 0: never, "
        "model.ffn_gradients holds for all layers",
    )
    eval_every: int = Field(500, gt=0, description="steps between held-out evaluations")
    eval_sequences: int = Field(64, gt=0, description="held-out sequences per evaluation")
    sample_tokens: int = Field(
        64,
        ge=0,
        le=4096,
        description="tokens of a sample text that is written and logged at each evaluation; 0: "
        "none",
    )
    checkpoint_every: int = Field(500, gt=0, description="steps between checkpoints")
    checkpoint_keep: int = Field(3, gt=0, description="newest checkpoints kept")
    log_every: int = Field(10, gt=0, description="steps between lines of metrics.jsonl")
    profile_steps: tuple[int, int] | None = Field(
        None,
        description="steps between which JAX traces the run, for xprof and Perfetto, into "
        "run_dir/profile, such as [100, 103]; null: none",
    )
    tensorboard: bool = Field(False, description="also write TensorBoard events (extra)")
    wandb: bool = Field(False, description="also log to Weights & Biases (extra)")
    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()

    @field_validator("l1_warmup", mode="before")
    @classmethod
    def _null_is_no_rise(cls, value: Any) -> Any:
        return (0, 0) if value is None else value

    @field_validator("sparse_gradients_every", mode="plain")
    @classmethod
    def _steps_or_auto(cls, value: Any) -> int | Literal["auto"]:
        if value == "auto" or (type(value) is int and value >= 0):
            return value
        raise ValueError(
            f"sparse_gradients_every: must be auto or a number of steps, 0 for never, got "
            f"{untrusted.short(value)}"
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_tokens % self.model.context:
            raise ValueError(
                f"batch_tokens: must be a multiple of model.context={self.model.context}, "
                f"got {self.batch_tokens}"
            )
        if self.dead_window_tokens / self.batch_tokens > _MOST:
            raise ValueError(
                f"dead_window_tokens: must be less than 2^31 steps of batch_tokens="
                f"{self.batch_tokens}, got {self.dead_window_tokens}"
            )
        if self.model.d_model % self.mesh.fsdp:
            raise ValueError(
                f"mesh.fsdp: must divide model.d_model={self.model.d_model}, got {self.mesh.fsdp}"
            )
        sparse = Request(self.model.ffn_implementation, gradients="sparse")
        if self.must_plan_gradients and sparse.contradiction:
            raise ValueError(
                "sparse_gradients_every: xla computes dense gradients only, so "
                "model.ffn_implementation must be mosaic or null, got xla"
            )
        if self.must_plan_gradients and self.model.ffn_gradients is not None:
            raise ValueError(
                "sparse_gradients_every: the run plans the gradients of each layer, so "
                f"model.ffn_gradients must be null, got {self.model.ffn_gradients}"
            )
        self._check_targets()
        if self.skip_dead_every:
            self._check_skipping()
        if self.lasso_share:
            self._check_lasso()
        if self.profile_steps and not 0 <= self.profile_steps[0] < self.profile_steps[1]:
            raise ValueError(
                "profile_steps: needs 0 <= first < last, such as [100, 103], got "
                f"{list(self.profile_steps)}"
            )
        start, end = self.l1_warmup
        if not 0 <= start <= end <= _MOST:
            raise ValueError(f"l1_warmup: needs 0 <= start <= end < 2^31, got [{start}, {end}]")
        if self.l1_stages > end - start:
            raise ValueError(
                f"l1_stages: {self.l1_stages} stages do not fit into the {end - start} steps of "
                "l1_warmup"
            )
        return self

    def _check_targets(self) -> None:
        for key in self.targets:
            if self.model.activation == "silu":
                raise ValueError(
                    f"{key}: no activation of model.activation=silu becomes zero; write "
                    f"model.activation=relu, or {key}=null"
                )
        d_ff, tokens = self.model.d_ff, self.micro_batch * self.model.context
        if self.sparsity_target is not None and self.sparsity_target >= d_ff:
            raise ValueError(
                f"sparsity_target: must be less than model.d_ff={d_ff}, "
                f"got {self.sparsity_target:g}"
            )
        if self.union_target is None:
            return
        if self.union_target < self.least_union:
            raise ValueError(
                f"union_target: is counted in chunks of {UNION_NEURONS} neurons, so it must be at "
                f"least {math.ceil(1000 * self.least_union) / 1000:g} with model.d_ff={d_ff}, got "
                f"{self.union_target:g}"
            )
        if tokens % UNION_TOKENS:
            raise ValueError(
                f"union_target: is measured on {UNION_TOKENS} tokens, so micro_batch * "
                f"model.context must be a multiple of them, got {tokens}"
            )

    def _check_skipping(self) -> None:
        if self.skip_dead_every == 1:
            raise ValueError(
                "skip_dead_every: with 1 every step is at full width and skips nothing; write 2 or "
                "more, or 0"
            )
        if self.model.activation == "silu":
            raise ValueError(
                "skip_dead_every: with model.activation=silu every neuron is active; write "
                "model.activation=relu, or skip_dead_every=0"
            )
        if self.model.live_width:
            raise ValueError(
                "skip_dead_every: the model has numbers of live neurons of its own "
                "(model.live_width=true); write skip_dead_every=0"
            )
        if self.skip_dead_every > self.dead_steps:
            raise ValueError(
                f"skip_dead_every: a neuron that was not active for dead_window_tokens="
                f"{self.dead_window_tokens} is dead, and must be looked at in these "
                f"{self.dead_steps} steps, got {self.skip_dead_every}; write a larger "
                "dead_window_tokens"
            )

    def _check_lasso(self) -> None:
        model, documents = self.model, self.data.mask_documents
        is_sparse, plans = model.ffn_gradients == "sparse", self.must_plan_gradients
        # Settings that ask kernels for the lasso, and whether gradients are sparse with them.
        asking = {
            "model.ffn_implementation=null": (model.ffn_implementation == "mosaic", is_sparse),
            "model.ffn_gradients=null": (is_sparse, True),
            "sparse_gradients_every=0": (plans, True),
        }
        asked = {way_out: sparse for way_out, (asks, sparse) in asking.items() if asks}
        problems = {way_out: lasso_problem(sparse, documents) for way_out, sparse in asked.items()}
        ways_out = [way_out for way_out, problem in problems.items() if problem]
        if not ways_out:
            return
        why, or_ = problems[ways_out[0]], ""
        if documents:
            why = f"with data.mask_documents its windows end where documents do: {why}"
            if all(asked.values()):  # else they could not serve windows of whole sequences either
                or_ = ", data.mask_documents=false"
        raise ValueError(
            f"lasso_share: {why}; write {' and '.join(ways_out)}{or_}, or lasso_share=0"
        )

    @property
    def must_plan_gradients(self) -> bool:
        """Whether the run was told to plan which layers compute sparse gradients."""
        return self.sparse_gradients_every not in ("auto", 0)

    @property
    def targets(self) -> dict[str, float]:
        """The targets that the L1 coefficient is moved towards, by their keys; empty without."""
        given = {"sparsity_target": self.sparsity_target, "union_target": self.union_target}
        return {key: target for key, target in given.items() if target is not None}

    @property
    def least_union(self) -> float:
        """U of layers that use a single neuron for 256 tokens, which counts as a chunk of them."""
        return 1 / -(-self.model.d_ff // UNION_NEURONS)

    @property
    def sparsity_control_start(self) -> int:
        """The step from which the L1 coefficient is moved towards the targets.

        Before it, a model that barely learns does not show what the coefficient does.
        """
        return max(self.l1_warmup[1], self.optimizer.warmup_steps)

    @property
    def dead_steps(self) -> int:
        """Number of steps that `dead_window_tokens` take."""
        return -(-self.dead_window_tokens // self.batch_tokens)

    @property
    def batch_sequences(self) -> int:
        """Sequences per optimizer step, over all devices."""
        return self.batch_tokens // self.model.context

    def accumulation_steps(self, devices: int) -> int:
        """Micro-batches per optimizer step on this number of devices.

        Raises:
          ConfigError: micro_batch * devices does not divide the global batch.
        """
        steps, rest = divmod(self.batch_sequences, self.micro_batch * devices)
        if rest or not steps:
            raise ConfigError(
                f"micro_batch: {self.micro_batch} sequences on each of {devices} devices must "
                f"divide batch_tokens / model.context = {self.batch_sequences}"
            )
        return steps
