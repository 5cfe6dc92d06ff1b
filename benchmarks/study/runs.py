"""The runs of the study: which variants are trained, with which settings and in which order."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from twell_jax.config import ConfigError

# The settings of each method, where {} is its strength.
METHODS = {
    "relu": [],
    "silu": ["model.activation=silu"],
    "l1": ["l1_coefficient={}"],
    "lasso": ["l1_coefficient={}", "lasso_share=1"],
    "l1 and lasso": ["l1_coefficient={}", "lasso_share=0.5"],
    "nnz target": ["sparsity_target={}"],
    "U target": ["union_target={}"],
    "U target and lasso": ["union_target={}", "lasso_share=0.5"],
}
# Dense XLA trains all variants, so that they do not differ in rounding.
FOR_ALL = ["model.ffn_implementation=xla"]


@dataclass(frozen=True)
class Variant:
    """A way to train the model of base.yaml.

    Attributes:
      method: a key of `METHODS`.
      strength: as the configuration writes it; empty for a method without.
    """

    method: str
    strength: str = ""

    @property
    def name(self) -> str:
        """The name in records and on the command line."""
        return f"{self.method} {self.strength}".strip()

    @property
    def settings(self) -> list[str]:
        """The overrides of base.yaml that make the variant."""
        return [setting.format(self.strength) for setting in METHODS[self.method]]


# The most informative first, as a session may end after any of them. The cross-entropy rises above
# that of ReLU beyond 2.0e-3 with L1, beyond 6.0e-4 with the lasso alone.
_ORDER = (
    Variant("relu"),
    Variant("l1", "1.0e-3"),
    Variant("l1", "2.0e-3"),
    Variant("l1 and lasso", "6.0e-4"),
    Variant("lasso", "3.0e-4"),
    Variant("silu"),
    Variant("l1 and lasso", "1.0e-3"),
    Variant("l1", "3.0e-3"),
    Variant("lasso", "6.0e-4"),
    Variant("l1", "3.0e-4"),
    Variant("l1 and lasso", "3.0e-4"),
    Variant("U target and lasso", "0.07"),
    Variant("U target", "0.1"),
    Variant("U target", "0.07"),
    Variant("U target", "0.2"),
    Variant("nnz target", "10"),
    Variant("lasso", "1.0e-4"),
    Variant("lasso", "1.0e-3"),
    Variant("nnz target", "3"),
    Variant("nnz target", "40"),
    Variant("l1", "1.0e-4"),
    Variant("l1", "1.0e-2"),
    Variant("lasso", "3.0e-3"),
)
VARIANTS = {variant.name: variant for variant in _ORDER}
SEEDS = (0, 1, 2)


def in_order(names: Collection[str], seeds: Collection[int]) -> list[tuple[Variant, int]]:
    """The runs of these variants and seeds: one seed after the other."""
    return [(VARIANTS[name], seed) for seed in seeds for name in VARIANTS if name in names]


def by_run(rows: list[dict[str, Any]], text: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of records by variant and seed; of several of one run, the last.

    Args:
      rows: of records.
      text: the digest of the text that all must have been trained on.

    Raises:
      ConfigError: a row is of another text, or of a version that recorded none.
    """
    for row in rows:
        if (other := row.get("text")) != text:
            raise ConfigError(
                f"data: {row['variant']}, seed {row.get('seed')}, was trained on a text with the "
                f"digest {other}, not {text}, and rows of different texts do not compare; restore "
                "the files, or start anew in another --out"
            )
    return {(row["variant"], row["seed"]): row for row in rows}
