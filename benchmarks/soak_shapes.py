"""Compares the block with dense ones in float64 for shapes that are drawn, too.

    python -m benchmarks.soak_shapes [--shapes 200] [--seed N] [--out DIRECTORY]

M, D and H are drawn among all that the kernels take, with a pattern of one of the families of
`benchmarks.soak`, which says when a row is wrong.
"""

import argparse
import itertools
import math
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.soak import FAMILIES, FEW, TWELL, UNIONS, Case, Program, soak

ASKED = FEW  # of 65 tokens and more: dense blocks
KINDS = [  # options, the least and the most tokens
    (FEW, 1, 16), (FEW, 17, 64), (ASKED, 65, 1023), (TWELL, 65, 2048), (UNIONS, 65, 2048),
]  # fmt: skip


def drawn(number: int, seed: int) -> list[Program]:
    """So many programs, of each kind in turn."""
    rng, programs = np.random.default_rng(seed), []
    for options, least, most in itertools.islice(itertools.cycle(KINDS), number):
        m, d = int(rng.integers(least, most, endpoint=True)), 64 * int(rng.integers(2, 129))
        h = 128 * int(2 ** rng.uniform(0, math.log2(225)))  # up to 28,672
        case = Case(m, d, h, bool(rng.integers(2)), options)
        programs.append((case, str(rng.choice(list(FAMILIES)))))
    return programs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows = next(soak(drawn(args.shapes, args.seed), 1, args.seed))
    path = record.new_path("soak_shapes", args.out)
    record.write("soak_shapes", rows, path, seed=args.seed)
    print(f"{len(rows)} shapes, {sum(row['wrong'] for row in rows)} wrong rows: {path}")


if __name__ == "__main__":
    main()
