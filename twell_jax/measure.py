"""Times a block or a whole model on this GPU, dense and as the kernels compute it.

    python -m twell_jax.measure D H [--no-gate]
        a feed-forward block with d_model D and d_ff H, for few tokens, prompts and many. Weights
        are random; 0.5 % of the neurons are active for a token. It takes about 40 seconds, most of
        them to compile.
    python -m twell_jax.measure MODEL --text FILE
        a run, a directory with a config.json or a name on the hub, in bfloat16: it computes
        gradients, scores the text, decodes and reads prompts. After 70 s it begins nothing more.

The answer for a block is kept in the user's cache directory (TWELL_JAX_CACHE names another), where
`sparse_ffn` finds it: blocks of these widths are then computed by what was the fastest here.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from twell_jax.analysis import whole_models
from twell_jax.analysis.blocks import Times, measure
from twell_jax.analysis.whole_models import Work
from twell_jax.config import ConfigError
from twell_jax.ffn import CannotServe, dispatch
from twell_jax.ffn.measured import Block, keep
from twell_jax.inference import arguments, language_model
from twell_jax.models.pretrained import PretrainedError
from twell_jax.train import compilation_cache, interrupt, utf8
from twell_jax.train.checkpoint_errors import CheckpointError
from twell_jax.train.gradient_plan import GradientPlan

TOKENS, CONTEXT = 16384, 2048  # that a model scores at once, and the most of a sequence
FIRST, SECONDS = 3, 70  # works of a model that are done first, and after how long no others are


def measure_block(block: Block, console: Console) -> None:
    """Times a block, prints a table and one sentence, and keeps the times.

    Raises:
      CannotServe: no kernels can serve it on this device.
      OSError: the cache directory cannot be written.
    """
    device = jax.devices()[0].device_kind
    with console.status("compiling, for about 40 seconds"):
        times = measure(block)
    console.print(table(block, device, times))
    console.out(sentence(times))
    forward = {found.tokens: found.forward for found in times}
    both = {found.tokens: found.both for found in times if found.both}
    path = keep(device, block, forward, both)
    console.out(f"kept: {path}")


def measure_model(name: str, text: Path, console: Console, *, everything: bool = False) -> None:
    """Times a model on a text, and prints a table and one sentence.

    Works after the `FIRST` are left out if `SECONDS` have passed, but for `everything`.

    Raises:
      CannotServe: there are no kernels for this device.
      ConfigError, CheckpointError, PretrainedError: there is no such model, or it is not whole.
      OSError: the text cannot be read.
    """
    start = time.monotonic()
    words = arguments.words_of(text)
    lm = language_model.load(name)
    if lm.model.quantised():
        raise ConfigError(
            f"{name}: its weights are 8-bit floats, whose training cannot be timed; name the model "
            "that was quantised"
        )
    model = whole_models.in_bfloat16(lm.model)
    like = jax.ShapeDtypeStruct(model.blocks.mlp.w_down.shape[1:], "bfloat16")
    _, why = dispatch.back_end(like)
    if why:
        raise CannotServe.because("twell_jax.measure", why)
    context = min(model.config.context, CONTEXT)
    tokens = np.resize(np.array(lm.encode(words), np.int32), (TOKENS // context, context + 1))
    union, listed = whole_models.needs(model, tokens)
    plan = GradientPlan.dense(len(union)).revised(union, listed, [0.0] * len(union))
    works = list(whole_models.works(model, tokens, plan.followed.ffn_gradients).items())
    with console.status("compiling, for about a minute"):
        found, too_large = whole_models.measure(dict(works[:FIRST]))
    if everything or time.monotonic() - start < SECONDS:
        with console.status("compiling the rest, for about a minute"):
            more = whole_models.measure(dict(works[FIRST:]))
        found, too_large = found + more[0], too_large + more[1]
    else:
        names = ", ".join(name for name, _ in works[FIRST:])
        why = f"as {time.monotonic() - start:.0f} s had passed"
        console.out(f"not measured, {why}: {names}; --all measures it")
    if too_large:
        names = ", ".join(too_large)
        console.out(f"not measured, as memory does not suffice: {names}")
    console.print(table_of_model(jax.devices()[0].device_kind, found))
    shares = ", ".join(f"{share:.0%}" for share in union)
    console.out(f"256 tokens use, of the neurons of each layer: {shares}")
    console.out(sentence_of_model(found))


def table_of_model(device: str, found: Sequence[Work]) -> Table:
    """All times, a line for each work."""
    shown = Table(title=f"{device}: milliseconds")
    for heading in ("work", "dense blocks", "by default", "gain"):
        shown.add_column(heading, justify="left" if heading == "work" else "right")
    for work in found:
        shown.add_row(work.name, _cell(work.dense_ms), _cell(work.ours_ms), f"{work.gain:.2f}x")
    return shown


def sentence_of_model(found: Sequence[Work]) -> str:
    """What kernels help with, and by how much."""
    parts = [f"{work.name} {work.gain:.1f}x" for work in found if work.gain >= 1.05]
    return f"Kernels help: {', '.join(parts)}." if parts else "Kernels do not help this model here."


def table(block: Block, device: str, times: Sequence[Times]) -> Table:
    """All times, a line for each number of tokens."""
    form = "gated" if block.gated else "without a gate"
    title = f"{device}: D {block.width}, H {block.neurons}, {form}, {block.dtype}, milliseconds"
    shown = Table(title=title)
    algorithms = list(dict.fromkeys(name for found in times for name in found.forward))
    both = [f"both passes, {kind}" for kind in ("dense", "sparse")]
    for heading in ("tokens", *algorithms, "gain", *both):
        shown.add_column(heading.replace("_", " "), justify="right")
    for found in times:
        cells = [_cell(found.forward.get(name)) for name in algorithms]
        gradients = [_cell(found.both.get(kind)) for kind in ("dense", "sparse")]
        shown.add_row(f"{found.tokens:,}", *cells, f"{found.gain:.2f}x", *gradients)
    return shown


def sentence(times: Sequence[Times]) -> str:
    """For how many tokens kernels help, and by how much."""
    parts = [f"{found.tokens:,} tokens {found.gain:.1f}x" for found in times if found.gain >= 1.05]
    for found in times:
        if found.both and (gain := found.both["dense"] / found.both["sparse"]) >= 1.05:
            parts.append(f"forward and backward of {found.tokens:,} {gain:.1f}x")
    return f"Kernels help: {', '.join(parts)}." if parts else "Kernels do not help this block here."


def _cell(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = arguments.command_line(__doc__)
    parser.add_argument("target", nargs="+", metavar="D H | MODEL", help="what to time")
    parser.add_argument("--text", type=arguments.path, help="a file in UTF-8 that the model reads")
    parser.add_argument("--no-gate", action="store_true", help="a block without a gate projection")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), help="of a block (default: bfloat16)"
    )
    parser.add_argument(
        "--all", action="store_true", help=f"all of a model, even if that takes over {SECONDS} s"
    )
    args = parser.parse_args(argv)
    if len(args.target) != (2 if args.text is None else 1):
        parser.error("give either D and H, or a model and --text FILE")
    of_block = args.no_gate or args.dtype
    if (of_block and args.text is not None) or (args.all and args.text is None):
        parser.error("--no-gate and --dtype are for a block, --all for a model")
    console = Console(highlight=False)
    try:
        with interrupt.at_once():
            compilation_cache.enable()
            if args.text is not None:
                measure_model(args.target[0], args.text, console, everything=args.all)
            else:
                measure_block(_block(parser, args), console)
    except CannotServe as error:
        sys.exit(f"error: {error.why}")
    except (ConfigError, CheckpointError, PretrainedError, OSError) as error:
        sys.exit(f"error: {error}")


def _block(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Block:
    """The block of the arguments; where widths are none, the command ends."""
    try:
        width, neurons = map(arguments.at_least(1), args.target)
    except argparse.ArgumentTypeError as error:
        parser.error(f"D and H: {error}")
    return Block(width, neurons, not args.no_gate, args.dtype or "bfloat16")


if __name__ == "__main__":
    main()
