"""Reads and writes tokenizer.json of Hugging Face models."""

import json
from pathlib import Path

import tokenizers as hf

from twell_jax.data import tokenizer_json
from twell_jax.data.chats import Template
from twell_jax.data.tokenizers import END_OF_TEXT, ByteTokenizer, SubwordTokenizer, Tokenizer
from twell_jax.models.pretrained import companions, config
from twell_jax.models.pretrained.json_file import PretrainedError, read_json


def load(directory: Path) -> SubwordTokenizer:
    """Loads the tokenizer of a model.

    Its end-of-text token is the first that the model's files name and the vocabulary has; if they
    name none, a common one.

    Raises:
      PretrainedError: there is no tokenizer.json, or the vocabulary has no end-of-text token.
    """
    path = directory / "tokenizer.json"
    try:
        backend = tokenizer_json.read(path)
    except (OSError, ValueError) as error:
        raise PretrainedError(f"{path}: cannot be read ({error})") from None
    source, ends = config.ends(directory)
    ids = ends or map(backend.token_to_id, END_OF_TEXT)
    known = [t for i in ids if i is not None and (t := backend.id_to_token(i)) is not None]
    if not known and ends:
        raise PretrainedError(
            f"{source}: eos_token_id={', '.join(map(str, ends))}, but {path} has ids up to "
            f"{max(backend.get_vocab().values(), default=-1)}; write that of its end-of-text token"
        )
    if not known:
        raise PretrainedError(
            f"{source}: has no eos_token_id, and none of {', '.join(END_OF_TEXT)} is a token in "
            f"{path}; write eos_token_id"
        )
    return SubwordTokenizer(backend, known[0])


def prefix(tokenizer: SubwordTokenizer) -> list[int]:
    """The ids that tokenizer.json puts before a text, such as the id of <s>.

    What it puts after a text is not among them, as the text is to be continued.
    """
    backend = tokenizer.backend
    # Only around ids of a text is it clear which of the added ones come first.
    for text in ("a", *backend.get_vocab()):
        with tokenizer_json.errors_are_lines():
            encoding = backend.encode(text, add_special_tokens=True)
        if 0 in encoding.special_tokens_mask:
            return encoding.ids[: encoding.special_tokens_mask.index(0)]
    return []


def bos_id(directory: Path, tokenizer: SubwordTokenizer) -> int | None:
    """The id of the token that begins a text, such as <s>; None if no file names one.

    `prefix` need not have it: some tokenizers leave it to those who call them to put it there.
    Of two files, that counts which counts for transformers.

    Raises:
      PretrainedError: a file cannot be read, or names what is no token of the vocabulary.
    """
    path, older = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    tree = read_json(path) if path.exists() else {}
    if "added_tokens_decoder" not in tree and older.exists():
        of_older = read_json(older)
        if "bos_token" in of_older:
            path, tree = older, of_older
    named = tree.get("bos_token")
    if named is None:
        return None
    token = named.get("content") if isinstance(named, dict) else named
    found = tokenizer.backend.token_to_id(token) if isinstance(token, str) else None
    if found is None:
        raise PretrainedError(
            f"{path}: bos_token={token!r} is no token in {directory / 'tokenizer.json'}; "
            "write one that is, or null"
        )
    return found


def splits_by(tokenizer: Tokenizer, pattern: str) -> bool:
    """Whether a tokenizer splits texts in Unicode's form NFC by this regular expression alone.

    Within words it is a byte-level BPE.
    """
    if not isinstance(tokenizer, SubwordTokenizer):
        return False
    tree = json.loads(tokenizer.backend.to_str())
    steps = (tree["pre_tokenizer"] or {}).get("pretokenizers", [])
    wanted = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]
    found = [{key: step[key] for key in step if key != "trim_offsets"} for step in steps]
    return tree["normalizer"] == {"type": "NFC"} and found == wanted


def save(
    directory: Path, tokenizer: Tokenizer, context: int, template: Template | None = None
) -> None:
    """Writes tokenizer.json and tokenizer_config.json, and a chat template if there is one.

    transformers then reads a text as `Tokenizer.encode` does: special tokens in it are plain text,
    unless there is a template, which writes such tokens itself.

    Raises:
      PretrainedError: the tokenizer is of an unknown type.
    """
    tokenizer = _as_subwords(tokenizer)
    backend = hf.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = None  # it might add special tokens; `Tokenizer.encode` adds none
    # `backend.save` takes no path that is no UTF-8
    (directory / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.eot,
        "pad_token": tokenizer.eot,
        "model_max_length": context,
        "split_special_tokens": template is None,
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        tokens = {"bos_token": template.bos_token, "eos_token": template.eos_token}
        settings |= {key: t for key, t in tokens.items() if backend.token_to_id(t) is not None}
        (directory / companions.TEMPLATE).write_text(template.source, encoding="utf-8")
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def is_in(directory: Path) -> bool:
    """Whether a model's directory has its tokenizer."""
    return (directory / "tokenizer.json").exists()


def require_same(source: Path, tokenizer: Tokenizer) -> None:
    """Compares the vocabulary of a directory's tokenizer.json with that of a model.

    Raises:
      PretrainedError: it is another one, or cannot be read.
    """
    path = source / "tokenizer.json"
    try:
        found = tokenizer_json.read(path).get_vocab()
    except (OSError, ValueError) as error:
        raise PretrainedError(f"{path}: cannot be read ({error})") from None
    if found != _as_subwords(tokenizer).backend.get_vocab():
        raise PretrainedError(f"{path}: is not the tokenizer that the model was trained with")


def _as_subwords(tokenizer: Tokenizer) -> SubwordTokenizer:
    """The tokenizer as the format has it; raises PretrainedError if it has no place for it."""
    if isinstance(tokenizer, ByteTokenizer):
        return _bytes_as_subwords()
    if not isinstance(tokenizer, SubwordTokenizer):
        raise PretrainedError(f"the format has no place for a {type(tokenizer).__name__}")
    return tokenizer


def _bytes_as_subwords() -> SubwordTokenizer:
    """`ByteTokenizer` as a byte-level BPE without merges."""
    # A byte-level BPE writes a byte as the character with this code if it is printable in Latin-1,
    # and the other bytes, in order, as the characters from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {b: 256 + i for i, b in enumerate(others)}
    vocabulary = {chr(code): byte for byte, code in codes.items()}
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = hf.decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT[0]])  # gets the next id, 256
    return SubwordTokenizer(backend, END_OF_TEXT[0])
