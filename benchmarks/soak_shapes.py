"""Compares the block with dense ones in float64 for shapes that are drawn, too.

    python -m benchmarks.soak_shapes [--shapes 200] [--seed N] [--out DIRECTORY]

M, D and H are drawn among all that the kernels take, with a pattern of one of the families of
`benchmarks.soak`, which says when a row is wrong. Most time goes into lowering, on one core, so
four processes share the GPU: set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import itertools
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.soak import FAMILIES, FEW, TWELL, UNIONS, Case, Program, soak

KINDS = [  # options, the least and the most tokens
    (FEW, 1, 16),
    (FEW, 17, 64),
    (FEW, 65, 1023),  # by the dense block
    (TWELL, 65, 2048),
    (UNIONS, 65, 2048),
]


def drawn(number: int, seed: int) -> list[Program]:
    """So many programs, of each kind in turn."""
    rng, programs = np.random.default_rng(seed), []
    for options, least, most in itertools.islice(itertools.cycle(KINDS), number):
        m, d = int(rng.integers(least, most, endpoint=True)), 64 * int(rng.integers(2, 129))
        h = 128 * int(2 ** rng.uniform(0, math.log2(225)))  # up to 28,672
        case = Case(m, d, h, bool(rng.integers(2)), options)
        programs.append((case, str(rng.choice(list(FAMILIES)))))
    return programs


def checked(programs: tuple[Program, ...]) -> list[dict[str, Any]]:
    """A row of the record for each program."""
    return next(soak(list(programs), rows=1, seed=0))


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path, rows = record.new_path("soak_shapes", args.out), []
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(checked, itertools.batched(drawn(args.shapes, args.seed), 5)):
            rows += found
            record.write("soak_shapes", rows, path, seed=args.seed)
            print(f"{len(rows)} shapes, {sum(row['wrong'] for row in rows)} wrong rows", flush=True)
    print(path)


if __name__ == "__main__":
    main()
