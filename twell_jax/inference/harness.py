"""Scores a `LanguageModel` by EleutherAI's lm-evaluation-harness (extra "eval")."""

import difflib
import itertools
import json
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ModuleNotFoundError as error:
    needs = (
        "twell_jax.evaluate needs lm-evaluation-harness: in your clone, pip install -e '.[eval]'"
    )
    raise ModuleNotFoundError(f"{needs} ({error})", name=error.name) from None

from twell_jax import untrusted
from twell_jax.inference.generation import ENDED, generate
from twell_jax.inference.language_model import LanguageModel
from twell_jax.inference.likelihood import log_likelihoods
from twell_jax.inference.sampling import Sampling
from twell_jax.inference.stop_texts import StopTexts

_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p")


class Tasks(TaskManager):
    """Tasks of the harness with their questions, which it may have to download.

    Args:
      names: of tasks, groups or tags.
      directory: holds further definitions of tasks.

    Raises:
      ValueError: there is no such task, a definition is broken, or the questions cannot be had.
    """

    def __init__(self, names: Sequence[str], directory: Path | None = None):
        try:
            super().__init__(include_path=directory and str(directory))
        except Exception as error:  # of the parser of a definition, for example
            raise ValueError(f"--task-path: {directory}: {_one_line(error)}") from None
        self.names = list(names)
        for name in self.names:
            if name not in self.all_tasks:
                close = ", ".join(difflib.get_close_matches(name, self.all_tasks))
                hint = f"; did you mean {close}?" if close else ""
                raise ValueError(f"--tasks: the harness has no task {name!r}{hint}")
        try:
            self._loaded = super().load(self.names)
        except Exception as error:  # of the network, a missing package, the questions' format, ...
            raise ValueError(
                f"--tasks: {', '.join(self.names)} cannot be loaded ({_one_line(error)})"
            ) from None

    def load(self, task_list: Any) -> Any:
        """What was loaded; `lm_eval.simple_evaluate` asks for `names`."""
        return self._loaded


def run_tasks(
    lm: LanguageModel,
    tasks: Tasks,
    *,
    shots: int | None = None,
    limit: int | None = None,
    batch: int = 16,
) -> dict[str, Any]:
    """Scores a model by `lm_eval.simple_evaluate`.

    Args:
      lm: the model.
      tasks: what it is scored on; used once, as the harness changes them.
      shots: examples in a prompt; None takes the task's own number.
      limit: questions of each task; None takes all.
      batch: sequences at a time.

    Returns:
      The result of `lm_eval.simple_evaluate`; "results" has the metrics of each task.

    Raises:
      ValueError: a task asks for texts that cannot be generated. What its definition says is
        checked before anything is scored.
    """
    for name, task in tasks.load(tasks.names)["tasks"].items():
        options = task.get_config("generation_kwargs")
        if task.get_config("output_type") == "generate_until" and options is not None:
            try:
                _generation(options, lm.model.config.context)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return lm_eval.simple_evaluate(
        HarnessModel(lm, batch=batch),
        tasks=tasks.names,
        task_manager=tasks,
        num_fewshot=shots,
        limit=limit,
        log_samples=False,
    )


def figures(results: dict[str, Any]) -> dict[str, float]:
    """The metrics of the results of `run_tasks` by task and name, without their errors."""
    return {
        f"{task}, {metric.removesuffix(',none')}": _plain(value)
        for task, metrics in results["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, Real) and "," in metric and "_stderr," not in metric
    }


def as_json(results: dict[str, Any]) -> str:
    """The metrics of the results of `run_tasks`; "results" alone, as a file has them."""
    return json.dumps(results["results"], indent=1, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """A number as JSON has it: a task's own metric may be NumPy's. What is none becomes a text."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, Real) else str(value)


def table(results: dict[str, Any]) -> str:
    """The results of `run_tasks` as the harness prints them."""
    return "\n".join(map(untrusted.plain, make_table(results).split("\n")))


class HarnessModel(TemplateLM):
    """A `LanguageModel` with the interface of the harness, for `lm_eval.simple_evaluate`.

    Like the harness's own Hugging Face backend, it puts `first_id` before an empty context, cuts
    long contexts from the left, and splits long texts into windows. Unlike it, it scores a whole
    text as log p(text | first_id) also where the tokenizer puts <s> before texts: that backend then
    scores a second <s> as the text's first token.

    Args:
      lm: the model.
      batch: sequences at a time.
      seed: of the first batch that is generated with a temperature; others have those after it.
    """

    def __init__(self, lm: LanguageModel, *, batch: int = 16, seed: int = 0):
        super().__init__()
        self.lm, self.batch = lm, batch
        self._seeds = itertools.count(seed)  # of batches: a task may repeat its requests
        self.max_length = lm.model.config.context

    # The documentation of `TemplateLM` says what the following methods must do.

    @property
    def eot_token_id(self) -> int:
        return self.lm.tokenizer.eot_id

    @property
    def prefix_token_id(self) -> int:
        return self.lm.first_id

    @property
    def tokenizer_name(self) -> str:
        return type(self.lm.tokenizer).__name__

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        prefix = () if add_special_tokens is False else self.lm.prefix
        return [*prefix, *self.lm.tokenizer.encode([string])[0].tolist()]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        # A context of spaces alone arrives empty: the harness moves them to the continuation.
        before = [self.prefix_token_id]
        rows = [((context or before) + target, len(target)) for _, context, target in requests]
        if (longest := max((count for _, count in rows), default=0)) > self.max_length:
            raise ValueError(f"a continuation has more than {self.max_length} tokens: {longest}")
        # The last token of a row is only predicted, never read, so one more token fits.
        rows = [(tokens[-(self.max_length + 1) :], count) for tokens, count in rows]
        return log_likelihoods(self.lm.model, rows, batch=self.batch)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        windows, owners = [], []
        for i, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        sums = [total for total, _ in self._loglikelihood_tokens(windows)]
        return np.bincount(np.array(owners, int), sums, len(requests)).tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        results: dict[int, str] = {}
        # The requests with the same options, the longest context first.
        alike: dict[str, list[int]] = {}
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
        return [results[i] for i in range(len(requests))]

    def _continue(self, contexts: list[str], options: dict) -> list[str]:
        until, max_tokens, sampling = _generation(options, self.max_length)
        room = self.max_length - max_tokens
        ids: list[list[int]] = [[] for _ in contexts]
        stops = [StopTexts(self.lm.tokenizer, until) for _ in contexts]
        for step in generate(
            self.lm.model,
            [self.lm.encode(context)[-room:] for context in contexts],
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=self.lm.stop_ids,
            seed=next(self._seeds) % 2**32,
        ):
            tokens = step.tolist()
            for row, token in zip(ids, tokens, strict=True):
                if token != ENDED:
                    row.append(token)
            rows = zip(tokens, stops, ids, strict=True)
            if all(token == ENDED or stop.found_in(row) for token, stop, row in rows):
                break
        return [_before(self.lm.tokenizer.decode(row), until) for row in ids]


def _generation(options: dict, context: int) -> tuple[list[str], int, Sampling]:
    """What a task's `generation_kwargs` ask for.

    Returns:
      The texts that end one, the most tokens of one, and how tokens are chosen.

    Raises:
      ValueError: an option cannot be served, or the model's context has no room.
    """
    options = dict(normalize_gen_kwargs(options))
    until = [stop for stop in options.pop("until") if stop]
    max_tokens = options.pop("max_gen_toks")
    if not options.pop("do_sample"):
        options["temperature"] = 0.0
    if options.get("num_beams") == 1:  # no search, as here
        del options["num_beams"]
    if unknown := options.keys() - set(_SAMPLING_OPTIONS):
        raise ValueError(f"generation_kwargs: cannot serve {', '.join(sorted(unknown))}")
    if max_tokens >= context:
        raise ValueError(
            f"max_gen_toks must be less than the context of {context}, got {max_tokens}"
        )
    return until, max_tokens, Sampling(**options)


def _before(text: str, until: Sequence[str]) -> str:
    """The part of a text before the first occurrence of any string in `until`."""
    for stop in until:
        text = text.split(stop)[0]
    return text


def _one_line(error: Exception) -> str:
    return untrusted.plain(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
