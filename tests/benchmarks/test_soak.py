"""benchmarks.soak: no row is wrong, and each kind of wrong row is found."""

import itertools
import os

import jax
import jax.numpy as jnp
import pytest

from benchmarks import record, soak, soak_shapes
from benchmarks.pages import TABLES
from benchmarks.tables import block

pytestmark = pytest.mark.usefixtures("reference_kernels")

NAME = "TWELL_JAX_BACK_END"
FEW = soak.Case(33, 128, 256, True, soak.FEW)
UNIONS = soak.Case(301, 128, 256, True, soak.UNIONS)
EXTRAS = [
    soak.Case(33, 128, 256, True, soak.FEW, "8 bits"),
    soak.Case(33, 128, 256, True, soak.FEW, "live"),
    soak.Case(301, 128, 256, True, soak.FORWARD, "8 bits"),
    soak.Case(301, 128, 256, True, soak.FORWARD, "residual"),
    soak.Case(301, 128, 256, True, soak.UNIONS, "live"),
]


@pytest.mark.slow
def test_no_row_is_wrong_in_any_family():
    (rows,) = soak.soak(list(itertools.product([FEW, UNIONS], soak.FAMILIES)), rows=1, seed=3)
    assert {row["family"] for row in rows} == set(soak.FAMILIES)
    assert {block(row) for row in rows} == {"mosaic", "unions, sparse"}
    results = UNIONS.m, UNIONS.m, 3 * UNIONS.h  # y, dx and the gradients of the weights
    assert {row["rows"] for row in rows if row["m"] == UNIONS.m} == {sum(results)}
    assert not any(row["wrong"] for row in rows)
    assert max(row["worst"] for row in rows) > 0.1
    shared, _, *lines = TABLES["soak"].render(rows).splitlines()
    assert shared == "All lines: gated yes." and len(lines) == 2 + 2  # one for all families
    found = [row for row in rows if row["m"] == UNIONS.m]
    worst = max(found, key=lambda row: row["worst"])
    assert lines[-1] == (
        f"| 301 x 128 x 256 | unions, sparse | {sum(row['rows'] for row in found):,} | 0 | "
        f"{worst['worst']:.2f} | {worst['family']} |"
    )
    found[0]["wrong"] = 3
    assert " | 3 | " in TABLES["soak"].render(rows).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("case", EXTRAS, ids=lambda case: f"{block(vars(case))}, {case.m}")
def test_no_row_is_wrong_with_what_blocks_have_besides(case):
    (rows,) = soak.soak([(case, family) for family in soak.FAMILIES], rows=1, seed=3)
    assert not any(row["wrong"] for row in rows)
    assert max(row["worst"] for row in rows) > 0.1


@pytest.fixture(scope="module")
def results():
    @jax.jit
    def compute(key):
        pattern = soak.FAMILIES["uniform, 12 %"](None, UNIONS.m, UNIONS.h)
        exact = soak.dense(UNIONS, *soak.draw(key, UNIONS, pattern))
        return [rows.value.astype(jnp.bfloat16) for rows in exact], exact

    with jax.enable_x64(True):
        return compute(jax.random.key(1))


@pytest.mark.parametrize(
    ("result", "spoil", "wrong"),
    [
        (0, lambda y: y, 0),
        (0, lambda y: y.at[5].set(0), 1),
        (0, lambda y: y.at[7].multiply(1.03), 1),
        (1, lambda dx: dx.at[0].set(dx[1]), 1),
        (3, lambda dw: dw.at[200].set(jnp.nan), 1),
    ],
    ids=["right", "lost", "scaled", "another", "NaN"],
)
def test_a_wrong_row_is_found(results, result, spoil, wrong):
    outs, exact = results
    spoiled = [spoil(out) if i == result else out for i, out in enumerate(outs)]
    with jax.enable_x64(True):
        assert exact[0].value.dtype == jnp.float64
        assert jax.jit(soak.compare)(spoiled, exact)["wrong"] == wrong


def test_shapes_are_drawn_among_all_that_kernels_take():
    programs = soak_shapes.drawn(200, seed=0)
    assert programs == soak_shapes.drawn(200, seed=0) != soak_shapes.drawn(200, seed=1)
    cases, families = zip(*programs, strict=True)
    assert len({case.d for case in cases}) > 80
    assert all(case.d % 64 == 0 and case.h % 128 == 0 for case in cases)
    assert max(case.h for case in cases) > 16384 and set(families) == set(soak.FAMILIES)
    assert {case.m > 64 for case in cases} == {case.gated for case in cases} == {True, False}


def test_the_page_of_shapes_has_a_line_for_each_kind():
    row = {"family": "skewed", "m": 3, "d": 192, "h": 256, "gated": True}
    row |= {"implementation": "mosaic", "rows": 3, "wrong": 0, "worst": 0.5}
    worse = row | {"m": 5, "d": 320, "rows": 5, "wrong": 1, "worst": 1.5}
    lines = TABLES["soak_shapes"].render([row, worse, row | {"m": 100}]).splitlines()
    assert "| 1 to 16 | 2 | 8 | 1 | 1.50 | 5 x 320 x 256 |" in lines
    assert "| more than 64 | 1 | 3 | 0 | 0.50 | 100 x 192 x 256 |" in lines


def test_a_forced_back_end_is_in_the_records_name(monkeypatch):
    monkeypatch.setenv(NAME, "Hopper")  # and what it was comes back
    assert record.force(None, "soak") == "soak" and os.environ[NAME] == "Hopper"
    assert record.force("Ampere", "soak") == "soak-ampere" and os.environ[NAME] == "Ampere"
