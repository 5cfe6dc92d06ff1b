import contextlib

import jax
import pytest

from pallas_kernels.hopper.common.primitives import interpreting

_LEAST = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def interpreted(capsys):
    """`with interpreted():` is `interpreting`; no race may be found, and all counters that thread
    blocks share must be 0 again.

    Threads of the interpreter compile at the same time. If one stores its program meanwhile, XLA
    can crash (seen with jaxlib 0.12.0), so they store none.
    """

    @contextlib.contextmanager
    def run(sms=3, **options):
        before = getattr(jax.config, _LEAST)
        jax.config.update(_LEAST, 1e9)
        try:
            with interpreting(sms=sms, **options) as interpretation:
                yield interpretation
        finally:
            jax.config.update(_LEAST, before)
        assert "RACE" not in capsys.readouterr().out
        assert not any(interpretation.counters.values())

    return run
