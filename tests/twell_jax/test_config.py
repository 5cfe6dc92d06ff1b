"""Configuration: what is wrong is named in one line, and what is right survives a round trip."""

import jax
import pytest
import yaml

from tests.twell_jax.configs import CONFIGS, DECIDED, VALID
from twell_jax import config
from twell_jax.config import Config, ConfigError, MeshConfig
from twell_jax.models import sharding


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        # unknown keys, with a suggestion where one is close
        ("stepz=3", "stepz", "unknown key; did you mean steps?"),
        ("modle.d_model=3", "modle", "unknown key; did you mean model?"),
        ("model.d_modle=3", "model.d_modle", "unknown key; did you mean d_model?"),
        ("optimizer.zzz=3", "optimizer.zzz", "allowed: lr, warmup_steps"),
        ("model.d_model.x=3", "model.d_model.x", "single value"),
        ("base=tiny.yaml", "base", "unknown key"),
        # wrong types
        ("steps=ten", "steps", "integer"),
        ("steps=1.5", "steps", "integer"),
        ("steps=true", "steps", "true or false"),
        ("steps=", "steps", "integer"),
        ("optimizer.lr=fast", "optimizer.lr", "number"),
        ("optimizer.lr=yes", "optimizer.lr", "true or false"),
        ("optimizer.lr=.nan", "optimizer.lr", "finite"),
        ("tensorboard=maybe", "tensorboard", "boolean"),
        ("run_dir=", "run_dir", "string, got None"),
        ("model=3", "model", "dictionary"),
        ("data.paths=[1]", "data.paths.0", "string"),
        ("l1_warmup=[1]", "l1_warmup.1", "required"),
        ("l1_warmup=3", "l1_warmup", "valid list, got 3"),
        ("data.paths=a.txt", "data.paths", "source=stdlib does not use it"),
        # values outside of what is allowed
        ("steps=0", "steps", "greater than 0"),
        ("optimizer.b2=1", "optimizer.b2", "less than 1"),
        ("l1_coefficient=-1", "l1_coefficient", "greater than or equal to 0"),
        ("sparsity_target=0", "sparsity_target", "greater than or equal to 0.01"),
        ("sparsity_target=64", "sparsity_target", "less than model.d_ff=64, got 64"),
        ("union_target=0", "union_target", "greater than 0"),
        ("union_target=1", "union_target", "less than 1"),
        ("model.dtype=float64", "model.dtype", "'bfloat16' or 'float32'"),
        ("model.activation=gelu", "model.activation", "'relu', 'relu2', 'fatrelu', 'drelu' or "),
        ("model.activation=fatrelu", "model.activation", "needs a threshold above 0"),
        ("model.activation_threshold=0.1", "model.activation", "'relu' has no threshold"),
        ("model.remat=all", "model.remat", "'none', 'dots' or 'block'"),
        ("model.ffn_implementation=cuda", "model.ffn_implementation", "'xla' or 'mosaic'"),
        ("model.ffn_implementation=unions", "model.ffn_implementation", "'xla' or 'mosaic'"),
        ("model.ffn_gradients=exact", "model.ffn_gradients", "'dense' or 'sparse'"),
        ("optimizer.schedule=linear", "optimizer.schedule", "'cosine' or 'wsd'"),
        ("data.source=web", "data.source", "'stdlib', 'files', 'hf' or 'tokens'"),
        ("mesh.data=0", "mesh.data", "-1"),
        ("reinit_every=2147483648", "reinit_every", "less than or equal to 2147483647"),
        # combinations that cannot be
        ("batch_tokens=100", "batch_tokens", "multiple of model.context=32"),
        ("l1_warmup=[3, 1]", "l1_warmup", "start <= end"),
        ("l1_warmup=[0, 2147483648]", "l1_warmup", "end < 2^31, got [0, 2147483648]"),
        ("l1_stages=4", "l1_stages", "do not fit into the 0 steps"),
        ("model.heads=5", "model.heads", "d_model=32"),
        ("model.heads=32", "model.heads", "even size"),
        ("model.head_size=7", "model.head_size", "even"),
        ("model.rotary_fraction=0.4", "model.rotary_fraction", "even number of the 8 features"),
        ("model.rotary_fraction=0.1", "model.rotary_fraction", "even number"),
        ("model.kv_heads=3", "model.kv_heads", "heads=4"),
        ("model.rope_scaling=2", "model.rope_scaling", "dictionary"),
        ("model.rope_scaling={factor: 2}", "model.rope_scaling.type", "required"),
        ("model.rope_scaling={type: linear, factor: 2, beta_fast: 9}",
         "model.rope_scaling.beta_fast",
         "type=linear does not use it; leave it out, or write 32.0"),
        ("model.rope_scaling.fctor=2", "model.rope_scaling.fctor", "did you mean factor?"),
        ("model.rope_scaling={type: ntk, factor: 2}", "model.rope_scaling.type", "'yarn'"),
        ("model.rope_scaling={type: yarn, factor: 2}",
         "model.rope_scaling.original_context",
         "yarn needs the context that the model had before"),
        ("model.rope_scaling={type: llama3, factor: 2, original_context: 8, low_freq_factor: 4}",
         "model.rope_scaling.high_freq_factor",
         "above low_freq_factor=4, got 4"),
        ("mesh.fsdp=3", "mesh.fsdp", "model.d_model=32"),
        ("data.source=files", "data.paths", "at least one path"),
        ("data.source=hf", "data.name", "needs the name"),
        ("data.name=some/dataset", "data.name", "source=stdlib does not use it"),
        ("data.held_out_paths=[a.txt]", "data.held_out_paths", "does not use it"),
        ("data={source: tokens, paths: [x.npy], tokenizer: bpe}", "data.tokenizer", "no text"),
        # not an override at all
        ("steps", "'steps'", "key=value"),
        ("=3", "'=3'", "key=value"),
        ("steps=[", "steps", "not valid YAML"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_names_the_key(path, override, key, says):
    with pytest.raises(ConfigError) as error:
        config.load(path, [override])
    message = str(error.value)
    assert message.startswith(f"{key}:")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sparsity_target=5", "model.activation=silu"],
         r"sparsity_target: no activation of model.activation=silu becomes zero; write "
         "model.activation=relu, or sparsity_target=null"),
        (["union_target=0.5", "model.activation=silu"],
         r"union_target: no activation of model.activation=silu becomes zero; write "
         "model.activation=relu, or union_target=null"),
        (["union_target=0.06", "model.d_ff=2000", "micro_batch=8"],
         r"union_target: is counted in chunks of 128 neurons, so it must be at least 0.063 with "
         r"model.d_ff=2000, got 0.06"),
        (["union_target=0.5", "model.d_ff=2000", "micro_batch=4"],
         r"union_target: is measured on 256 tokens, so micro_batch \* model.context must be a "
         r"multiple of them, got 128"),
        (["skip_dead_every=1"],
         r"skip_dead_every: with 1 every step is at full width and .*; write 2 or more, or 0"),
        (["skip_dead_every=5", "model.activation=silu"],
         r"skip_dead_every: with model.activation=silu every neuron is active; write .*=relu, or "
         "skip_dead_every=0"),
        (["skip_dead_every=5", "model.live_width=true"],
         r"skip_dead_every: the model has numbers .* \(model.live_width=true\); write "
         "skip_dead_every=0"),
        (["skip_dead_every=5", "dead_window_tokens=1000"],  # of 256 tokens a step
         r"skip_dead_every: .* dead_window_tokens=1000 is dead, and must be looked at in these "
         "4 steps, got 5; write a larger dead_window_tokens"),
        *((["sparse_gradients_every=" + wrong],
           "sparse_gradients_every: must be auto or a number of steps, 0 for never, got .*")
          for wrong in ("-1", "on", "true", "1.5", "null")),
        (["sparse_gradients_every=5", "model.ffn_implementation=xla"],
         r"sparse_gradients_every: .*model.ffn_implementation must be mosaic or null, got xla"),
        (["sparse_gradients_every=5", "model.ffn_gradients=sparse"],
         r"sparse_gradients_every: .*model.ffn_gradients must be null, got sparse"),
        (["sparse_gradients_every=5", "model.ffn_gradients=dense"],
         r"sparse_gradients_every: .*model.ffn_gradients must be null, got dense"),
        (["model.ffn_gradients=sparse", "model.ffn_implementation=xla"],
         r"model.ffn_gradients: .*model.ffn_implementation must be mosaic or null"),
        (["model.gated=false", "model.activation=drelu"],
         r"model.activation: 'drelu' .* needs a gate.*"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(path, overrides, says):
    with pytest.raises(ConfigError, match=f"^{says}$"):
        config.load(path, overrides)


def test_a_union_target_needs_no_more_tokens_with_kernels_than_with_xla(path):
    for implementation in ("xla", "mosaic"):
        of_256_tokens = ["union_target=0.5", "model.d_ff=2000", "micro_batch=8"]
        config.load(path, [*of_256_tokens, f"model.ffn_implementation={implementation}"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["sparse_gradients_every=5", "model.ffn_implementation=mosaic"],
        ["model.ffn_gradients=sparse", "model.ffn_implementation=mosaic"],
        ["model.ffn_gradients=dense", "model.ffn_implementation=xla"],
        ["model.ffn_gradients=sparse"],
    ],
)
def test_gradients_are_planned_or_given(path, overrides):
    settings = config.load(path, overrides)
    assert settings.must_plan_gradients == (settings.model.ffn_gradients is None)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must hold keys and values"),
        (b"[steps, 3]", "must hold keys and values"),
        (b"steps: [", "not valid YAML"),
        (b"\x89PNG\r\n\x1a\n\xff", "not valid YAML"),
        (b"stepz: 3", "stepz: unknown key; did you mean steps?"),
        (b"run_dir: x", "steps: required, but not given"),
        (b"base: valid.yaml\n1: 2", "1: keys should be strings"),
        (b"base: missing.yaml", "missing.yaml: cannot be read"),
        (b"base: bad.yaml", "must name another file"),
        (b"base: 3", "must name another file"),
        (b'base: "\\ud800"', "not valid YAML"),
        (b'base: "\\0"', "not valid YAML"),
    ],
)
def test_a_bad_file_is_an_error_of_one_line(path, content, says):
    path = path.with_name("bad.yaml")
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        config.load(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_an_unreadable_path_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / name)


@pytest.mark.parametrize("name", ["tiny", "tiny.yaml", "configs/tiny.yaml"])
def test_a_shipped_configuration_is_found_by_its_name(tmp_path, monkeypatch, name):
    expected = config.load(CONFIGS / "tiny.yaml")
    monkeypatch.chdir(tmp_path)
    assert config.load(name) == expected
    with pytest.raises(ConfigError, match=r"the shipped configurations are .*, tiny$"):
        config.load(f"elsewhere/{name}")
    # A file of that name comes first.
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(yaml.safe_dump(VALID))
    assert config.load(name) == config.from_dict(VALID)


def test_overrides_are_yaml_and_the_last_one_wins(path):
    settings = config.load(
        path,
        [
            "steps=3",
            "steps=7",
            "optimizer.lr=1e-3",  # YAML 1.1 alone would read this as text
            "optimizer.eps=1E-9",
            "l1_warmup=[10, 20]",
            "model.tie_embeddings=false",
            "model.kv_heads=2",
            "data.source=files",
            "data.paths=['a=b.txt', c/**/*.md]",
            "mesh={data: 2, fsdp: 4}",
        ],
    )
    assert settings.steps == 7
    assert settings.optimizer.lr == 1e-3
    assert settings.optimizer.eps == 1e-9
    assert settings.l1_warmup == (10, 20)
    assert settings.model.tie_embeddings is False
    assert (settings.model.num_kv_heads, settings.model.head_dim) == (2, 8)
    assert config.load(path, ["model.heads=3", "model.head_size=6"]).model.head_dim == 6
    assert settings.data.paths == ("a=b.txt", "c/**/*.md")
    assert settings.mesh == MeshConfig(data=2, fsdp=4)


def test_null_restores_an_optional_value(path):
    overrides = ["model.kv_heads=2", "model.kv_heads=null"]
    assert config.load(path, overrides).model.num_kv_heads == 4


def test_a_file_may_give_only_what_differs_from_its_base(tmp_path, path):
    (tmp_path / "a.yaml").write_text("base: valid.yaml\nmodel: {layers: 5}\noptimizer: {lr: 0.5}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nmodel: {heads: 2}\nsteps: 9\n")
    settings = config.load(tmp_path / "b.yaml", ["model.d_ff=128"])
    expected = config.load(
        path, ["model.layers=5", "optimizer.lr=0.5", "model.heads=2", "steps=9", "model.d_ff=128"]
    )
    assert settings == expected


def test_to_yaml_is_read_back_as_the_same_config(tmp_path, path):
    overrides = [
        "optimizer.lr=1e-30",
        "l1_warmup=[1, 5]",
        "data.source=files",
        "data.paths=[a, 'b: c']",
        "run_dir='7'",
        "model.rope_scaling={type: llama3, factor: 8, original_context: 32}",
    ]
    settings = config.load(path, overrides)
    copy = tmp_path / "copy.yaml"
    copy.write_text(config.to_yaml(settings))
    assert config.load(copy) == settings
    # Every default is written out, so that a later version cannot change an old run.
    tree = yaml.safe_load(copy.read_text())
    assert set(tree) == set(Config.model_fields)
    assert tree["optimizer"]["b2"] == 0.95


def test_describe_has_every_key_with_its_meaning(path):
    text = config.describe()
    tree = yaml.safe_load(config.to_yaml(config.load(path)))
    for key, value in tree.items():
        names = [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
        for name in names:
            assert f"  {name}: " in text


def test_a_config_cannot_be_changed(path):
    with pytest.raises(ValueError, match="frozen"):
        config.load(path).steps = 3


def test_accumulation_steps(path):
    settings = config.load(path)  # 8 sequences of 32 tokens, 2 to a device
    assert [settings.accumulation_steps(devices) for devices in (1, 2, 4)] == [4, 2, 1]
    for devices in (3, 8):
        with pytest.raises(ConfigError, match=rf"^micro_batch: 2 .* {devices} devices"):
            settings.accumulation_steps(devices)


@pytest.mark.parametrize(
    ("mesh", "shape"), [({}, (8, 1)), ({"fsdp": 4}, (2, 4)), ({"data": 1, "fsdp": 8}, (1, 8))]
)
def test_mesh_uses_all_devices(mesh, shape):
    made = sharding.make_mesh(MeshConfig(**mesh).shape(8), jax.devices("cpu")[:8])
    assert tuple(made.shape[axis] for axis in ("data", "fsdp")) == shape


@pytest.mark.parametrize("mesh", [{"fsdp": 3}, {"data": 2}, {"fsdp": 16}, {"data": 8, "fsdp": 2}])
def test_mesh_that_does_not_fit_the_devices(mesh):
    with pytest.raises(ConfigError, match=r"^mesh\.(data|fsdp): .*8 devices"):
        MeshConfig(**mesh).shape(8)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load_and_divide(path):
    settings = config.load(path, DECIDED.get(path.stem, []))
    assert settings.accumulation_steps(1) >= 1
    assert settings.run_dir == f"runs/{path.stem}"


@pytest.mark.parametrize(
    ("name", "layers", "coefficient"),
    [("0p5b", 8, 1e-4), ("1b", 18, 2e-5), ("1p5b", 28, 2e-5), ("2b", 38, 2e-5)],
)
def test_published_recipe_with_the_target_of_the_study(name, layers, coefficient):
    settings = config.load(CONFIGS / f"{name}.yaml")
    shape = settings.model
    assert (shape.layers, shape.d_model, shape.heads, shape.d_ff) == (layers, 2048, 32, 5632)
    assert (shape.vocab_size, shape.context, shape.num_kv_heads) == (49152, 2048, 32)
    assert (shape.rope_theta, shape.norm_eps, shape.tie_embeddings) == (1e5, 1e-5, True)
    assert (shape.gated, shape.activation) == (True, "relu")
    assert (settings.batch_sequences, settings.steps) == (512, 30_000)
    assert (settings.l1_coefficient, settings.l1_warmup) == (coefficient, (0, 0))
    assert (settings.union_target, settings.lasso_share) == (0.07, 0.5)
    optimizer = settings.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.schedule) == (1e-3, 600, "cosine")
    assert (optimizer.b2, optimizer.weight_decay, optimizer.clip_norm) == (0.95, 0.1, 1.0)
    for devices in (1, 2, 4, 8):
        settings.accumulation_steps(devices)


def test_keys_of_a_section_that_a_file_has_as_null(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(config.load("tiny")))  # model.rope_scaling: null
    changes = ["model.rope_scaling.type=linear", "model.rope_scaling.factor=2"]
    assert config.load(path, changes).model.rope_scaling.factor == 2
