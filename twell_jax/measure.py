"""Times a feed-forward block on this GPU: python -m twell_jax.measure D H

Dense XLA is compared with each algorithm of the kernels, for few tokens, prompts and many, and
dense gradients with sparse ones. The weights are random; 0.5 % of the neurons are active for a
token. The answer is kept in the user's cache directory (TWELL_JAX_CACHE names another), where
`sparse_ffn` finds it: blocks of these widths are then computed by what was the fastest on this GPU.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from twell_jax.analysis.blocks import Times, measure
from twell_jax.ffn import CannotServe
from twell_jax.ffn.measured import Block, keep
from twell_jax.inference import arguments
from twell_jax.train import interrupt, utf8


def measure_block(block: Block, console: Console) -> None:
    """Times a block, prints a table and one sentence, and keeps the times.

    Raises:
      CannotServe: no kernels can serve it on this device.
      OSError: the cache directory cannot be written.
    """
    device = jax.devices()[0].device_kind
    times = []
    for found in measure(block):
        times.append(found)
        console.out(f"{found.tokens} tokens: {found.fastest}, {found.gain:.2f}x", highlight=False)
    console.print(table(block, device, times))
    console.out(sentence(times), highlight=False)
    path = keep(device, block, {found.tokens: found.forward for found in times})
    console.out(f"kept: {path}", highlight=False)


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("width", metavar="D", type=arguments.at_least(1), help="d_model")
    parser.add_argument("neurons", metavar="H", type=arguments.at_least(1), help="d_ff")
    parser.add_argument("--no-gate", action="store_true", help="a block without a gate projection")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="(%(default)s)"
    )
    args = parser.parse_args(argv)
    block = Block(args.width, args.neurons, not args.no_gate, args.dtype)
    try:
        with interrupt.at_once():
            measure_block(block, Console())
    except (CannotServe, OSError) as error:
        sys.exit(f"error: {error.why if isinstance(error, CannotServe) else error}")


if __name__ == "__main__":
    main()
