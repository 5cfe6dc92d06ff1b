"""The settings that follow from the model that is made sparse."""

import logging

import pytest

from twell_jax import config as config_lib
from twell_jax.config import ConfigError, ModelConfig
from twell_jax.train import recipe

WIDE = {"vocab_size": 257, "context": 8192, "d_model": 2048, "layers": 2, "heads": 32, "d_ff": 5632}


@pytest.fixture
def of(monkeypatch):
    """`of(steps=..., d_ff=...)`: the configuration for such a model, with these settings."""

    def of(given=(), **changes):
        model = ModelConfig(**WIDE | {"activation": "silu"} | changes)
        monkeypatch.setattr(recipe, "settings_of", lambda name: model)
        found = recipe.overrides("org/name", config_lib.parse(given))
        whole = {key: changes.get(key, value) for key, value in WIDE.items() if key != "context"}
        own = [*(f"model.{key}={value}" for key, value in whole.items()), *given]
        return config_lib.load("sparsify", [*found, *own])

    return of


def test_a_wide_model_gets_the_target_of_the_study_and_half_a_lasso(of, caplog):
    caplog.set_level(logging.INFO)
    config = of()
    assert (config.union_target, config.sparsity_target, config.lasso_share) == (0.07, None, 0.5)
    assert (config.model.context, config.model.activation) == (2048, "relu")
    assert (config.l1_warmup, config.l1_stages, config.optimizer.warmup_steps) == ((0, 200), 4, 100)
    assert config.sparsity_control_start == 200 and config.batch_sequences == 64
    assert config.dead_steps == config.steps // 10 == 200
    assert "model.context: 2048 of the 8192 tokens that the model reads" in caplog.text


def test_the_shipped_configuration_is_that_of_a_wide_model(of):
    model = {f"model.{key}={value}" for key, value in WIDE.items() if key != "context"}
    shipped = config_lib.load("sparsify", sorted(model))
    assert of().model_dump(exclude={"dead_window_tokens"}) == shipped.model_dump(
        exclude={"dead_window_tokens"}
    )


@pytest.mark.parametrize(
    ("given", "rise", "stages"),
    [("null", (0, 0), 0), ("[5, 7]", (5, 7), 2), ("[0, 300]", (0, 300), 4)],
)
def test_the_stages_fit_into_the_rise_that_is_given(of, given, rise, stages):
    config = of([f"l1_warmup={given}"])
    assert (config.l1_warmup, config.l1_stages) == (rise, stages)


def test_a_rise_that_is_none_is_named(of):
    with pytest.raises(ConfigError, match=r"^l1_warmup: "):
        of(["l1_warmup=[7, 5]"])
    with pytest.raises(ConfigError, match=r"^l1_warmup: input should be a valid list"):
        of(["l1_warmup=soon"])


@pytest.mark.parametrize(
    ("d_ff", "union", "nnz"),
    [(2816, 0.07, None), (2048, 0.094, None), (512, 0.375, None), (256, None, 12.8)],
)
def test_narrow_blocks_get_a_target_that_they_can_reach(of, caplog, d_ff, union, nnz):
    caplog.set_level(logging.INFO)
    config = of(["model.context=256"], d_ff=d_ff)
    assert (config.union_target, config.sparsity_target) == (union, nnz)
    said = [record.message for record in caplog.records]
    assert len(said) == (union != 0.07)
    assert all("counted in chunks of 128 neurons" in line for line in said)


def test_what_the_user_sets_decides_what_else_follows(of):
    config = of(["steps=300", "context=512", "sparsity_target=30"])
    assert config.targets == {"sparsity_target": 30.0}
    assert (config.l1_warmup, config.eval_every, config.optimizer.warmup_steps) == ((0, 30), 30, 15)
    assert config.batch_tokens == 64 * 512 and config.dead_steps == 30
    assert of(["union_target=0.2"]).union_target == 0.2
    assert of(["mask_documents=true"]).lasso_share == 0


def test_short_runs_and_odd_contexts_fit(of):
    config = of(["steps=3"], context=300)
    assert (config.l1_warmup, config.l1_stages) == ((0, 0), 0)
    assert config.model.context == 288 and config.micro_batch * 288 % 256 == 0


@pytest.mark.parametrize("activation", ["relu2", "drelu"])
def test_a_rectifier_stays(of, activation):
    assert of(activation=activation).model.activation == activation


def test_what_is_no_number_is_left_to_the_check_of_the_configuration(of):
    for key in ("steps", "model.context", "batch_tokens"):
        with pytest.raises(ConfigError, match=f"^{key}: input should be a valid integer"):
            of([f"{key}=many"])


def test_there_must_be_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"^init_from: .* is not the directory of a run and hol"):
        recipe.overrides(str(tmp_path), {})


def test_the_text_of_a_run_stays_unless_another_source_is_named(monkeypatch):
    source = config_lib.load("tiny", ["data.source=files", "data.paths=[a.txt]"])
    monkeypatch.setattr(recipe, "is_run", lambda _: True)
    monkeypatch.setattr(recipe, "load_config", lambda _: source)
    monkeypatch.setattr(recipe, "settings_of", lambda _: source.model)

    def found(*given):
        return config_lib.parse(recipe.overrides("runs/a", config_lib.parse(given)))

    for given in ([], ["data.strict=true"]):
        assert found(*given)["data.source"] == "files"
        assert found(*given)["data.paths"] == ["a.txt"]
    assert "data.paths" not in found("data.source=stdlib")
