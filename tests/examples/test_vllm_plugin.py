"""The plugin for vLLM, with stand-ins for what it takes from there; vLLM itself does not run."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.errors import relative_error
from tests.packages import needed

torch = needed("torch")

from torch import nn  # noqa: E402

from twell_jax.torch import choice  # noqa: E402

pytestmark = pytest.mark.peers

DIRECTORY = Path(__file__).parents[2] / "examples" / "vllm_plugin"
D, H = 64, 128


class Linear(nn.Linear):
    """As vLLM's parallel layers: it returns its result and a bias that is not added."""

    def forward(self, x):
        return super().forward(x), None


class LlamaMLP(nn.Module):
    """vLLM's, with its names, its merged weights and its refusal."""

    def __init__(self, hidden_size, intermediate_size, hidden_act):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)
        if hidden_act != "silu":
            raise ValueError(f"Unsupported activation: {hidden_act}")

    def forward(self, x):
        raise AssertionError("the plugin's blocks compute")


class LlamaForCausalLM(nn.Module):
    """The part of vLLM's that a plugin sees."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.layers = nn.ModuleList(LlamaMLP(D, H, config.hidden_act) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

    def load_weights(self, weights):
        """Gate and up are parts of a merged weight, as in vLLM."""
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            for shard, part in (("gate_proj", 0), ("up_proj", 1)):
                if shard in name:
                    merged = parameters[name.replace(shard, "gate_up_proj")]
                    merged.data.chunk(2)[part].copy_(weight)
            if "down_proj" in name:
                parameters[name].data.copy_(weight)


@pytest.fixture
def vllm(monkeypatch):
    """What the plugin registered and summed over GPUs."""
    seen = SimpleNamespace(registered={}, summed=[])
    registry = SimpleNamespace(register_model=seen.registered.__setitem__)
    contents = {
        "vllm": {"ModelRegistry": registry},
        "vllm.distributed": {
            "tensor_model_parallel_all_reduce": lambda y: seen.summed.append(y) or y
        },
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.llama": {
            "LlamaForCausalLM": LlamaForCausalLM,
            "LlamaMLP": LlamaMLP,
        },
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(DIRECTORY)
    yield seen
    for name in [name for name in sys.modules if name.partition(".")[0] == "twell_vllm"]:
        del sys.modules[name]


def config_of(**changes):
    settings = {"hidden_act": "relu", "quant_config": None} | changes
    quant_config = settings.pop("quant_config")
    model_config = SimpleNamespace(hf_config=SimpleNamespace(**settings))
    return SimpleNamespace(model_config=model_config, quant_config=quant_config)


def registered_class(vllm):
    """The class that vLLM finds by the entry point of the plugin's package."""
    project = tomllib.loads((DIRECTORY / "pyproject.toml").read_text())["project"]
    module, function = project["entry-points"]["vllm.general_plugins"]["twell"].split(":")
    getattr(import_module(module), function)()
    assert "twell_vllm.model" not in sys.modules  # before processes have their GPUs
    module, name = vllm.registered["SparseLlamaForCausalLM"].split(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("captures", [False, True])
def test_a_registered_model_computes_with_weights_of_a_file(vllm, monkeypatch, captures):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    config = config_of()
    model = registered_class(vllm)(vllm_config=config).double()
    assert config.model_config.hf_config.hidden_act == "relu"
    torch.manual_seed(0)
    weights = {
        f"layers.{i}.{name}.weight": torch.randn(shape, dtype=torch.float64) / shape[1] ** 0.5
        for i in range(2)
        for name, shape in (("gate_proj", (H, D)), ("up_proj", (H, D)), ("down_proj", (D, H)))
    }
    model.load_weights(weights.items())
    x = expected = torch.randn(10, D, dtype=torch.float64)
    for i in range(2):
        gate, up, down = (
            weights[f"layers.{i}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")
        )
        expected = expected + (torch.relu(expected @ gate.T) * (expected @ up.T)) @ down.T
    with torch.no_grad():
        assert relative_error(model(x), expected) < 1e-12
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        assert relative_error(compiled(x), expected) < 1e-12
    assert len(vllm.summed) >= 2  # of each layer, over the GPUs that share its neurons


def test_graphs_of_cuda_hold_the_products_of_torch(vllm, monkeypatch):
    registered_class(vllm)
    block, asked = sys.modules["twell_vllm.model"].block, []
    monkeypatch.setattr(choice, "implementation", lambda *_: asked.append(captures) or "torch")
    for captures in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=captures: now)
        block(torch.ones(3, D), torch.ones(2 * H, D), torch.ones(D, H), "relu")
    assert asked == [False]  # there is a choice outside graphs alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act must be 'relu' or 'relu2', got 'silu'"),
        ({"mlp_bias": True}, "no biases"),
        ({"quant_config": object()}, "weights of 16 bits"),
    ],
)
def test_other_models_are_refused(vllm, changes, message):
    with pytest.raises(ValueError, match=message):
        registered_class(vllm)(vllm_config=config_of(**changes))
