import io
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.config import ConfigError
from twell_jax.data import pipeline, shards
from twell_jax.data.shards import TokenStream
from twell_jax.data.windows import Windows

CONTEXT = 4
WINDOWS = 11


def batches(seed=0, batch=4, process_index=0, process_count=1):
    stream = TokenStream([np.arange(WINDOWS * CONTEXT + 1, dtype=np.uint16)])
    windows = Windows(stream, CONTEXT, vocab_size=1000)
    return pipeline.batches(
        windows, seed=seed, batch=batch, process_index=process_index, process_count=process_count
    )


def take(iterator, steps):
    return np.stack([batch["tokens"] for batch in itertools.islice(iterator, steps)])


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 12), st.data())
def test_windows_reproduce_the_stream(sizes, context, data):
    tokens = np.arange(sum(sizes), dtype=np.uint32)
    stream = TokenStream(np.split(tokens, np.cumsum(sizes)[:-1]))
    windows = Windows(stream, context, vocab_size=1000)
    assert len(stream) == tokens.size
    assert len(windows) == max(tokens.size - 1, 0) // context
    predicted = [windows[i]["tokens"][1:] for i in range(len(windows))]
    inputs = [windows[i]["tokens"][:-1] for i in range(len(windows))]
    covered = len(windows) * context
    if covered:
        np.testing.assert_array_equal(np.concatenate(predicted), tokens[1 : covered + 1])
        np.testing.assert_array_equal(np.concatenate(inputs), tokens[:covered])
    cut = data.draw(st.integers(0, tokens.size))
    before, after = stream.split(cut)
    assert (len(before), len(after)) == (cut, tokens.size - cut)
    if 0 < cut < tokens.size:
        joined = [before.read(0, cut), after.read(0, tokens.size - cut)]
        np.testing.assert_array_equal(np.concatenate(joined), tokens)


def test_spread_is_even_and_distinct():
    windows = Windows(TokenStream([np.arange(41, dtype=np.uint16)]), CONTEXT, vocab_size=1000)
    assert windows.spread(4)[:, 0].tolist() == [0, 8, 20, 28]
    assert windows.spread(10)[:, 0].tolist() == list(range(0, 40, 4))
    assert windows.spread(99).shape == (10, CONTEXT + 1)
    assert windows.spread(99).dtype == np.int32


def test_every_epoch_holds_each_window_once_in_a_new_order():
    epochs = take(iter(batches(batch=1)), 3 * WINDOWS)[:, 0].reshape(3, WINDOWS, CONTEXT + 1)
    starts = [tuple(epoch[:, 0].tolist()) for epoch in epochs]
    assert all(sorted(order) == list(range(0, WINDOWS * CONTEXT, CONTEXT)) for order in starts)
    assert len({*starts, tuple(sorted(starts[0]))}) == 4
    assert (epochs == epochs[..., :1] + np.arange(CONTEXT + 1)).all()


def test_order_depends_on_the_seed_alone():
    one, again, other = (take(iter(batches(seed=seed)), 6) for seed in (2**40, 2**40, 1))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    assert one.dtype == np.int32
    # No seed goes through the orders of another one, an epoch later.
    one, other = (take(iter(batches(seed=seed, batch=1)), 2 * WINDOWS) for seed in (0, 1))
    assert (one[WINDOWS:] != other[:WINDOWS]).any()


@pytest.mark.parametrize("step", [0, 1, 2, 3, 9])  # an epoch is 2.75 steps
def test_resume_is_exact(step):
    whole = take(iter(batches()), step + 5)
    first = iter(batches())
    np.testing.assert_array_equal(take(first, step), whole[:step]) if step else None
    second = iter(batches())
    second.set_state(json.loads(json.dumps(first.get_state())))
    np.testing.assert_array_equal(take(second, 5), whole[step:])


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_batch_of_one(count):
    single = iter(batches())
    processes = [iter(batches(process_index=i, process_count=count)) for i in range(count)]
    for _ in range(6):  # into the third epoch
        whole = next(single)["tokens"]
        parts = [next(process)["tokens"] for process in processes]
        assert all(part.shape == (4 // count, CONTEXT + 1) for part in parts)
        assert sorted(np.concatenate(parts).tolist()) == sorted(whole.tolist())
        assert all(process.get_state() == single.get_state() for process in processes)


def test_token_beyond_the_vocabulary():
    windows = Windows(TokenStream([np.array([1, 2, 70000], np.uint32)]), 2, vocab_size=70000)
    with pytest.raises(ConfigError, match=r"^model\.vocab_size: the data holds token 70000"):
        windows[0]


def test_shards_are_written_and_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_SHARD_TOKENS", 10)
    shards.write(tmp_path, "x", np.split(np.arange(37, dtype=np.uint16), [4, 9, 10, 23, 30]))
    paths = sorted(tmp_path.glob("x-*.npy"))
    assert len(paths) == 3
    stream = shards.open_shards(paths, key="data.paths")
    np.testing.assert_array_equal(stream.read(0, 37), np.arange(37))
    np.testing.assert_array_equal(stream.read(9, 24), np.arange(9, 24))


def npz():
    file = io.BytesIO()
    np.savez(file, tokens=np.zeros(9, np.uint16))
    return file.getvalue()


def header(shape):
    """A file of one token, whose header has this instead of a shape."""
    text = f"{{'descr': '<u2', 'fortran_order': False, {shape}}}\n".encode()
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + b"\7\0"


def test_a_shard_of_no_tokens_is_read(tmp_path):
    np.save(tmp_path / "empty.npy", np.zeros(0, np.uint32))
    (tmp_path / "one.npy").write_bytes(header("'shape': (1,)"))
    stream = shards.open_shards(sorted(tmp_path.glob("*")), key="data.paths")
    assert stream.read(0, 1).tolist() == [7] and len(stream) == 1


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(4, np.int32), "1-D int32"),
        (np.zeros((2, 2), np.uint16), "2-D uint16"),
        (np.zeros(4, np.float32), "1-D float32"),
        (b"no array at all", "not a readable .npy file"),
        (b"", "not a readable .npy file"),
        (npz(), "one array, not .npz"),
        (npz()[:50], "one array, not .npz"),
        (header("'shape': (4, }"), "not a readable .npy file"),
        (header("'shape': (" * 900), "not a readable .npy file"),
        (header("'shape': (4,), " + " " * 60_000), "not a readable .npy file"),
        (b"\x93NUMPY\2\0\xff\xff\xff\xff{", "not a readable .npy file"),
        (header("'shape': (True,)"), r"1-D uint16 of shape \(True,\)"),
        (header("'shape': (10**9,)"), "not a readable .npy file"),
        (header("'shape': (1000000000000,)"), "header says 1000000000000 tokens of 2 bytes, but 2"),
        (header("'shape': (-1,)"), "header says -1 tokens of 2 bytes, but 2 bytes follow"),
        (np.zeros(4, ">u2"), "1-D >u2"),
        (header("'shape': (1,)") + b"more", "header says 1 tokens of 2 bytes, but 6 bytes follow"),
    ],
)
def test_bad_shards_are_named(tmp_path, array, message):
    path = tmp_path / "bad.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, array)
    with pytest.raises(ConfigError, match=rf"^data\.paths: .*bad\.npy: .*{message}"):
        shards.open_shards([path], key="data.paths")


def test_bare_ids_are_named_with_what_makes_a_shard_of_them(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    with pytest.raises(ConfigError) as error:
        shards.open_shards([path], key="data.paths")
    says = str(error.value)
    assert says.startswith(f"data.paths: {path}: not a readable .npy file") and "pickle" not in says
    call = says[says.index("numpy.save(") : says.index("numpy.uint16))") + len("numpy.uint16))")]
    eval(call.replace("'tokens.npy'", repr(str(tmp_path / "tokens.npy"))), {"numpy": np})
    stream = shards.open_shards([tmp_path / "tokens.npy"], key="data.paths")
    np.testing.assert_array_equal(stream.read(0, 1000), np.arange(1000))
