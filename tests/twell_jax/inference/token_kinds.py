"""Small tokenizers of every kind, with their ways to treat spaces and unknown characters."""

import json

import tokenizers as hf

from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import ByteTokenizer, SubwordTokenizer

# Chinese, Hindi with joined letters, emoji with joiners and skin tones, and spaces in a row.
TEXT = (
    "Q: é or 漢字? don't stop \U0001f600\U0001f600 now.\n\nA: naïve 字漢  中文   हिन्दी में क्षत्रिय "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467! \U0001f44d\U0001f3fd नमस्ते "
)
DECODING = [hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]


def _with_fallback(backend, decoder):
    """ASCII alone is in the vocabulary; all else are its bytes, as in the tokenizer of Llama 2."""
    trainer = hf.trainers.BpeTrainer(
        vocab_size=70, special_tokens=["</s>", "<s>"], show_progress=False
    )
    backend.train_from_iterator([TEXT.encode("ascii", "ignore").decode()] * 6, trainer)
    tree = json.loads(backend.to_str())
    size = len(tree["model"]["vocab"])
    tree["model"]["vocab"] |= {f"<0x{byte:02X}>": size + byte for byte in range(256)}
    tree["model"]["byte_fallback"] = True
    backend = hf.Tokenizer.from_str(json.dumps(tree))
    backend.decoder = decoder
    return SubwordTokenizer(backend, "</s>")


def metaspace():
    """Words have the space before them, but for the first; unknown characters are bytes."""
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    return _with_fallback(backend, hf.decoders.Sequence([*DECODING, hf.decoders.Strip(" ", 1, 0)]))


def prepend():
    """As `metaspace`, by a normaliser, and with spaces in a row as tokens."""
    backend = hf.Tokenizer(hf.models.BPE())
    backend.normalizer = hf.normalizers.Sequence(
        [hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")]
    )
    return _with_fallback(backend, hf.decoders.Sequence([*DECODING, hf.decoders.Strip(" ", 1, 0)]))


def unstripped():
    """Unknown characters are bytes, and no space is dropped."""
    backend = hf.Tokenizer(hf.models.BPE())
    backend.normalizer = hf.normalizers.Replace(" ", "▁")
    return _with_fallback(backend, hf.decoders.Sequence(DECODING))


def marked_spaces():
    """Words have the space before them, but for the first; nothing is a byte."""
    backend = hf.Tokenizer(hf.models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=150, special_tokens=["</s>", "[UNK]"], show_progress=False
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.decoder = hf.decoders.Metaspace()
    return SubwordTokenizer(backend, "</s>")


def with_suffixes():
    """Ends of words are marked, and are spaces but for the last."""
    backend = hf.Tokenizer(hf.models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=150, special_tokens=["</s>"], show_progress=False, end_of_word_suffix="</w>"
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.decoder = hf.decoders.BPEDecoder("</w>")
    return SubwordTokenizer(backend, "</s>")


def wordpiece():
    """Tokens inside words begin with ##, and spaces before punctuation are dropped."""
    backend = hf.Tokenizer(hf.models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    trainer = hf.trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[UNK]", "[EOS]"], show_progress=False
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.decoder = hf.decoders.WordPiece(cleanup=True)
    return SubwordTokenizer(backend, "[EOS]")


def undecoded():
    """Tokens of whole words without a decoder, which have spaces between them."""
    backend = hf.Tokenizer(hf.models.WordLevel({"</s>": 0, "a": 1, "字": 2, "[UNK]": 3}, "[UNK]"))
    backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    return SubwordTokenizer(backend, "</s>")


TOKENIZERS = {
    "byte": ByteTokenizer,
    "bpe": lambda: tokenizers.train_bpe([TEXT] * 6, 300),
    "metaspace": metaspace,
    "prepend": prepend,
    "unstripped": unstripped,
    "marked spaces": marked_spaces,
    "suffixes": with_suffixes,
    "wordpiece": wordpiece,
    "undecoded": undecoded,
}
