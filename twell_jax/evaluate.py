"""Scores a model on benchmarks, by EleutherAI's lm-evaluation-harness (extra "eval").

    python -m twell_jax.evaluate DIRECTORY [--tasks arc_easy,piqa] [--limit 100] [--out FILE.json]

DIRECTORY is a run of train.py or a model in Hugging Face's format. The default tasks are the seven
of arXiv 2603.23198; the harness downloads their questions.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ModuleNotFoundError as error:
    needs = "twell_jax.evaluate needs lm-evaluation-harness: pip install 'twell-jax[eval]'"
    raise ModuleNotFoundError(f"{needs} ({error})", name=error.name) from None

from twell_jax.generate import ENDED, generate
from twell_jax.inference import language_model
from twell_jax.inference.language_model import LanguageModel
from twell_jax.inference.sampling import Sampling
from twell_jax.train.checkpoint import CheckpointError

TASKS = "arc_easy,arc_challenge,hellaswag,openbookqa,piqa,winogrande,commonsense_qa"
_MULTIPLE = 64  # lengths are padded to one, so that few of them are compiled
_KNOBS = ("temperature", "top_k", "top_p", "min_p")


class HarnessModel(TemplateLM):
    """A `LanguageModel` as the harness wants it; pass it to `lm_eval.simple_evaluate`.

    Conventions (what precedes an empty context, truncation from the left, windows of long texts)
    are those of the harness's own Hugging Face backend.

    Args:
      lm: the model.
      batch: sequences at a time.
      seed: of generation with a temperature.
    """

    def __init__(self, lm: LanguageModel, *, batch: int = 16, seed: int = 0):
        super().__init__()
        self.lm, self.batch, self.seed = lm, batch, seed
        self.max_length = lm.model.config.context

    @property
    def eot_token_id(self) -> int:
        return self.lm.tokenizer.eot_id

    @property
    def prefix_token_id(self) -> int:
        return self.lm.prefix[0] if self.lm.prefix else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return type(self.lm.tokenizer).__name__

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        prefix = () if add_special_tokens is False else self.lm.prefix
        return [*prefix, *self.lm.tokenizer.encode([string])[0].tolist()]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], **_
    ) -> list[tuple[float, bool]]:
        # A context of spaces alone is empty here: the harness counts them with what follows.
        before = [self.prefix_token_id]
        rows = [((context or before) + target, len(target)) for _, context, target in requests]
        if (longest := max((count for _, count in rows), default=0)) > self.max_length:
            raise ValueError(f"a continuation has more than {self.max_length} tokens: {longest}")
        # The last token of a row is only predicted.
        rows = [(tokens[-(self.max_length + 1) :], count) for tokens, count in rows]
        graph, params = nnx.split(self.lm.model)
        results = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            width = -(-(len(rows[chosen[0]][0]) - 1) // _MULTIPLE) * _MULTIPLE
            tokens = np.zeros((self.batch, width + 1), np.int32)
            scored = np.zeros((self.batch, width), bool)
            for row, i in enumerate(chosen):
                ids, count = rows[i]
                tokens[row, : len(ids)] = ids
                scored[row, len(ids) - 1 - count : len(ids) - 1] = True
            sums, greedy = jax.device_get(_score(graph, params, tokens, scored))
            for row, i in enumerate(chosen):
                results[i] = float(sums[row]), bool(greedy[row])
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        windows, owners = [], []
        for i, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        sums = [total for total, _ in self._loglikelihood_tokens(windows)]
        return np.bincount(owners, sums, len(requests)).tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        results = [None] * len(requests)
        alike = {}  # requests with the same options, the longest context first
        for i in sorted(range(len(requests)), key=lambda i: -len(requests[i].args[0])):
            alike.setdefault(json.dumps(requests[i].args[1], sort_keys=True), []).append(i)
        for options, members in alike.items():
            for start in range(0, len(members), self.batch):
                chosen = members[start : start + self.batch]
                contexts = [requests[i].args[0] for i in chosen]
                for i, text in zip(
                    chosen, self._continue(contexts, json.loads(options)), strict=True
                ):
                    results[i] = text
        return results

    def _continue(self, contexts: list[str], options: dict) -> list[str]:
        options = dict(normalize_gen_kwargs(options))
        until = [stop for stop in options.pop("until") if stop]
        max_tokens = options.pop("max_gen_toks")
        if not options.pop("do_sample"):
            options["temperature"] = 0.0
        if unknown := options.keys() - set(_KNOBS):
            raise ValueError(f"generation_kwargs: cannot serve {', '.join(sorted(unknown))}")
        room = self.max_length - max_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks must be less than the context of {self.max_length}, got {max_tokens}"
            )
        ids = [[] for _ in contexts]
        for step in generate(
            self.lm.model,
            [self.lm.encode(context)[-room:] for context in contexts],
            max_tokens=max_tokens,
            sampling=Sampling(**options),
            stop_ids=self.lm.stop_ids,
            seed=self.seed,
        ):
            for row, token in zip(ids, step.tolist(), strict=True):
                if token != ENDED:
                    row.append(token)
            texts = [self.lm.tokenizer.decode(row) for row in ids]
            if all(any(stop in text for stop in until) for text in texts):
                break
        return [_before(self.lm.tokenizer.decode(row), until) for row in ids]


@partial(jax.jit, static_argnames="graph")
def _score(graph, params, tokens, scored):
    """Sum of the log-probabilities of the `scored: bool [B, T]` targets; are all most likely?"""
    logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
    targets = tokens[:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    greedy = jnp.argmax(logits, axis=-1) == targets
    return -jnp.sum(loss, axis=-1, where=scored), jnp.all(greedy, axis=-1, where=scored)


def _before(text: str, until: Sequence[str]) -> str:
    for stop in until:
        text = text.split(stop)[0]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="of a run, such as runs/0p5b, or with a config.json")
    parser.add_argument("--tasks", default=TASKS, help=f"of the harness (default: {TASKS})")
    parser.add_argument("--task-path", type=Path, help="directory of further task definitions")
    parser.add_argument("--shots", type=int, help="examples in a prompt (default: the task's)")
    parser.add_argument("--limit", type=int, help="questions of each task (default: all)")
    parser.add_argument("--batch", type=int, default=16, help="sequences at a time")
    parser.add_argument("--implementation", choices=("xla", "mosaic"), help="of the FFN")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out: there is no directory {args.out.parent}")
    try:
        lm = language_model.load(args.directory, args.implementation)
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    results = lm_eval.simple_evaluate(
        HarnessModel(lm, batch=args.batch),
        tasks=args.tasks.split(","),
        task_manager=TaskManager(include_path=args.task_path and str(args.task_path)),
        num_fewshot=args.shots,
        limit=args.limit,
        log_samples=False,
    )
    print(make_table(results))
    if args.out:
        args.out.write_text(json.dumps(results["results"], indent=1) + "\n")


if __name__ == "__main__":
    main()
