"""benchmarks.soak_decoding: no row is wrong, and one with a lost neuron is."""

from dataclasses import replace

import pytest

from benchmarks import soak_decoding
from benchmarks.pages import TABLES
from pallas_kernels.kernels import REFERENCE

CASES = [
    replace(case, batch=3, changes=(*case.changes, ("d_ff", 256), ("vocab_size", 320)), share=0.1)
    for case in soak_decoding.CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:12:3], ids=lambda case: case.name)
def test_no_row_is_wrong(reference_kernels, case):
    (row,) = soak_decoding.soak([case], rows=1, seed=2)
    assert row["rows"] >= 3 and row["wrong"] == 0 and row["worst"] > 0.1
    assert f"| {row['worst']:.2f} |" in TABLES["soak_decoding"].render([row])


class Losing:
    """The reference, without what one neuron adds."""

    def __getattr__(self, name):
        return getattr(REFERENCE, name)

    def decode_layers(self, stream, layers, *operands, **options):
        mlp = replace(layers.mlp, down=layers.mlp.down.at[:, 7].set(0))
        return REFERENCE.decode_layers(stream, layers._replace(mlp=mlp), *operands, **options)


@pytest.mark.slow
def test_a_lost_neuron_is_found(serve):
    serve(Losing())
    (row,) = soak_decoding.soak(CASES[:1], rows=1, seed=2)
    assert row["wrong"] > 0
