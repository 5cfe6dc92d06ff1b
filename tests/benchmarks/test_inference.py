import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import calls, fp8_models, inference
from benchmarks.pages import TABLES
from tests import seeds
from tests.errors import relative_error
from twell_jax import SparseMLP
from twell_jax import config as config_lib
from twell_jax.analysis import timing
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.ffn import quantise_mlps
from twell_jax.inference import generation
from twell_jax.models import Transformer, graphdef
from twell_jax.models.pretrained import save_pretrained

generated = inference.generated  # `small` puts others in their place
random = functools.cache(inference.random)  # the model that `small` describes is drawn once


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """A model, batches and a clock that a CPU can do."""
    (tmp_path / "2b.yaml").write_text(
        "{run_dir: x, steps: 1, batch_tokens: 64, micro_batch: 1, model: {vocab_size: 300, "
        "context: 64, d_model: 256, layers: 3, heads: 4, d_ff: 512}}"
    )
    monkeypatch.setattr(inference, "CONFIGS", tmp_path)
    monkeypatch.setattr(inference, "BATCH", 2)
    monkeypatch.setattr(inference, "CONTEXT", 32)
    monkeypatch.setattr(inference, "DECODE_BATCHES", (1, 2))
    monkeypatch.setattr(inference, "PROMPT", 8)
    monkeypatch.setattr(inference, "CAPACITY", 16)
    monkeypatch.setattr(inference, "random", random)
    monkeypatch.setattr(inference, "torch_decoder", None)
    monkeypatch.setattr(inference, "generated", lambda model, tokens, sampling: 450.0)
    monkeypatch.setattr(timing, "milliseconds", lambda f, calls: (f(), 2.0)[1])
    energy = iter(range(0, 1000, 5))
    monkeypatch.setattr(calls, "joules", lambda: next(energy))
    monkeypatch.setattr(calls, "ENERGY_SECONDS", 0.01)
    monkeypatch.setattr(calls, "_seconds", lambda call, count: (call.run(), 2e-3 * count)[1])


def test_a_call_is_timed_right_after_it_has_run_for_its_energy(monkeypatch):
    events = []
    monkeypatch.setattr(calls, "joules", lambda: events.append("joules") or 0.0)

    def clock(f, calls):
        events.append("time")
        return 2.0

    call = calls.Call(lambda: events.append("run") or np.zeros(1), 1, 0, np.asarray, clock)
    calls.measure(call)
    assert events[-4:] == ["joules", "run", "joules", "time"]


@pytest.mark.slow
def test_a_record_of_all_directions(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["inference", "--shapes", "2b", "--out", str(tmp_path)])
    inference.main()
    (path,) = tmp_path.glob("inference-*.json")
    rows = json.loads(path.read_text())["rows"]
    found = [(row["direction"], row["batch"], row["implementation"]) for row in rows]
    sizes = [("forward", 2), *((d, b) for d in ("prefill", "decode") for b in (1, 2))]
    decoding = *fp8_models.SPARSE, *fp8_models.CACHED
    in_8_bits = {"forward": fp8_models.VARIANTS, "prefill": (), "decode": decoding}
    dense_fp8, *_ = fp8_models.VARIANTS
    assert found == [
        (*size, name) for size in sizes for name in (*inference.VARIANTS, *in_8_bits[size[0]])
    ]
    for row in rows:
        if row["implementation"] == dense_fp8:
            assert "has no __cublas$lt$matmul$f8" in row["failed"]
            continue
        if row["implementation"].startswith("mosaic"):
            assert "RTX Blackwell GPU, got cpu" in row["failed"] and "speedup" not in row
            continue
        tokens = row["batch"] * {"forward": 32, "prefill": 8, "decode": 1}[row["direction"]]
        assert row["tokens_per_second"] == tokens / 2e-3
        assert row["joules_per_token"] == 5 / (5 * tokens)  # 5 calls of 2 ms fill 10 ms
        assert (row["speedup"], row["energy"], row["baseline"]) == (1, 1, "xla, silu")
        assert row.get("generate_greedy") == (450 if row["direction"] == "decode" else None)
    shared, _, *lines = TABLES["inference"].render(rows).splitlines()
    assert shared.startswith("All lines: model 2b")
    assert len(lines) == 2 + len(rows)
    *_, name, results = lines[-1].partition("fp8 all but down, and cache |")
    assert name and set(results.split(" | ")) == {" -", "-", "- |"}
    assert "| xla, relu | 2.000 | 1,000 | 45% | " in lines[-6]
    assert "| forward | 2 x 32 | xla, silu | 2.000 | 32,000 | " in lines[2]


@pytest.mark.parametrize(
    "direction",
    [pytest.param(d, marks=pytest.mark.slow) for d in ("forward", "prefill", "decode")],
)
def test_errors_are_those_against_the_dense_model_with_the_same_function(direction, monkeypatch):
    monkeypatch.setattr(inference, "DECODE_BATCHES", (2,))
    for names in ("VARIANTS", "CACHED"):
        monkeypatch.setattr(fp8_models, names, {})
    xla = {"ffn_implementation": "xla"}  # as if by kernels
    for activation in ("relu", "silu"):
        changes = xla | {"activation": activation}
        monkeypatch.setitem(inference.VARIANTS, f"mosaic, {activation}", changes)
    monkeypatch.setitem(inference.VARIANTS, "wrong, silu", xla | {"activation": "relu"})
    rows = inference.DIRECTIONS[direction](*inference.random("2b"))
    names = ("error", "logits_error") if direction == "forward" else ("error",)
    rows = {row["implementation"]: row for row in rows if "error" in row}
    assert rows.keys() == {"mosaic, relu", "mosaic, silu", "wrong, silu"}
    for name in names:
        assert rows["mosaic, relu"][name] == rows["mosaic, silu"][name] == 0
        assert rows["wrong, silu"][name] > 0


@pytest.mark.slow
def test_models_with_8_bit_weights_are_scored(monkeypatch):
    eight_bits = {name.replace("mosaic", "xla"): f for name, f in fp8_models.VARIANTS.items()}
    monkeypatch.setattr(fp8_models, "VARIANTS", eight_bits)
    dense, *sparse = eight_bits
    monkeypatch.setattr(fp8_models, "SPARSE", sparse)
    monkeypatch.setattr(fp8_models, "details", lambda *_: {"fp8_matmuls": 5})  # no cuBLASLt here
    monkeypatch.setattr(inference, "VARIANTS", {n: inference.VARIANTS[n] for n in inference.DENSE})
    config, params, tokens = inference.random("2b")
    before = jax.tree.map(np.asarray, params)
    rows = {row["implementation"]: row for row in inference.forward(config, params, tokens)}
    assert list(rows) == [*inference.DENSE, *eight_bits]
    for name in eight_bits:
        assert "failed" not in rows[name]
        assert 1e-4 < rows[name]["error"] < 0.1 and 1e-3 < rows[name]["logits_error"] < 0.1
        assert rows[name]["fp8_matmuls"] == 5
        assert rows[name].get("twin_error") == (None if name == dense else 0)
    for name in inference.DENSE:
        assert 1e-5 < rows[name]["float32_error"] < rows[sparse[0]]["float32_error"]
        assert 1e-4 < rows[name]["float32_logits_error"] < rows[sparse[0]]["float32_logits_error"]
    errors = [rows[name]["logits_error"] for name in eight_bits]
    assert errors[1] < min(errors[0], errors[2])  # gate and up alone
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_the_dense_fp8_block_is_that_of_the_quantised_weights():
    mlp = SparseMLP(40, 72, dtype=jnp.float32, rngs=nnx.Rngs(seeds.integer()))
    x = jnp.asarray(seeds.rng().standard_normal((3, 5, 40)), jnp.float32)
    y, stats = jax.jit(functools.partial(fp8_models.DenseBlock(mlp), return_stats=True))(x)
    quantise_mlps(mlp, ("gate", "up", "down"))
    # An h that lies at the middle of two 8-bit floats may go to the other one.
    assert y.shape == x.shape and relative_error(y, jax.jit(mlp)(x)) < 0.01
    assert stats.fired.shape == (72,)


@pytest.mark.slow
def test_generation_is_measured_around_the_cache_of_the_step(monkeypatch):
    monkeypatch.setattr(inference, "PROMPT", 80)
    monkeypatch.setattr(inference, "CAPACITY", 128)
    monkeypatch.setattr(inference, "GENERATED", 32)
    config, params, _ = inference.random("2b")
    config = config.model_copy(update=inference.VARIANTS["xla, relu"])
    generations, model = [], nnx.merge(graphdef(config), params)

    def generate(model, prompts, **options):
        generations.append([])
        capacity = generation.cache_capacity(prompts.shape[1], options["max_tokens"])
        assert (prompts.shape, capacity) == ((2, 64), inference.CAPACITY)
        for tokens in inference_generate(model, prompts, **options):
            generations[-1].append(tokens)
            yield tokens

    inference_generate = inference.generate
    monkeypatch.setattr(inference, "generate", generate)
    rate = generated(model, np.ones((2, 129), np.int32), inference.SAMPLED)
    assert [len(steps) for steps in generations] == [2, 33, 33, 33] and rate > 0


@pytest.mark.slow
def test_what_kernels_decode_is_also_generated_by_sampling(monkeypatch):
    monkeypatch.setattr(inference, "DECODE_BATCHES", (2,))
    monkeypatch.setitem(inference.VARIANTS, "mosaic, relu", inference.VARIANTS["xla, relu"])
    rows = {row["implementation"]: row for row in inference.decode(*inference.random("2b"))}
    ours = rows.pop("mosaic, relu")
    assert ours["generate_greedy"] == ours["generate_sampled"] == 450
    assert not any("generate_sampled" in row for row in rows.values())


def decoder_in_place_of_torch():
    """As `benchmarks.torch_decoder`; every call takes 1 ms and finds what ours finds."""

    def prepare(model, tokens, start, before):
        silu = model.config.model_copy(update=inference.VARIANTS["xla, silu"])
        graph, params = graphdef(silu), nnx.state(model)

        def run():
            cache = inference.replace(before, lengths=jnp.full(len(tokens), start, jnp.int32))
            return jax.jit(lambda *operands: nnx.merge(graph, params).decode(*operands)[0])(
                jnp.asarray(tokens), cache
            )

        return run, 5

    return SimpleNamespace(
        prepare=prepare, has_cuda=lambda: True, wait=np.asarray, milliseconds=lambda f, calls: 1.0
    )


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["prefill", "decode"])
def test_torch_has_a_row_where_it_is_installed(direction, monkeypatch):
    monkeypatch.setattr(inference, "DECODE_BATCHES", (2,))
    monkeypatch.setattr(inference, "torch_decoder", decoder_in_place_of_torch())
    *_, row = inference.DIRECTIONS[direction](*inference.random("2b"))
    found = {key: row[key] for key in ("implementation", "ms", "peak_bytes", "baseline", "speedup")}
    assert found == {
        "implementation": "torch, silu", "ms": 1, "peak_bytes": 5, "baseline": "xla, silu",
        "speedup": 2,
    }  # fmt: skip
    assert row["error"] < 0.02
    monkeypatch.setattr(inference.torch_decoder, "has_cuda", lambda: False)
    rows = inference.DIRECTIONS[direction](*inference.random("2b"))
    assert "torch, silu" not in [row["implementation"] for row in rows]


@pytest.mark.slow
def test_random_weights_fire_as_stated():
    config, _, tokens = inference.random("2b")
    assert tokens.shape == (2, 33) and (tokens[:, 0] == 0).all()
    wanted = np.array([30.0, 8.0, 70.0])
    params = inference.with_pattern(config, wanted, inference.jax.random.key(5))
    found = inference.pattern(config, params, tokens[:, 1:])  # without the first tokens
    np.testing.assert_allclose(found["nnz_by_layer"], wanted, rtol=0.35)
    assert inference.pattern(config, params, tokens)["nnz_first_token"] > 0.4 * config.d_ff


@pytest.mark.slow
def test_the_batch_is_halved_until_it_fits(monkeypatch):
    tried = []

    def compare(config, prepare, others, more_errors):
        tried.append(prepare.__defaults__[1].shape[0])
        if tried[-1] > 1:
            raise inference.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return [{"ms": 1.0}]

    monkeypatch.setattr(inference, "compare", compare)
    (row,) = inference.forward(*inference.random("2b"))
    assert tried == [2, 1] and row["batch"] == 1


def test_a_checkpoint_reads_a_text(tmp_path):
    config = config_lib.load(inference.CONFIGS / "2b.yaml").model
    save_pretrained(tmp_path / "m", Transformer(config, rngs=nnx.Rngs(0)), ByteTokenizer())
    text = tmp_path / "text.txt"
    text.write_text("some text. " * 3)
    loaded, _, tokens = inference.from_checkpoint(str(tmp_path / "m"), text)
    assert (loaded.d_ff, tokens.shape) == (512, (2, 33))
    assert (tokens[:, 0] == 256).all() and bytes(tokens[0, 1:12].tolist()) == b"some text. "
