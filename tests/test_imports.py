"""`import twell_jax` is light, and imports go down: train.py -> twell_jax -> pallas_kernels."""

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("twell_jax", "pallas_kernels")


def of_kernels(rooms: str) -> str:
    """`pallas_kernels` itself and these rooms of it."""
    return " ".join(["pallas_kernels", *(f"pallas_kernels.{room}" for room in rooms.split())])


# Each room, and the rooms that its modules may import beside their own. A module belongs to the
# room of the longest name that it starts with. Rooms of `hopper` never import each other.
MAY_IMPORT = {
    "pallas_kernels.device": "",
    "pallas_kernels.in_place": "",
    "pallas_kernels.weights": "",
    "pallas_kernels.rectifiers": "",
    "pallas_kernels.quantised": "",
    "pallas_kernels.layers": "quantised weights",
    "pallas_kernels.layouts": "quantised rectifiers weights",
    "pallas_kernels.pattern_shares": "layouts",
    "pallas_kernels.reference": "layouts quantised rectifiers weights",
    "pallas_kernels.hopper.common": "device layouts quantised rectifiers weights",
    "pallas_kernels.hopper.dense": "hopper.common in_place layouts quantised rectifiers weights",
    "pallas_kernels.hopper.twell": "hopper.common layouts quantised rectifiers",
    "pallas_kernels.hopper.unions": "hopper.common in_place layouts quantised rectifiers",
    "pallas_kernels.hopper.decode": "hopper.common in_place layers layouts quantised rectifiers "
    "weights",
    "pallas_kernels.hopper.transformer": "hopper.common weights",
    "pallas_kernels.hopper": "hopper.common hopper.dense hopper.twell hopper.unions hopper.decode "
    "hopper.transformer",
    "pallas_kernels.ampere": "hopper hopper.common hopper.decode quantised rectifiers reference "
    "weights",
    "pallas_kernels.mma": "hopper hopper.common reference",
    "pallas_kernels": "ampere hopper layers layouts mma quantised rectifiers reference weights",
    "twell_jax.ffn": "untrusted user_cache "
    + of_kernels("device in_place layouts pattern_shares quantised rectifiers weights"),
    "twell_jax.untrusted": "",
    "twell_jax.user_cache": "",
    "twell_jax.config": "ffn untrusted",
    "twell_jax.data": "config untrusted",
    "twell_jax.models": "ffn config data untrusted "
    + of_kernels("in_place layers layouts quantised weights"),
    "twell_jax.plotting": "config untrusted",
    "twell_jax.analysis": "ffn config data models plotting "
    + of_kernels("hopper.common weights"),  # a clock
    "twell_jax.train": "ffn config data models plotting analysis untrusted user_cache",
    "twell_jax.inference": "ffn config data models train untrusted",
    "twell_jax.torch": "ffn",
    "twell_jax": "ffn",
}
# The commands stand above all rooms.
COMMANDS = (
    "train",
    *(f"twell_jax.{name}" for name in ("generate", "evaluate", "export", "analyze", "plot")),
    "twell_jax.quantise",
    "twell_jax.measure",
    "twell_jax.sparsify",
)

# What a room may import of other people's packages, where that is a promise.
THIRD_PARTY = {
    "pallas_kernels": {"jax", "jaxlib", "numpy"},
    "twell_jax.ffn": {"jax", "numpy", "flax"},
}
NOT_THIRD_PARTY = {"twell_jax.data": {"jax", "flax"}}  # text and tokens need no accelerator


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    name_of(path): path
    for path in [ROOT / "train.py", *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))]
}


def imports(module: str) -> Iterator[str]:
    """Full names of what a module imports, wherever in it; of ours, the module that is meant."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in FILES else str(node.module)


def room(module: str) -> str:
    """The room that a module belongs to."""
    rooms = [name for name in MAY_IMPORT if f"{module}.".startswith(f"{name}.")]
    return max(rooms, key=len)


@pytest.fixture(scope="module")
def loaded():
    """Packages that `import twell_jax` loads, modules that commands do, settings that change."""
    script = """if True:
        import json, sys
        import flax, flax.nnx, jax, numpy
        def packages():
            return {name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names
        before, settings = packages(), dict(jax.config.values)
        import twell_jax
        ours = packages() - before
        import twell_jax.evaluate, twell_jax.generate, twell_jax.train.command
        changed = settings.items() ^ jax.config.values.items()
        print(json.dumps([sorted(ours), sorted(sys.modules), sorted(changed)]))
    """
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_importing_the_package_loads_jax_numpy_flax_and_nothing_else(loaded):
    package, _, changed_settings = loaded
    assert package == ["pallas_kernels", "twell_jax"] and not changed_settings


def test_commands_begin_without_packages_that_take_long_to_import(loaded):
    _, commands, _ = loaded
    late = {"datasets", "grain", "huggingface_hub", "lm_eval", "matplotlib", "orbax", "tensorstore"}
    late |= {"jax.experimental.pallas", "pallas_kernels.hopper", "torch", "transformers"}
    assert not late & set(commands)


@pytest.mark.parametrize("module", sorted(set(FILES) - set(COMMANDS)))
def test_imports_go_down(module):
    own = room(module)
    package = own.split(".")[0]
    allowed = [
        name if name.startswith(PACKAGES) else f"{package}.{name}"
        for name in MAY_IMPORT[own].split()
    ]
    for name in imports(module):
        package = name.split(".")[0]
        assert package not in ("train", "benchmarks", "tests") and name not in COMMANDS
        if package in PACKAGES:
            assert room(name) in (own, *allowed), f"{module} imports {name}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: {name for name in imports(module) if name in FILES} for module in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


@pytest.mark.parametrize("module", sorted(FILES))
def test_rooms_keep_to_the_packages_that_they_need(module):
    used = {name.split(".")[0] for name in imports(module)}
    used -= sys.stdlib_module_names | set(PACKAGES)
    for prefix, allowed in THIRD_PARTY.items():
        if f"{module}.".startswith(f"{prefix}."):
            assert used <= allowed
    for prefix, forbidden in NOT_THIRD_PARTY.items():
        if f"{module}.".startswith(f"{prefix}."):
            assert not used & forbidden
