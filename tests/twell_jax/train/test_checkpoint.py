"""Checkpoints come back to the bit, or not at all; what is broken is never lost or used.

Digests differ where arrays differ, whatever the devices that hold them.
"""

import dataclasses
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.seeds import rng
from tests.twell_jax.train.saved import (
    abstract,
    assert_is_step,
    assert_same,
    contents,
    continue_to,
    make_state,
    restore,
    save,
)
from twell_jax.train import checkpoint
from twell_jax.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    digest_of_json,
    digest_texts,
    digests_of_arrays,
)
from twell_jax.train.sparsity_control import SparsityControl


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "two"
    save(directory, 3, 6)
    return directory


@pytest.fixture
def directory(two_steps, tmp_path):
    """A copy of a directory with checkpoints of step 3 and 6, to be damaged."""
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def test_newest_step_is_restored_to_the_bit(directory):
    assert_is_step(restore(directory), 6)


def test_the_controller_of_the_l1_coefficient_is_kept_if_there_is_one(tmp_path):
    control = SparsityControl(*map(jnp.float32, (-7.3, [0.1, -0.2], [31.7], [33.3])))
    saved = dataclasses.replace(make_state(6), control=control)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(6, saved, {})
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        restored, _ = checkpoints.restore(abstract(saved))
    assert_same(restored, saved)


def test_a_run_without_a_controller_saves_what_it_always_did(directory):
    """The names by which older checkpoints are read, and by which older versions read ours."""
    metadata = json.loads((directory / "6/state/_METADATA").read_text())["tree_metadata"]
    names = {entry["key_metadata"][0]["key"] for entry in metadata.values()}
    assert names == {"step", "params", "opt_state", "idle_steps"}


def test_rounded_matrices_are_not_saved_as_they_follow_from_the_parameters(tmp_path):
    state = make_state(1)
    with_rounded = dataclasses.replace(state, rounded=nnx.State({"w": state.params["w"]}))
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, with_rounded, {})
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        restored, _ = checkpoints.restore(abstract(with_rounded))
    assert_same(restored, state)


def test_the_position_alone(directory):
    with Checkpoints(directory, keep=3) as checkpoints:
        assert checkpoints.restore_position() == {"next_index": 6}
        (directory / "6/data/metadata").write_text('{"next_index": 7}')
        assert checkpoints.restore_position() == {"next_index": 3}


def test_no_checkpoints_yet(tmp_path):
    assert restore(tmp_path / "new") is None


def test_newest_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"3", "4"}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.newest_before(5) == tmp_path / "4"
        assert checkpoints.newest_before(4) == tmp_path / "3"
        assert checkpoints.newest_before(3) is None


def test_state_may_be_consumed_while_it_is_written(tmp_path):
    @jax.jit(donate_argnums=0)
    def overwrite(state):
        return jax.tree.map(lambda x: x * 0 + 7, state)

    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            state = jax.tree.map(jnp.copy, make_state(step))
            checkpoints.save(step, state, {"next_index": step})
            for _ in range(5):
                state = overwrite(state)
    assert_is_step(restore(tmp_path), 3)
    shutil.rmtree(tmp_path / "3")
    assert_is_step(restore(tmp_path), 2)


def damages():
    def truncate_data(step):
        for path in (step / "state").rglob("d/*"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def delete_data(step):
        for path in (step / "state").rglob("d/*"):
            path.unlink()

    def empty(step):
        shutil.rmtree(step)
        step.mkdir()

    yield truncate_data
    yield delete_data
    yield empty
    yield lambda step: shutil.rmtree(step / "state")
    yield lambda step: shutil.rmtree(step / "data")
    yield lambda step: (step / "state/_METADATA").write_text("{")
    yield lambda step: (step / "state/manifest.ocdbt").unlink()
    yield lambda step: (step / "data/metadata").write_text("")
    yield lambda step: (step / "data/metadata").write_text('{"next_index": 7}')
    yield lambda step: (step / "digests/metadata").write_text("{}")
    # What is read without any error, but is not what was saved:
    yield lambda step: shutil.copy(step.parent / "3/digests/metadata", step / "digests")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("damage", list(damages()))
def test_a_broken_newest_step_is_set_aside(directory, damage, caplog):
    damage(directory / "6")
    broken = contents(directory / "6")
    with caplog.at_level(logging.WARNING):
        restored = restore(directory)
    assert_is_step(restored, 3)
    assert "step 6" in caplog.text
    assert contents(directory / "6") == broken  # who only reads changes nothing
    with Checkpoints(directory, keep=3) as checkpoints:
        checkpoints.restore(abstract(make_state(0)))
        assert checkpoints.newest_before(8) == directory / "3"
    # Who goes on can save the step again; the broken one is kept beside it.
    continue_to(directory, 6)
    assert contents(directory / "6.broken") == broken
    assert_is_step(restore(directory), 6)


def test_no_flipped_bit_is_restored(tmp_path):
    # So large that Orbax keeps the arrays in a file of their own, without checksums.
    saved, flips = dataclasses.replace(make_state(6, (64, 64)), opt_state=()), 0
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(6, saved, {"next_index": 6})
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    arrays = max(files, key=lambda path: path.stat().st_size)
    noticed = dict.fromkeys(files, 0)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for path in files:
            whole = path.read_bytes()
            for _ in range(30 if path == arrays else 6):
                damaged = bytearray(whole)
                damaged[rng().integers(len(whole))] ^= 1 << rng().integers(8)
                path.write_bytes(damaged)
                try:
                    state, position = checkpoints.restore(abstract(saved))
                except CheckpointError:
                    noticed[path] += 1
                else:
                    assert_same(state, saved)
                    assert position == {"next_index": 6}
                flips += 1
            path.write_bytes(whole)
    assert flips > 100
    assert noticed[arrays] > 25  # the others fall on fields that nothing reads
    assert noticed[tmp_path / "6/data/metadata"] and noticed[tmp_path / "6/digests/metadata"]


def test_a_checkpoint_of_an_older_version_is_restored_with_a_warning(directory, caplog):
    shutil.rmtree(directory / "6/digests")
    with caplog.at_level(logging.WARNING):
        assert_is_step(restore(directory), 6)
    assert "6 has no digests, as an older version saved it: damage cannot be noticed" in caplog.text


def test_a_step_may_break_more_than_once(directory):
    for count in (1, 2, 3):
        (directory / "6/state/_METADATA").write_text(f"broken {count}")
        assert_is_step(restore(directory), 3)
        continue_to(directory, 6)
    aside = [path / "state/_METADATA" for path in directory.glob("6.broken*")]
    assert {path.read_text() for path in aside} == {"broken 1", "broken 2", "broken 3"}


def test_parameters_alone_are_those_of_the_newest_whole_step(directory):
    def params():
        with Checkpoints(directory, keep=3) as checkpoints:
            return checkpoints.restore_params(abstract(make_state(0).params))

    assert_same(params(), make_state(6).params)
    shutil.copy(directory / "3/digests/metadata", directory / "6/digests")
    assert_same(params(), make_state(3).params)
    (directory / "3/state/manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        params()


def test_without_a_whole_step_nothing_is_touched(directory):
    for step in ("3", "6"):
        (directory / step / "state/manifest.ocdbt").unlink()
    before = contents(directory)
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint is whole.*step 6.*step 3"):
        restore(directory)
    assert contents(directory) == before


def test_a_foreign_directory_is_not_touched(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/model.bin").write_bytes(b"weights of something else")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="step 7"):
        restore(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "other",
    [
        lambda state: state.__class__(state.step, state.params, state.opt_state, jnp.zeros((2, 4))),
        lambda state: state.__class__(
            state.step, nnx.State({**state.params, "c": nnx.Param(jnp.zeros(2))}), (), state.step
        ),
    ],
    ids=["another shape", "another parameter"],
)
def test_checkpoints_of_another_model_are_an_error(directory, other):
    before = contents(directory)
    with (
        Checkpoints(directory, keep=3) as checkpoints,
        pytest.raises(CheckpointError, match="fits this model"),
    ):
        checkpoints.restore(abstract(other(make_state(0))))
    assert contents(directory) == before


def test_remains_of_a_killed_write_are_not_a_checkpoint(directory):
    shutil.copytree(directory / "6", directory / "9.orbax-checkpoint-tmp")
    assert_is_step(restore(directory), 6)
    save(directory, 9)
    assert_is_step(restore(directory), 9)
    assert not list(directory.glob("*tmp*"))


def test_restores_onto_another_mesh(tmp_path):
    devices = jax.devices("cpu")[:8]
    data = jax.make_mesh((8, 1), ("data", "fsdp"), devices=devices)
    fsdp = jax.make_mesh((1, 8), ("data", "fsdp"), devices=devices)

    def shardings(mesh):
        return jax.tree.map(
            lambda x: NamedSharding(mesh, P("fsdp") if x.shape == (16, 8) else P()), make_state(0)
        )

    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(6, jax.device_put(make_state(6), shardings(data)), {"next_index": 6})
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        make_state(0),
        shardings(fsdp),
    )
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        restored = checkpoints.restore(target)
    assert_is_step(restored, 6)
    assert jax.tree.map(lambda x: x.sharding, restored[0]) == shardings(fsdp)
    assert restored[0].params["w"].addressable_shards[0].data.shape == (2, 8)


def digest_of(array):
    (found,) = {text for x in digests_of_arrays(array).values() for text in digest_texts(x)}
    return found


def drawn(dtype, shape):
    """An array of random bits, as signed integers of its width and as `dtype`."""
    bits = rng().integers(-(2**15), 2**15, (*shape, 2), dtype=np.int16)
    bits = bits[..., 0] if dtype == jnp.bfloat16 else bits.view(np.int32)[..., 0]
    return bits, lambda changed: jnp.asarray(changed.view(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("shape", [(), (16, 24)])
def test_every_bit_counts(dtype, shape):
    bits, as_dtype = drawn(dtype, shape)
    expected = digest_of(as_dtype(bits))
    assert digest_of(as_dtype(bits.copy())) == expected
    flips = [np.left_shift(bits.dtype.type(1), i) for i in range(8 * bits.dtype.itemsize)]
    position = tuple(rng().integers(shape)) if shape else ()
    for flip in flips:
        changed = bits.copy()
        changed[position] ^= flip
        assert digest_of(as_dtype(changed)) != expected


def test_what_would_cancel_in_a_plain_sum_counts():
    bits, as_dtype = drawn(jnp.float32, (16, 24))
    bits[0, 0], bits[3, 5] = 17, 18
    expected = digest_of(as_dtype(bits))
    swapped, signs = bits.copy(), bits.copy()
    swapped[0, 0], swapped[3, 5] = 18, 17
    signs[[2, 7], [1, 1]] ^= np.int32(-(2**31))
    for changed in (swapped, signs, bits[::-1].copy(), np.roll(bits, 1), np.zeros_like(bits)):
        assert digest_of(as_dtype(changed)) != expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_every_mesh_finds_the_same(dtype):
    bits, as_dtype = drawn(dtype, (16, 24))
    array = as_dtype(bits)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), devices=jax.devices("cpu")[:8])
    for spec in (P(), P("fsdp"), P(None, "fsdp"), P("data", "fsdp"), P(("data", "fsdp"))):
        assert digest_of(jax.device_put(array, NamedSharding(mesh, spec))) == digest_of(array)


def test_a_digest_needs_no_copy_of_the_array():
    array = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    memory = checkpoint._digest.lower(array).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * memory.argument_size_in_bytes


def test_json_is_compared_as_it_comes_back():
    saved = {"b": (1, 0.1), "a": {"c": None}}
    assert digest_of_json(saved) == digest_of_json({"a": {"c": None}, "b": [1, 0.1]})
    assert digest_of_json(saved) != digest_of_json({"a": {"c": None}, "b": [1, 0.2]})
