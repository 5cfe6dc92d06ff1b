"""The speed and energy of a run: by hand, and with a GPU's name and counters in their place."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from twell_jax import config
from twell_jax.train import metrics, pace
from twell_jax.train.gradient_plan import GradientPlan
from twell_jax.train.state import StepMetrics


@dataclass(frozen=True)
class Device:
    device_kind: str
    platform: str
    local_hardware_id: int


def devices(monkeypatch, kind, count, local=None, platform="gpu"):
    """JAX has `count` devices, of which this process has the local ones, by their numbers."""
    pace._gpus.cache_clear()
    made = [Device(kind, platform, place) for place in (local or range(count))]
    monkeypatch.setattr(jax, "devices", lambda: made)
    monkeypatch.setattr(jax, "local_devices", lambda: made)
    monkeypatch.setattr(jax, "device_count", lambda: count)
    monkeypatch.setattr(jax, "local_device_count", lambda: len(made))


def test_utilisation_is_the_dense_models_share_of_the_peak(monkeypatch):
    # 3928 parameters and attention to 8 tokens on average, as in test_roofline: 25872 FLOPs a token
    changes = ["model.layers=3", "model.d_model=8", "model.heads=2", "model.d_ff=32",
               "model.vocab_size=100", "model.context=16", "union_target=null"]  # fmt: skip
    model = config.load("configs/2b.yaml", changes).model
    devices(monkeypatch, "NVIDIA H200", 8, local=range(4))  # the rate is that of all processes
    expected = 1e9 * 25872 / (8 * 989e12)
    assert pace.flops_utilisation(model, 1e9) == pytest.approx(expected)
    assert pace.flops_utilisation(model, 0.0) is None  # not measured yet
    single = model.model_copy(update={"dtype": "float32"})
    assert pace.flops_utilisation(single, 1e9) is None
    devices(monkeypatch, "cpu", 2)
    assert pace.flops_utilisation(model, 1e9) is None


def test_energy_is_that_of_this_processs_gpus(monkeypatch):
    class NVMLError(Exception):
        pass

    def no_driver():
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetTotalEnergyConsumption={"gpu 1": 1500, "gpu 3": 500, "GPU-ab": 20}.get,
    )
    monkeypatch.setattr(pace, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices(monkeypatch, "NVIDIA H100 80GB HBM3", 8, local=[1, 3])
    assert pace.joules() == 2.0
    assert pace.joules(jax.local_devices()[:1]) == 1.5
    assert pace.joules_per_token(2.0, 100) == 0.08  # the other six used as much each
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-ab")
    devices(monkeypatch, "NVIDIA H100 80GB HBM3", 2)
    assert pace.joules() == 0.52
    devices(monkeypatch, "cpu", 2, platform="cpu")
    assert pace.joules() is None
    devices(monkeypatch, "NVIDIA H100 80GB HBM3", 2)
    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    assert pace.joules() is None
    monkeypatch.setattr(pace, "pynvml", None)
    assert pace.joules() is None
    pace._gpus.cache_clear()


@pytest.mark.parametrize("counted", [True, False])
def test_records_have_energy_and_utilisation_where_they_are_known(tmp_path, monkeypatch, counted):
    now = {"s": 0.0}
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now["s"])
    # 300 W all the time; what evaluation uses does not count.
    monkeypatch.setattr(pace, "joules", lambda: 300 * now["s"] if counted else None)
    settings = config.load("tiny", ["log_every=2", "batch_tokens=1024"])
    ones, path = jnp.ones(4), tmp_path / "metrics.jsonl"
    of_layers = dict.fromkeys(("nnz", "max_nnz", "dead", "overflow", "mean_union"), ones)
    measured = StepMetrics(*[ones[0]] * 5, **of_layers)
    with metrics.Log(path, 0, ["tensorboard"]) as log:
        recorder = metrics.Recorder(settings, log, lambda record, logged: None, None)
        for step in range(1, 7):
            now["s"] += 60 if step == 1 else 2
            recorder.add(step, measured, GradientPlan.dense(4))
            recorder.flush()
            if step == 4:
                recorder.add_evaluation(step, 1.0, 2.0)
                now["s"] += 100
    steps = [record for record in metrics.read(path) if "ce" in record]
    assert [record["joules_per_token"] for record in steps] == 3 * [600 / 1024 if counted else None]
    assert [record["flops_utilisation"] for record in steps] == 3 * [None]  # on a CPU


@pytest.mark.parametrize(
    ("last", "seconds", "joules"),
    [
        (None, 7.0, 4200.0),
        ({"step": 3, "seconds": 90.0, "joules": 1000.0}, 97.0, 5200.0),
        ({"step": 3, "seconds": 90.0, "joules": None}, 97.0, None),  # begun without a counter
        ({"step": 3}, None, None),  # by a version that did not count
    ],
)
def test_totals_go_on_from_the_last_record(monkeypatch, last, seconds, joules):
    now = {"s": 50.0}
    monkeypatch.setattr(pace.time, "monotonic", lambda: now["s"])
    monkeypatch.setattr(pace, "joules", lambda: 300 * now["s"])
    devices(monkeypatch, "NVIDIA H200", 8, local=range(4))  # half of the devices
    meter = pace.Meter(last)
    now["s"] += 7
    assert meter.totals() == {"seconds": seconds, "joules": joules}


def steps(*rows):
    """Records of steps from their tokens per second and numbers of sparse layers, of four."""
    return [
        {
            "tokens_per_second": rate,
            "nnz": [1] * 4,
            "sparse_gradients": [n < sparse for n in range(4)],
        }
        for rate, sparse in rows
    ]


def test_the_end_is_compared_with_the_dense_start():
    log = steps((0, 0), (990, 0), (1000, 0), (1010, 0), (1100, 2), (1390, 3), (1400, 3), (1500, 3))
    assert pace.against_dense_start(log) == (
        "1,400 tokens/s with sparse gradients in 3 of 4 layers: 1.40 times the 1,000 of the dense "
        "start, which may have been timed beside a compilation"
    )


@pytest.mark.parametrize(
    "log",
    [
        steps((1000, 0), (1000, 0)),
        steps((1000, 0), (1000, 2), (1000, 0)),  # dense again
        steps((0, 0), (1200, 2)),  # the start was not measured
        [{"tokens_per_second": 1000, "nnz": [1] * 4}],  # without a plan
    ],
)
def test_without_a_dense_start_and_a_sparse_end_nothing_is_claimed(log):
    assert pace.against_dense_start(log) is None
