import contextlib

import pytest

from pallas_kernels.hopper.common.primitives import interpreting


@pytest.fixture
def interpreted(capsys):
    """`with interpreted():` is `interpreting`; no race may be found, and all counters that thread
    blocks share must be 0 again."""

    @contextlib.contextmanager
    def run(sms=3, **options):
        with interpreting(sms=sms, **options) as interpretation:
            yield interpretation
        assert "RACE" not in capsys.readouterr().out
        assert not any(interpretation.counters.values())

    return run
