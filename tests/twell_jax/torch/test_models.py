"""`SparseMLP` of torch, and models of transformers whose blocks it replaces."""

import copy

import pytest

from tests.packages import needed
from tests.twell_jax.torch.drawn import operands, reference

torch = needed("torch")
transformers = needed("transformers")

from twell_jax.torch import (  # noqa: E402
    SparseMLP,
    collect_l1,
    collect_stats,
    lay_out,
    replace_mlps,
)

pytestmark = pytest.mark.peers

SHAPE = dict(
    vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=32,
)  # fmt: skip
FAMILIES = {
    "llama": {"hidden_act": "relu"},
    "mistral": {"hidden_act": "relu"},
    "qwen2": {"hidden_act": "relu"},
    "qwen3": {"hidden_act": "relu"},
    "arcee": {"hidden_act": "relu2"},
    "nemotron": {"hidden_act": "relu2"},
}


def make(family="llama", **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SHAPE | FAMILIES[family] | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


TOKENS = torch.arange(48).reshape(2, 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_names_stay(family):
    model = make(family)
    before, state = model(TOKENS).logits, model.state_dict()
    replaced = replace_mlps(model)
    assert [*replaced] == [f"model.layers.{i}.mlp" for i in range(2)]
    assert {block.activation for block in replaced.values()} == {FAMILIES[family]["hidden_act"]}
    torch.testing.assert_close(model(TOKENS).logits, before)
    assert model.state_dict().keys() == state.keys()
    assert all(a.data_ptr() == state[name].data_ptr() for name, a in model.state_dict().items())


def test_weights_that_are_laid_out_are_the_same_weights(tmp_path):
    model = make().requires_grad_(False)
    replace_mlps(model)
    before, state = model(TOKENS).logits, {k: v.clone() for k, v in model.state_dict().items()}
    lay_out(model)
    for layer in model.model.layers:
        assert layer.mlp.down_proj.weight.t().is_contiguous()
    assert all(torch.equal(a, state[name]) for name, a in model.state_dict().items())
    torch.testing.assert_close(model(TOKENS).logits, before)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(TOKENS).logits, before)


def test_weights_that_are_trained_are_not_laid_out():
    model = make()
    with pytest.raises(ValueError, match=r"has no SparseMLP: replace_mlps"):
        lay_out(model)
    replace_mlps(model)
    with pytest.raises(ValueError, match=r"layers.0.mlp is trained.* call model.requires_grad_\(F"):
        lay_out(model)


def test_another_activation_is_asked_for_by_name():
    model = make(hidden_act="silu")
    with pytest.raises(ValueError, match=r"layers.0.mlp computes silu, which is never zero: act"):
        replace_mlps(model)
    assert not any(isinstance(m, SparseMLP) for m in model.modules())
    relu = make(hidden_act="relu")
    replace_mlps(model, activation="relu")
    torch.testing.assert_close(model(TOKENS).logits, relu(TOKENS).logits)


class WithNorm(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x):
        h = torch.relu(self.up_proj(x))
        return self.down_proj(h / (1 + h.norm(dim=-1, keepdim=True)))


def test_what_is_no_such_block_is_refused():
    with pytest.raises(ValueError, match=r"torch.nn.Linears without bias and nothing else: g"):
        replace_mlps(make(mlp_bias=True))
    with pytest.raises(ValueError, match="no module of the model has the layers"):
        replace_mlps(torch.nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"mlp \(WithNorm\) computes something else than its lay"):
        replace_mlps(torch.nn.ModuleDict({"mlp": WithNorm(SparseMLP(16, 32, gated=False))}))


def test_a_model_without_values_and_one_that_is_a_block_are_refused():
    with pytest.raises(ValueError, match=r"layers.0.mlp has weights without values, .* meta"):
        replace_mlps(make().to("meta"))
    with pytest.raises(ValueError, match="cannot replace the model itself"):
        replace_mlps(make().model.layers[0].mlp)


def test_l1_of_a_model_is_the_mean_over_its_blocks():
    model = make()
    replace_mlps(model)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp has no statistics: call the model"):
        collect_l1(model)
    model.train()(TOKENS)
    terms = [stats.l1 for stats in collect_stats(model).values()]
    assert torch.equal(collect_l1(model), torch.stack(terms).mean())
    collect_l1(model).backward()
    assert all(layer.mlp.up_proj.weight.grad.abs().sum() > 0 for layer in model.model.layers)
    with pytest.raises(ValueError, match="has no SparseMLP: replace_mlps"):
        collect_l1(torch.nn.Linear(2, 2))


def test_checkpointing_that_would_lose_the_l1_term_is_refused():
    model = make().train()
    replace_mlps(model)
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(TOKENS)
    with pytest.raises(ValueError, match=r"layers.0.mlp: its L1 term has no gradient"):
        collect_l1(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for each in (model, plain):
        each.zero_grad()
        loss = each(TOKENS, labels=TOKENS).loss + collect_l1(each)
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("gated", [True, False])
def test_a_module_is_the_block_of_its_layers(reference_kernels, gated):
    x, w_gate, w_up, w_down = operands(gated=gated)
    mlp = SparseMLP(128, 512, gated=gated, implementation="mosaic", dtype=torch.bfloat16)
    state = {"up_proj.weight": w_up, "down_proj.weight": w_down.t()}
    mlp.load_state_dict(state | ({"gate_proj.weight": w_gate} if gated else {}))
    y = mlp.eval()(x)
    expected, _ = reference(x, w_gate, w_up, w_down)
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    assert mlp.stats is None
    mlp.train()(x)
    assert mlp.stats.nnz > 0
    assert copy.deepcopy(mlp).stats is None


class Pair(torch.nn.Module):
    """A block in two places, behind a dropout or not."""

    def __init__(self, dropout=0.0, output=lambda y: y):
        super().__init__()
        self.mlp, self.output = SparseMLP(16, 32), output
        layers = {name: getattr(self.mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}
        self.mlp = torch.nn.Module()
        for name, layer in layers.items():
            setattr(self.mlp, name, layer)
        self.mlp.dropout = torch.nn.Dropout(dropout)
        self.mlp.forward = self._compute
        self.again = self.mlp

    def _compute(self, x):
        m = self.mlp
        y = m.down_proj(torch.relu(m.gate_proj(x)) * m.up_proj(x))
        return self.output(m.dropout(y))


def test_a_block_in_two_places_is_replaced_in_both_and_keeps_its_order():
    model = Pair()
    names = [name for name, _ in model.named_parameters()]
    replaced = replace_mlps(model)
    assert replaced["mlp"] is replaced["again"] is model.mlp is model.again
    assert [name for name, _ in model.named_parameters()] == names


def test_what_a_block_would_leave_out_is_refused():
    with pytest.raises(ValueError, match="computes something else than its layers"):
        replace_mlps(Pair(dropout=0.5).eval())
    with pytest.raises(ValueError, match="computes something else than its layers"):
        replace_mlps(Pair(output=lambda y: (y, None)))
    mlp, x = SparseMLP(16, 32), torch.randn(4, 16)
    hook = mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"^up_proj does more than multiply with its weight"):
        mlp(x)
    hook.remove()
    mlp(x)
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj)
    with pytest.raises(ValueError, match=r"^down_proj does more than multiply with its weight"):
        mlp(x)


def test_hooks_of_what_is_replaced_are_not_lost():
    model, called = Pair(), []
    hook = model.mlp.register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match=r"^mlp has hooks: remove them, and give them to what"):
        replace_mlps(model)
    hook.remove()
    replace_mlps(model)["mlp"].register_forward_hook(lambda *_: called.append(1))
    called.clear()
    model.mlp(torch.randn(4, model.mlp.up_proj.in_features))
    assert called == [1]


def test_frozen_blocks_have_no_gradient_of_l1_and_are_no_error():
    model = make().train()
    replace_mlps(model)
    for parameter in (*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()):
        parameter.requires_grad_(False)
    model(TOKENS)
    collect_l1(model).backward()
    first, second = (layer.mlp.up_proj.weight.grad for layer in model.model.layers)
    assert first is None and second.abs().sum() > 0


def test_checkpointing_keeps_the_statistics_of_the_call():
    mlp, x = SparseMLP(16, 32), torch.randn(4, 16, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: mlp(x).sin(), x, use_reentrant=False)
    stats = mlp.stats
    y.sum().backward()
    assert mlp.stats is stats


def test_no_tokens_are_no_error():
    mlp = SparseMLP(16, 32).train()
    assert mlp(torch.zeros(0, 16)).shape == (0, 16)
    assert mlp.stats.l1 == mlp.stats.nnz == mlp.stats.max_nnz == 0


@pytest.mark.parametrize("is_training", [True, False])
def test_a_module_is_compiled_whole(is_training):
    mlp, x = SparseMLP(16, 32).train(is_training), torch.randn(4, 16)
    expected = mlp(x)
    torch.testing.assert_close(torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), expected)
