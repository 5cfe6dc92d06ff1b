"""The pages of `benchmarks.soak`, `soak_decoding` and `soak_shapes`."""

from benchmarks.tables import Row, Table, block, grouped, number, yes
from pallas_kernels.kernels import MAX_FEW_TOKENS


def _over_patterns(rows: list[Row]) -> list[Row]:
    """Of the soak: one row for all patterns of a shape and block, with the worst of them."""
    groups = grouped(rows, lambda row: (row["m"], row["d"], row["h"], row["gated"], block(row)))
    return [_sum_and_worst(group) for group in groups]


def _over_shapes(rows: list[Row]) -> list[Row]:
    """Of the soak of shapes: one row for all of a kind, with the worst of them."""

    def tokens(row: Row) -> str:
        if row["m"] > MAX_FEW_TOKENS:
            return f"more than {MAX_FEW_TOKENS}"
        return "1 to 16" if row["m"] <= 16 else f"17 to {MAX_FEW_TOKENS}"

    groups = grouped(rows, lambda row: (tokens(row), row["gated"], block(row)))
    return [
        {**_sum_and_worst(group), "tokens": tokens(group[0]), "shapes": len(group)}
        for group in groups
    ]


def _sum_and_worst(group: list[Row]) -> Row:
    """All rows of a soak as one: their numbers, and the rest of the one with the largest error."""
    sums = {name: sum(row[name] for row in group) for name in ("rows", "wrong")}
    return {**max(group, key=lambda row: row["worst"]), **sums}


PATTERNS = Table(
    title="Random rows, each against the dense block",
    about="A call draws its pattern from one of ten families. The rows are those of y and, "
    "where gradients are sparse, also of all gradients. A row is wrong if its error is larger "
    'than rounding explains; "largest error" is in multiples of what is allowed, and was that '
    'of a call with the "worst pattern".',
    case={
        "M x D x H": lambda row: f"{row['m']} x {row['d']} x {row['h']}",
        "gated": yes("gated"),
        "block": block,
    },
    results={
        "rows": number("rows", "{:,}"),
        "wrong": number("wrong", "{:,}"),
        "largest error": number("worst", "{:.2f}"),
        "worst pattern": number("family"),
    },
    lines=_over_patterns,
)
DECODING = Table(
    title="Steps of decoding, each sequence against float32",
    about="Models of two layers with d_model 1024 and d_ff 2816 where no other is named, and heads "
    "of 64 features; a step appends a token to sequences of random length, with random caches. "
    "Most neurons are active for a seventh of the tokens. A row is the logits of a sequence. It is "
    "wrong if its error is larger than twice that of XLA in bfloat16 (in 8 bits four times), the "
    'largest of the step; the "largest error" is in multiples of what is allowed.',
    case={
        "model": number("model"),
        "sequences": number("batch"),
        "active": number("active", "{:.0%}"),
    },
    results={
        "rows": number("rows", "{:,}"),
        "wrong": number("wrong", "{:,}"),
        "largest error": number("worst", "{:.2f}"),
    },
)
SHAPES = Table(
    title="Random shapes, each row against the dense block in float64",
    about="M, D (128 to 8192) and H (128 to 28,672) are drawn, and a pattern as for the soak, "
    "which says when a row is wrong. A line is all shapes of a kind; those that were "
    "drawn are in the record.",
    case={"tokens": number("tokens"), "gated": yes("gated"), "block": block},
    results={
        "shapes": number("shapes"),
        "rows": number("rows", "{:,}"),
        "wrong": number("wrong", "{:,}"),
        "largest error": number("worst", "{:.2f}"),
        "of M x D x H": lambda row: f"{row['m']} x {row['d']} x {row['h']}",
    },
    lines=_over_shapes,
)
