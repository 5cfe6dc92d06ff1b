"""Whatever a person writes, a command does it or ends with one line: no traceback, no hang.

Each test draws settings, arguments and files that are broken, absurd or foreign. Those that happen
to be possible end before the work would begin. `--seed N` draws others.
"""

import json
import signal

import pytest
import yaml
from flax import nnx

from tests import seeds
from tests.commands import call
from twell_jax.config import Config, ModelConfig
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference import generation
from twell_jax.models import Transformer
from twell_jax.models.pretrained import save_pretrained
from twell_jax.train.trainer import Trainer

DRAWS = 60
SECONDS = 60  # for each; most take milliseconds
VALUES = [
    "", "null", "~", "true", "x", "0", "1", "2", "-1", "1.5", "1e-300", "1e300", "1e10", ".nan",
    "-.inf", "9" * 12, "9" * 30, "1" * 5000, "[]", "{}", "[0]", "[1, 5]", "[5, 1]", "[1, [2]]",
    "{a: 1}", "[" * 300, "&a [*a]", "a: b: c", "!!bool x", "2026-13-45", '"\\0"', '"\\ud800"',
    "a\nb", "é", "'*'", "/dev/null", "/proc/self/x", "x" * 300, "%s{0}\\",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "3", "257", "100000", "2147483647", "9" * 12, "0.5", "1e-300", "1.0e+300"]
JSON = [
    None, True, 0, -1, 1.5, 10**12, 10**30, float("nan"), "", "x", [], [1], [[]], {}, {"a": 1},
]  # fmt: skip
FILES = {
    "empty.txt": b"",
    "short.txt": b"ab",
    "latin.txt": b"caf\xe9" * 99,
    "null.txt": b"\0" * 999,
    "table.parquet": b"PAR1\xff\xfe",
    "deep.jsonl": b"[" * 50_000,
    "broken.jsonl": b'{"text": "a"}\n{"text": ',
    "foreign.jsonl": b'{"body": "a"}',
    "number.jsonl": b"1\n\xff",
    "shard.npy": b"\x93NUMPY\x01",
    "tokenizer.json": b"{}",
    "bpe/tokenizer.json": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
}


class Possible(BaseException):
    """Raised where the work would begin; not an `Exception`, so that no command handles it."""


class TooLong(BaseException):
    """Raised after so many seconds; not an `Exception` either."""


def stop(*_, **__):
    raise Possible


def take_too_long(*_):
    raise TooLong(f"still running after {SECONDS} s")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with a corpus and broken files."""
    directory = tmp_path / "here"
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    words = seeds.rng().choice(["alpha", "beta", "gamma"], (40, 99))
    for i, line in enumerate(words):
        (directory / f"{i}.text").write_text(" ".join(line))
    monkeypatch.chdir(directory)
    return directory


def choose(draw, values):
    return values[draw.integers(len(values))]


def is_done_or_one_line(*command):
    """Whether the command did, or would do, what was asked; else it must have said why not."""
    signal.signal(signal.SIGALRM, take_too_long)
    signal.alarm(SECONDS)
    try:
        process = call(*command)
    except Possible:
        return True
    except BaseException as error:
        raise AssertionError(f"a traceback from {command!r}") from error
    finally:
        signal.alarm(0)
    if process.returncode == 0:
        return True
    *usage, line = process.stderr.split("\n")[:-1]
    said = command, process.returncode, process.stderr
    if process.returncode == 2:
        assert usage and usage[0].startswith("usage: ") and ": error: " in line, said
    else:
        assert process.returncode == 1 and not usage and line.startswith("error: "), said
    return False


def keys(tree):
    for key, value in tree.items():
        yield from ([f"{key}.{name}" for name in value] if isinstance(value, dict) else [key])


def test_settings(folder, monkeypatch):
    monkeypatch.setattr(Trainer, "__init__", stop)
    draw, done = seeds.rng(), []
    every = list(keys(yaml.safe_load(call("train.py", "tiny", "--print-config").stdout)))
    assert len(every) > len(Config.model_fields)
    every += ["data", "model", "stepz", "model.x", "a.b.c", ".", "steps.", "base"]
    files = {"data.tokenizer": list(FILES), "data.source": ["files", "tokens", "x", "[]"],
               "data.paths": [f"[{name}]" for name in (*FILES, "none", "[", "**/*")]}  # fmt: skip
    for i in range(DRAWS):
        chosen = [choose(draw, every) for _ in range(draw.integers(1, 3))]
        if i % 4 == 0:
            chosen = ["data.paths"]
        values = choose(draw, [NUMBERS, NUMBERS, VALUES])
        bad = [f"{key}={choose(draw, files.get(key, values))}" for key in chosen]
        base = [f"run_dir=run{i}", "data.source=files", "data.paths=['*.text']"]
        done.append(is_done_or_one_line("train.py", "tiny", *base, *bad))
    assert any(done) and not all(done)


def test_configuration_files(folder):
    draw = seeds.rng()
    for _ in range(DRAWS // 2):
        lines = [f"{choose(draw, ['steps', 'model', 'base', 'é', '? [a]', '- x'])}: "
                 f"{choose(draw, VALUES)}" for _ in range(draw.integers(0, 4))]  # fmt: skip
        raw = "\n".join(lines).encode()
        if draw.integers(4) == 0:
            raw = draw.bytes(20)
        (folder / "config.yaml").write_bytes(raw)
        for command in (
            ["train.py", "config.yaml", "--print-config"],
            ["-m", "twell_jax.export", ".", "out"],
            ["-m", "twell_jax.quantise", ".", "out"],
            ["-m", "twell_jax.analyze", "."],
        ):
            assert not is_done_or_one_line(*command)


def test_arguments(folder):
    draw = seeds.rng()
    numbers = ["-1", "0", "1", "9" * 30, "1.5", "nan", "inf", "1e-300", "x", "", "1" * 5000]
    options = {
        "train.py": ["--dry-run"],
        "twell_jax.generate": ["--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p",
                               "--seed", "--implementation"],
        "twell_jax.export": ["--dtype", "--max-shard-gb", "--push"],
        "twell_jax.analyze": ["--sequences"],
        "twell_jax.sparsify": ["--dry-run", "--limit"],
    }  # fmt: skip
    required = {"twell_jax.generate": ["--prompt", "x"], "twell_jax.export": ["out"]}
    required |= {"twell_jax.sparsify": ["steps=2", "--data", "0.text"]}
    for _ in range(DRAWS):
        name = choose(draw, list(options))
        command = [name] if name == "train.py" else ["-m", name]
        command += [choose(draw, ["none", ".", "/dev/null", "x\ny"]), *required.get(name, [])]
        for _ in range(draw.integers(1, 3)):
            command += [choose(draw, options[name]), choose(draw, numbers)]
        assert not is_done_or_one_line(*command)


def test_hugging_face_directories(folder, monkeypatch):
    shape = dict(vocab_size=257, context=16, d_model=8, layers=1, heads=2, d_ff=8, dtype="float32")
    model = Transformer(ModelConfig(**shape), rngs=nnx.Rngs(seeds.integer()))
    save_pretrained("model", model, ByteTokenizer(), max_shard_bytes=2000)
    monkeypatch.setattr(generation, "generate", stop)
    draw = seeds.rng()
    whole = {path: path.read_bytes() for path in (folder / "model").glob("*.json")}
    foreign = ["rope_scaling", "rope_parameters", "layer_types", "sparsity_gated_mlp", "dtype"]
    for _ in range(DRAWS // 3):
        path = choose(draw, sorted(whole))
        tree = json.loads(whole[path])
        key = choose(draw, [*tree, *(foreign if path.name == "config.json" else [])])
        text = json.dumps(tree | {key: choose(draw, JSON)})
        path.write_text(choose(draw, [text, text, text, text, "", "{}", "[" * 50_000, text[:-9]]))
        is_done_or_one_line("-m", "twell_jax.generate", "model", "--prompt", "x")
        path.write_bytes(whole[path])
