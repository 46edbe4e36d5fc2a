"""Small real tokenizers made on the spot: byte-level BPE, sentencepiece-like BPE with byte fallback, single letters."""

import functools
import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from blockferry.cluster.api.tokenizer import Tokenizer

TEXT = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "def add(first, second):\n    return first + second\n",
    "naïve café, 你好世界, 😀 family 👩‍👩‍👧, Привет мир",
] * 4
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2


@functools.cache
def byte_level() -> Tokenizer:
    """Vocabulary of 400, EOS is token 2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, CHAT_TEMPLATE)


@functools.cache
def byte_fallback() -> Tokenizer:
    """Spaces are U+2581, bytes outside the vocabulary are <0x..> tokens, as in Llama 2."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({char for text in TEXT for char in text if ord(char) < 0x250 and not char.isspace()} | {"▁"})
    vocab = {piece: index for index, piece in enumerate(pieces + letters)}
    merges = []
    for left, right in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "r"), ("▁", "f"), ("▁f", "o")]:
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(special)
    return Tokenizer(backend, {"eos_token": "</s>"}, None)


def save_letters(folder: Path) -> None:
    """Put a tokenizer into a checkpoint's folder: every printable ASCII letter is a token, EOS is token 2.

    A hundred tokens, for models whose vocabulary is smaller than the 256 bytes.
    """
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *string.printable[:-5]])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))


def save_characters(folder: Path, vocab_size: int) -> None:
    """Put a tokenizer into a checkpoint's folder in which every token is a character of its own, EOS is token 2.

    Texts then tell tokens apart, all but the three special ones.
    """
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(0x4E00 + i): i for i in range(3, vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
