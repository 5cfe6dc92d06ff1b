"""The text that a run writes at each evaluation."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.twell_jax.train.small import CONTEXT, END, VOCAB, settings, trainer_on
from twell_jax.data import marks
from twell_jax.models.transformer import graphdef
from twell_jax.train import sample


class Letters:
    """Ids are letters from A on; the last one ends a text."""

    eot_id = END

    def decode(self, ids):
        return "".join(chr(65 + i) for i in ids if i != END)


HELD_OUT = np.arange(2 * CONTEXT + 2).reshape(2, -1) * 7 % END
DATA = SimpleNamespace(tokenizer=Letters(), held_out=HELD_OUT, held_out_bytes=9)


@pytest.mark.parametrize(("devices", "fsdp"), [pytest.param(1, 1, marks=pytest.mark.slow), (4, 2)])
def test_a_sample_continues_held_out_text_as_the_model_predicts_it(devices, fsdp):
    trainer, run = trainer_on(devices, fsdp), settings()
    with jax.set_mesh(trainer.mesh):
        # A model so sure of itself draws the likeliest token.
        params = jax.tree.map(lambda leaf: 30 * leaf, trainer.init().params)
        write = sample.writer(run, DATA, trainer.abstract_state.params, trainer.mesh)
        written = write(params)
        assert write(params) == written
    prompt = HELD_OUT[0][: CONTEXT // 2]
    assert written.prompt == Letters().decode(prompt)
    text = written.prompt + written.text
    tokens = np.array([[ord(letter) - 65 for letter in text]])
    model = nnx.merge(graphdef(run.model), jax.tree.map(np.asarray, params))
    likeliest = np.asarray(model(tokens)[0]).argmax(-1)[0]
    following = likeliest[len(prompt) - 1 :]
    ended = len(text) < CONTEXT
    assert following[:-1].tolist() == tokens[0, len(prompt) :].tolist()
    assert ended == (following[-1] == END) or not ended


def test_there_is_no_sample_where_none_is_wanted_or_the_text_is_not_known():
    trainer = trainer_on(1)
    of_run = trainer.abstract_state.params, trainer.mesh
    unknown = SimpleNamespace(tokenizer=Letters(), held_out=HELD_OUT, held_out_bytes=None)
    assert sample.writer(settings(), unknown, *of_run) is None
    assert sample.writer(settings(sample_tokens=0), DATA, *of_run) is None
    assert VOCAB == END + 1


def test_the_prompt_of_a_sample_is_a_question_if_there_are_answers():
    ids = np.arange(12).reshape(2, 6)
    assert sample._prompt(ids, 4).tolist() == [0, 1, 2, 3]
    counts = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]]) > 0
    assert sample._prompt(marks.marked(ids, counts), 2).tolist() == [7, 8]
    assert sample._prompt(marks.marked(ids, counts), 9).tolist() == [6, 7, 8]
