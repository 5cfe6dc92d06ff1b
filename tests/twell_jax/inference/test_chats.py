"""Chats: what is read, and where an answer ends, against transformers (extra "peers")."""

import json

import numpy as np
import pytest
import tokenizers as hf

from tests import seeds
from tests.packages import needed
from tests.twell_jax import drawn
from twell_jax.data.tokenizers import SubwordTokenizer
from twell_jax.inference import ENDED, GREEDY, generate, load
from twell_jax.models.pretrained import save_pretrained

torch = needed("torch")
transformers = needed("transformers")

pytestmark = pytest.mark.peers

SPECIAL = ["<s>", "<|start|>", "<|end|>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "  Answer in 漢字. "},
    {"role": "user", "content": "don't <s> stop\n\n1 2 3"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small model whose tokenizer puts <s> before texts and whose template begins with it."""
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=SPECIAL,
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEMPLATE + str(CHAT)] * 4, trainer)
    path = tmp_path_factory.mktemp("chats") / "model"
    model = drawn.small(vocab_size=280, context=256)
    save_pretrained(path, model, SubwordTokenizer(backend, "</s>"))
    backend.post_processor = hf.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    backend.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    change(path / "tokenizer_config.json", bos_token="<s>", split_special_tokens=False)
    return path


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("prompts_an_answer", [True, False])
def test_a_chat_has_the_ids_that_the_template_gives(directory, prompts_an_answer):
    peer = transformers.AutoTokenizer.from_pretrained(directory)
    options = {"add_generation_prompt": prompts_an_answer, "return_dict": False}
    text = peer.apply_chat_template(CHAT, tokenize=False, **options)
    expected = peer.apply_chat_template(CHAT, **options)
    lm = load(str(directory))
    assert lm.encode(text, special_tokens=True) == expected
    assert expected.count(SPECIAL.index("<s>")) == 2  # that of the template, and one in a message
    # Plain text has <s> before it and no special tokens in it.
    ids = peer(CHAT[1]["content"], split_special_tokens=True).input_ids
    assert lm.encode(CHAT[1]["content"]) == ids and ids.count(0) == 1
    assert lm.tokenizer.decode(ids[1:]) == CHAT[1]["content"]


def test_an_answer_ends_where_that_of_transformers_ends(directory):
    draw = seeds.rng()
    prompts = [draw.integers(4, 280, 9).tolist() for _ in range(4)]
    peer = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()

    def answers():
        peer.generation_config = transformers.GenerationConfig.from_pretrained(directory)
        with torch.no_grad():
            found = peer.generate(torch.tensor(prompts), max_new_tokens=16, do_sample=False)
        return found[:, 9:].tolist()

    change(directory / "generation_config.json", eos_token_id=None)
    free = answers()
    stops = [free[0][4], free[1][9]]  # two of them end what the model says by itself
    change(directory / "generation_config.json", eos_token_id=stops)
    lm = load(str(directory))
    assert set(lm.stop_ids) == set(stops)
    steps = generate(lm.model, prompts, max_tokens=16, sampling=GREEDY, stop_ids=lm.stop_ids)
    found = np.stack(list(steps), axis=1).tolist()
    for ours, theirs in zip(found, answers(), strict=True):
        ends = [i for i, token in enumerate(theirs) if token in stops]
        said = theirs[: ends[0]] if ends else theirs
        assert [token for token in ours if token != ENDED] == said
