"""A short text that the model of a run writes at each evaluation, from held-out text on."""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from flax import nnx

from twell_jax.config import Config
from twell_jax.data import Data, marks
from twell_jax.data.tokenizers import Tokenizer
from twell_jax.models import sharding
from twell_jax.models.transformer import graphdef

_PROMPT_TOKENS = 32
_TEMPERATURE = 0.8  # the default of `twell_jax.generate`
# XLA serves any number of tokens on any device.
_THROUGH_XLA = {"ffn_implementation": "xla", "ffn_gradients": None, "remat": "none"}


@dataclass(frozen=True)
class Sample:
    """The beginning of a held-out text, and how a model continued it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Writer:
    """Has parameters write a text after the same prompt, with the same seed.

    Attributes:
      program: continues a row of tokens on each device.
      abstract_params: shapes and shardings of the parameters.
      tokens: int32 `[devices, T]`, the same row for each device.
      prompt: the number of tokens that are given.
      tokenizer: their tokenizer.
      mesh: the devices.
    """

    program: jax.stages.Wrapped
    abstract_params: nnx.State
    tokens: np.ndarray
    prompt: int
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh

    def compile(self) -> None:
        """Compiles what a call calls."""
        placed = sharding.of_batch(self.mesh)
        tokens = jax.ShapeDtypeStruct(self.tokens.shape, self.tokens.dtype, sharding=placed)
        with jax.set_mesh(self.mesh):  # which is a thread's own
            self.program.lower(self.abstract_params, tokens).compile()

    def __call__(self, params: nnx.State) -> Sample:
        """What parameters write; all processes take part."""
        batch = jax.make_array_from_callback(
            self.tokens.shape, sharding.of_batch(self.mesh), self.tokens.__getitem__
        )
        prompt, end = self.tokens[0, : self.prompt], self.tokenizer.eot_id
        new = np.asarray(self.program(params, batch))[0, self.prompt :]
        new = new[: np.argmax(new == end)] if end in new else new
        before = self.tokenizer.decode(prompt)
        whole = self.tokenizer.decode(np.concatenate([prompt, new]))
        # Decoded with what is before it, its first space stays.
        whole_goes_on = whole.startswith(before)
        text = whole.removeprefix(before) if whole_goes_on else self.tokenizer.decode(new)
        return Sample(before, text)


def writer(
    config: Config, data: Data, abstract_params: nnx.State, mesh: jax.sharding.Mesh
) -> Writer | None:
    """What has parameters write `config.sample_tokens`, or up to the end of the text or context.

    The prompt and the seed are always the same, so that evaluations show what was learnt. A program
    runs the model on all tokens for each new one: it needs no cache, and serves any sharding.

    Args:
      config: the run.
      data: its data. A held-out sequence begins with the prompt or, if there are answers, has it
        before the first one.
      abstract_params: shapes and shardings of the parameters.
      mesh: the devices, which all take part.

    Returns:
      None if no sample is wanted, or the text of the tokens is not known.
    """
    prompt = _prompt(data.held_out, min(_PROMPT_TOKENS, config.model.context // 2))
    length = min(len(prompt) + config.sample_tokens, config.model.context)
    if data.held_out_bytes is None or length == len(prompt):
        return None
    document_end = data.tokenizer.eot_id if config.data.mask_documents else None
    graph = graphdef(config.model.model_copy(update=_THROUGH_XLA))
    program = jax.jit(
        partial(_continued, graph, len(prompt), document_end, config.seed),
        in_shardings=(
            jax.tree.map(lambda leaf: leaf.sharding, abstract_params),
            sharding.of_batch(mesh),
        ),
        out_shardings=jax.NamedSharding(mesh, jax.P()),
    )
    tokens = np.zeros((mesh.size, length), np.int32)  # a row for each device
    tokens[:, : len(prompt)] = prompt
    return Writer(program, abstract_params, tokens, len(prompt), data.tokenizer, mesh)


def _prompt(held_out: np.ndarray, most: int) -> np.ndarray:
    """At most so many ids, up to an answer if tokens are marked."""
    counts = marks.counts(held_out)
    answers = np.argwhere(~counts[:, :-1] & counts[:, 1:])
    row, stop = (answers[0] + [0, 1]) if len(answers) else (0, most)
    return marks.ids(held_out[row, max(0, stop - most) : stop])


def _continued(
    graph: nnx.GraphDef,
    start: int,
    document_end: int | None,
    seed: int,
    params: nnx.State,
    tokens: jax.Array,
) -> jax.Array:
    """The same `tokens: int32 [B, T]`, of which those from `start` on are drawn by the model."""
    model, key = nnx.merge(graph, params), jax.random.key(seed)

    def write_token(at: jax.Array, tokens: jax.Array) -> jax.Array:
        x, _ = model.hidden(tokens, document_end=document_end)
        logits = model.logits(jax.lax.dynamic_index_in_dim(x, at - 1, 1, keepdims=False))
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / _TEMPERATURE)
        return tokens.at[:, at].set(drawn)

    return jax.lax.fori_loop(start, tokens.shape[1], write_token, tokens)
