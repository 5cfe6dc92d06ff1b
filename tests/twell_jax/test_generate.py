import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twell_jax import config as config_lib
from twell_jax import generate as generation
from twell_jax import sharding
from twell_jax.checkpoint import Checkpoints
from twell_jax.config import ModelConfig
from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.generate import generate, sample
from twell_jax.model import Transformer
from twell_jax.run import RunPaths, load_run, open_run
from twell_jax.training import init_state

MODEL = {
    "vocab_size": 257,
    "context": 32,
    "d_model": 32,
    "layers": 2,
    "heads": 2,
    "d_ff": 64,
    "dtype": "float32",
    "init_scale": 0.3,
}


@pytest.fixture(scope="module")
def model():
    return Transformer(ModelConfig(**MODEL), rngs=nnx.Rngs(0))


def draws(logits, count, **options):
    keys = jax.random.split(jax.random.key(np.random.default_rng().integers(2**31)), count)
    return np.asarray(jax.vmap(lambda key: sample(logits, key, **options)[0])(keys))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}])
def test_the_narrowest_choice_is_the_most_likely_token(options):
    logits = jnp.asarray(np.random.default_rng().standard_normal((5, 40)), jnp.float32)
    tokens = sample(logits, jax.random.key(0), **options)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
    assert tokens.dtype == jnp.int32


def test_frequencies_follow_the_temperature():
    logits, temperature, count = jnp.array([[0.0, 1.0, 2.0, -1.0]]), 0.7, 20000
    frequencies = np.bincount(draws(logits, count, temperature=temperature), minlength=4) / count
    expected = np.exp(np.array([0, 1, 2, -1]) / temperature)
    expected /= expected.sum()
    assert np.all(np.abs(frequencies - expected) < 6 * np.sqrt(expected / count) + 1e-3)


def test_top_k_and_top_p_keep_just_the_likely_tokens():
    probability = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
    logits = jnp.log(jnp.asarray(probability))[None]
    assert set(draws(logits, 500, top_k=3)) == {1, 3, 2}
    assert set(draws(logits, 500, top_p=0.65)) == {1, 3}
    assert set(draws(logits, 500, top_p=0.75)) == {1, 3, 2}
    assert set(draws(logits, 500, top_p=0.75, top_k=2)) == {1, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sample(jnp.zeros((1, 4)), jax.random.key(0), **options)


def test_greedy_tokens_are_those_of_the_whole_forward_pass(model):
    prompt = np.random.default_rng().integers(0, 257, 7)
    tokens = list(generate(model, prompt, max_tokens=9, temperature=0.0))
    sequence = list(prompt)
    for token in tokens:
        logits, _ = model(jnp.asarray(sequence)[None])
        assert token == int(jnp.argmax(logits[0, -1]))
        sequence.append(token)
    assert len(tokens) == 9


def test_a_seed_decides_and_a_stop_token_ends(model):
    prompt = np.arange(5)
    first = list(generate(model, prompt, max_tokens=12, seed=3))
    assert first == list(generate(model, prompt, max_tokens=12, seed=3))
    assert first != list(generate(model, prompt, max_tokens=12, seed=4))
    stop = first[5]
    ended = list(generate(model, prompt, max_tokens=12, seed=3, stop_id=stop))
    assert ended == first[: first.index(stop)]


@pytest.fixture
def run_dir(tmp_path):
    config = config_lib.from_dict(
        {
            "run_dir": str(tmp_path / "run"),
            "steps": 1,
            "batch_tokens": 32,
            "micro_batch": 1,
            "model": MODEL,
        }
    )
    paths = open_run(config)
    tokenizers.save(ByteTokenizer(), paths.tokenizer)
    return config, paths


def save_checkpoint(config, paths):
    with jax.set_mesh(sharding.make_mesh(config.mesh, jax.devices()[:1])):
        state = init_state(config)
    with Checkpoints(paths.checkpoints, keep=1) as checkpoints:
        checkpoints.save(0, state, {})
    return state


def test_a_run_is_loaded_and_continued_from_the_command_line(run_dir, monkeypatch, capsys):
    config, paths = run_dir
    state = save_checkpoint(config, paths)
    loaded_config, tokenizer, model = load_run(str(paths.directory))
    assert loaded_config == config and tokenizer == ByteTokenizer()
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)

    arguments = ["generate", str(paths.directory), "--prompt", "def ", "--max-tokens", "8"]
    printed = []
    for _ in range(2):
        monkeypatch.setattr("sys.argv", [*arguments, "--top-k", "20", "--seed", "1"])
        generation.main()
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("def ") and len(printed[0]) > 5
    assert printed[0] == printed[1]
    monkeypatch.setattr("sys.argv", [*arguments[:3], "", *arguments[4:]])
    generation.main()  # an empty prompt continues the end of a text
    assert capsys.readouterr().out


@pytest.mark.parametrize("state", ["no run", "no checkpoint"])
def test_what_is_no_run_is_one_clear_line(run_dir, state, monkeypatch):
    _, paths = run_dir
    directory = paths.directory if state == "no checkpoint" else RunPaths("nowhere").directory
    monkeypatch.setattr("sys.argv", ["generate", str(directory), "--prompt", "x"])
    message = "has no checkpoint yet" if state == "no checkpoint" else "not the directory of a run"
    with pytest.raises(SystemExit, match=message):
        generation.main()
