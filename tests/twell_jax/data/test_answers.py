"""Conversations and instructions: which of their tokens are learnt, from records to batches."""

import json
import logging

import numpy as np
import pytest
import tokenizers as hf

from tests.packages import needed
from twell_jax import data
from twell_jax.config import ConfigError, DataConfig
from twell_jax.data import chats, marks, sources, tokenizers
from twell_jax.data.documents import Answered, divided
from twell_jax.data.tokenizers import ByteTokenizer

needed("jinja2")

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
<{{ message.role }}>{{ message.content | trim }}<|endoftext|>
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": " four "},
    {"role": "user", "content": "sûr?"},
    {"role": "assistant", "content": "oui 🙂"},
]
LEARNT = "four<|endoftext|>oui 🙂<|endoftext|>"


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def chat_files(tmp_path, template, rows, name="a.jsonl", **settings):
    path = tmp_path / name
    lines = map(json.dumps, rows)
    path.write_text("\n".join(lines) if name.endswith("l") else f"[{', '.join(lines)}]")
    return {
        "source": "files", "paths": [str(path)], "format": "messages", "chat_template": template,
        **settings,
    }  # fmt: skip


def read(settings):
    data_config = DataConfig(**settings)
    return list(sources.documents(sources.text_files(data_config), data_config))


def learnt(tokenizer, tokens):
    """The text of the tokens that count, and of all."""
    ids, counts = marks.ids(tokens), marks.counts(tokens)
    name = {tokenizer.eot_id: "<|endoftext|>"}
    return tuple(
        "".join(
            part if isinstance(part, str) else tokenizer.decode(part)
            for part in _parts(chosen.tolist(), name)
        )
        for chosen in (ids[counts], ids)
    )


def _parts(ids, name):
    part = []
    for i in ids:
        if i in name:
            yield part
            yield name[i]
            part = []
        else:
            part.append(i)
    yield part


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_answers_of_a_conversation_are_learnt(tmp_path, template, documents, kind):
    tokenizer = tokenizers.train_bpe(documents, 330) if kind == "bpe" else ByteTokenizer()
    found = read(chat_files(tmp_path, template, [{"messages": CHAT}]))
    (tokens,) = tokenizers.encode_documents(tokenizer, found)
    assert tokens.dtype == np.int32
    chosen, whole = learnt(tokenizer, tokens)
    # The end of the document belongs to the answer before it.
    assert chosen == LEARNT + "<|endoftext|>"
    assert whole == found[0].text + "<|endoftext|>"
    assert whole.startswith("<system>Be short.<|endoftext|><user>2+2?<|endoftext|><assistant>four")


def test_the_end_of_a_document_is_not_learnt_after_a_question(tmp_path, template):
    (document,) = read(chat_files(tmp_path, template, [{"messages": CHAT[:4]}]))
    (tokens,) = tokenizers.encode_documents(ByteTokenizer(), [document])
    assert learnt(ByteTokenizer(), tokens)[0] == "four<|endoftext|>"


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_completions_are_learnt_and_plain_text(tmp_path, documents, kind):
    tokenizer = tokenizers.train_bpe(documents, 330) if kind == "bpe" else ByteTokenizer()
    rows = [{"prompt": "say <|endoftext|>:", "completion": " alpha <|endoftext|>"}]
    found = read(chat_files(tmp_path, None, rows, format="completion"))
    (tokens,) = tokenizers.encode_documents(tokenizer, found)
    chosen, _ = learnt(tokenizer, tokens)
    assert chosen == " alpha <|endoftext|>" + "<|endoftext|>"
    assert np.sum(marks.ids(tokens) == tokenizer.eot_id) == 1  # the document's own


def test_a_token_with_a_part_of_an_answer_is_learnt(documents):
    bpe = tokenizers.train_bpe([" alpha"] * 9 + documents, 330)
    (whole,) = bpe.encode([" alpha"])
    assert whole.size == 1
    (tokens,) = tokenizers.encode_documents(bpe, [Answered("x alpha", ((2, 7),))])
    assert learnt(bpe, tokens)[0] == " alpha<|endoftext|>"


def test_an_array_in_a_json_file_and_json_lines_are_the_same_documents(tmp_path, template):
    rows = [{"messages": CHAT}, {"messages": CHAT[1:]}]
    lines = read(chat_files(tmp_path, template, rows))
    assert read(chat_files(tmp_path, template, rows, "a.json")) == lines and len(lines) == 2
    (tmp_path / "b.json").write_text((tmp_path / "a.jsonl").read_text())
    settings = chat_files(tmp_path, template, rows) | {"paths": [str(tmp_path / "b.json")]}
    assert read(settings) == lines


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"no field 'messages' \(data\.format=messages\); there are: text"),
        ({"messages": "hi"}, "field 'messages' must hold a list of objects with role and content"),
        ({"messages": [{"role": "user"}]}, "message 1: 'content' must hold text, not NoneType"),
        ({"messages": CHAT[:2]}, "no message is of the role 'assistant', so there is nothing"),
        (
            {"messages": CHAT, "tools": [{"name": "f"}]},
            "field 'tools': conversations with tools are not supported",
        ),
    ],
)
def test_a_record_without_a_conversation_is_named(tmp_path, template, row, message):
    with pytest.raises(ConfigError, match=rf"^data\.paths: .*a\.jsonl:2: {message}"):
        read(chat_files(tmp_path, template, [{"messages": CHAT}, row]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "completion": ""}, "field 'completion' is empty"),
        ({"prompt": "x"}, "no field 'completion'"),
        ({"prompt": CHAT, "completion": CHAT}, "field 'prompt' must hold text, not list"),
    ],
)
def test_a_record_without_a_completion_is_named(tmp_path, row, message):
    with pytest.raises(ConfigError, match=rf"a\.jsonl:1: {message}"):
        read(chat_files(tmp_path, None, [row], format="completion"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for", "data.chat_template: no template of Jinja"),
        ("{{ raise_exception('no system') }}", "does not serve this .*ValueError: no system"),
        ("{{ messages.__class__.__mro__ }}", "does not serve this conversation .SecurityError"),
        # It leaves out former answers, as templates of models that reason do with their thoughts.
        ("{{ messages[-1].content }}", "message 3: the chat template writes what comes before"),
    ],
)
def test_a_template_that_does_not_serve_is_one_line(tmp_path, template, source, message):
    (tmp_path / "template.jinja").write_text(source)
    with pytest.raises(ConfigError, match=message):
        read(chat_files(tmp_path, template, [{"messages": CHAT}]))


def test_marks_of_answers_for_transformers_change_nothing(tmp_path, template):
    settings = chat_files(tmp_path, template, [{"messages": CHAT}])
    plain = read(settings)
    content = "{{ message.content | trim }}"
    marked = "{% generation %}" + content + "{%- endgeneration %}"
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace(content, marked))
    assert read(settings) == plain


def test_the_template_is_that_of_the_tokenizer(tmp_path, documents, template):
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizers.train_bpe(documents, 300).backend.save(str(directory / "tokenizer.json"))
    rows = [{"messages": CHAT}]
    settings = chat_files(tmp_path, None, rows, tokenizer=str(directory))
    with pytest.raises(ConfigError, match=r"data\.chat_template: data\.tokenizer=.* has no chat"):
        read(settings)
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    for stored in (TEMPLATE, named):
        tree = tokens | {"chat_template": stored}
        (directory / "tokenizer_config.json").write_text(json.dumps(tree))
        (found,) = read(settings)
        assert found.text.startswith("<s><system>Be short.")
    (directory / "chat_template.jinja").write_text("{{ eos_token }}" + TEMPLATE)
    assert read(settings)[0].text.startswith("</s><s><system>")
    assert read(settings | {"chat_template": template}) == [found]


def test_a_template_of_the_hub_is_fetched_and_then_in_the_cache(tmp_path):
    needed("huggingface_hub")
    from tests import hub as local_hub

    directory = tmp_path / "published"
    directory.mkdir()
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    settings = chat_files(tmp_path, None, [{"messages": CHAT}], tokenizer="org/small@v1")
    home = tmp_path / "home"
    with local_hub.serve() as (published, address):
        published.publish("org/small", directory, "v1")
        with local_hub.environment(HF_ENDPOINT=address, HF_HOME=home):
            found = read(settings)
    assert found[0].text.startswith("<s><system>")
    with local_hub.environment(HF_HUB_OFFLINE="1", HF_HOME=home):
        assert read(settings) == found
        with pytest.raises(ConfigError, match=r"org/other: tokenizer_config\.json cannot be read"):
            read(settings | {"tokenizer": "org/other"})


def test_broken_settings_of_a_tokenizer_are_one_line(tmp_path):
    settings = chat_files(tmp_path, None, [{"messages": CHAT}], tokenizer=str(tmp_path))
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(
            ConfigError, match=r"tokenizer_config\.json must hold an object of JSON"
        ):
            read(settings)
    with pytest.raises(ConfigError, match=r"chat_template: /nowhere: cannot be read \(No such"):
        read(settings | {"tokenizer": "byte", "chat_template": "/nowhere"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "stdlib", "format": "messages"}, "data.format: source=stdlib has no records"),
        ({"chat_template": "x.jinja"}, "data.chat_template: format=text does not use it"),
    ],
)
def test_settings_without_records_are_refused(make_config, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_config(settings)


def test_text_has_no_records(tmp_path, template):
    (tmp_path / "a.txt").write_text("text")
    settings = chat_files(tmp_path, template, []) | {"paths": [str(tmp_path / "a.txt")]}
    with pytest.raises(ConfigError, match=r"a\.txt: holds no records, which data\.format=messages"):
        read(settings)


def test_a_document_may_be_divided():
    document = Answered("abcdef", ((1, 3), (4, 6)))
    assert divided(document, 2) == (Answered("ab", ((1, 2),)), Answered("cdef", ((0, 1), (2, 4))))
    assert divided(document, 9) == (document, Answered("", ()))


def conversations(count):
    rows = []
    for i in range(count):
        question = {"role": "user", "content": f"what is {i} times {i + 1}?"}
        rows.append({"messages": [question, {"role": "assistant", "content": f"it is {i * i}"}]})
    return rows


def test_batches_and_held_out_sequences_are_marked_and_cached(
    make_config, tmp_path, template, monkeypatch
):
    config = make_config(chat_files(tmp_path, template, conversations(40)), eval_sequences=100)
    loaded = data.load(config)
    tokens = next(iter(loaded.train))["tokens"]
    for windows in (tokens, loaded.held_out):
        assert windows.dtype == np.int32
        shares = marks.counts(windows).mean()
        assert 0.1 < shares < 0.6 and marks.ids(windows).max() == 256
    chosen, whole = learnt(ByteTokenizer(), loaded.held_out[:, :-1].ravel())
    assert "what" in whole and "what" not in chosen and "it is 1" in chosen
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "encode_documents", lambda *_: pytest.fail("tokenised again"))
        assert data.load(config).fingerprint == loaded.fingerprint
    # Another template, or the same records as plain text, are other data.
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("user", "u").replace(" | trim", ""))
    assert data.load(config).fingerprint == loaded.fingerprint  # the same text
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("<assistant>", "<assistant> "))
    with pytest.raises(ConfigError, match="the answer cannot be found"):
        data.load(config)


def test_learning_other_parts_is_other_data(make_config, tmp_path):
    rows = [{"prompt": f"say {i}:", "completion": f" {i * i} said"} for i in range(60)]
    settings = chat_files(tmp_path, None, rows, format="completion")
    first = data.load(make_config(settings))
    for row in rows:  # the same text, but more of it is learnt
        row["completion"] = f":{row['completion']}"
        row["prompt"] = row["prompt"][:-1]
    second = data.load(make_config(chat_files(tmp_path, None, rows, format="completion")))
    np.testing.assert_array_equal(marks.ids(first.held_out), marks.ids(second.held_out))
    assert first.fingerprint != second.fingerprint
    assert second.held_out_bytes > first.held_out_bytes
    counted = marks.counts(first.held_out[:, 1:])
    ends = marks.ids(first.held_out[:, 1:])[counted] == 256
    assert first.held_out_bytes == counted.sum() - ends.sum()
    assert first.bits_per_byte(np.log(2)) == pytest.approx(counted.sum() / first.held_out_bytes)


def test_the_unigram_baseline_counts_answers_alone():
    train = marks.marked(np.array([[0, 1, 1, 2, 2]]), np.array([[1, 1, 1, 0, 0]]) > 0)
    held_out = marks.marked(np.array([[0, 2, 1]]), np.array([[1, 0, 1]]) > 0)
    found = data.unigram_cross_entropy(train, held_out, vocab_size=3)
    assert found == pytest.approx(-np.log(3 / 5))  # two of 1, and one for each token


def test_too_few_records_are_divided(make_config, tmp_path, caplog):
    rows = [{"prompt": "say yes", "completion": " yes" * 90}]
    with caplog.at_level(logging.WARNING):
        loaded = data.load(make_config(chat_files(tmp_path, None, rows, format="completion")))
    assert "too few documents to hold out whole ones" in caplog.text
    assert (
        marks.counts(loaded.held_out).all()
        and "yes yes" in learnt(ByteTokenizer(), loaded.held_out[0])[0]
    )


def test_held_out_text_without_an_answer_is_refused(make_config, tmp_path):
    rows = [{"prompt": "question " * 90, "completion": "yes"}]
    with pytest.raises(ConfigError, match="the held-out sequences have no answer; give more text"):
        data.load(make_config(chat_files(tmp_path, None, rows, format="completion")))


def test_a_template_that_ends_documents_within_them_cannot_mask_them(
    make_config, tmp_path, template
):
    settings = chat_files(tmp_path, template, conversations(40))
    with pytest.raises(ConfigError, match=r"write data\.mask_documents=false"):
        data.load(make_config(settings | {"mask_documents": True}))
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("<|endoftext|>", "<end>"))
    assert data.load(make_config(settings | {"mask_documents": True}))


def test_rows_of_a_dataset_are_conversations(make_config, tmp_path, template, caplog):
    needed("datasets")
    settings = chat_files(tmp_path, template, conversations(40))
    of_files = data.load(make_config(settings))
    directory = tmp_path / "dataset"
    directory.mkdir()
    rows = [*conversations(40), {"messages": None}]
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    streamed = settings | {"source": "hf", "paths": [], "name": str(directory)}
    loaded = data.load(make_config(streamed))
    first = loaded.held_out[0]
    np.testing.assert_array_equal(first, of_files.held_out[0])
    batches = iter(loaded.train)
    taken = [next(batches)["tokens"] for _ in range(30)]
    assert all(marks.counts(tokens).any() and not marks.counts(tokens).all() for tokens in taken)
    assert "row 41 is left out, as its field 'messages' is null" in caplog.text
    again = iter(loaded.train)
    again.set_state(json.loads(json.dumps(batches.get_state())))
    np.testing.assert_array_equal(next(again)["tokens"], next(batches)["tokens"])
    with pytest.raises(ConfigError, match="row 41: field 'messages' must hold a list"):
        strict = iter(data.load(make_config(streamed | {"strict": True})).train)
        for _ in range(30):
            next(strict)


def test_a_conversation_may_begin_with_an_answer():
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    template = chats.Template(source, "", "")
    found = chats.conversation(template, [{"role": "assistant", "content": "hi"}])
    assert found == Answered("[hi]", ((0, 4),), special_tokens=True)


def test_the_end_token_is_the_tokenizers_own_and_a_run_keeps_its_template(tmp_path, template):
    words = {"a": 0, "</s>": 1}
    backend = hf.Tokenizer(hf.models.WordLevel(words, unk_token="a"))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    run, of_chats = tmp_path / "run", {"source": "files", "paths": ["a"], "format": "messages"}
    (run / "source").mkdir(parents=True)
    tokenizers.save(tokenizers.SubwordTokenizer(backend, "</s>"), run / "tokenizer.json")
    for name in (tmp_path / "tokenizer.json", run):
        named = DataConfig(**of_chats, tokenizer=str(name), chat_template=template)
        assert chats.template(named).eos_token == "</s>"
    (run / "source" / "chat_template.jinja").write_text("{{ eos_token }}")
    (run / "source" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    found = chats.template(DataConfig(**of_chats, tokenizer=str(run)))
    assert (found.source, found.eos_token) == ("{{ eos_token }}", "<end>")
