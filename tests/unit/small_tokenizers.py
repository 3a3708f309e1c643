"""Small tokenizers of the kinds that models have, with their decoders as in published files."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

START, END = "<s>", "</s>"
# An ordinary added token, with a character that byte-level alphabets lack.
THINK = "<\uff5cthink\uff5c>"


def _add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (START, END)])
    tokenizer.add_tokens([AddedToken(THINK, special=False)])
    return tokenizer


def byte_level() -> Tokenizer:
    """One token per byte (GPT-2, Qwen, Llama 3)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _add_tokens(tokenizer)


def byte_fallback(strip: bool = True) -> Tokenizer:
    """Pieces with a mark for their space, and bytes for everything else (Llama 2, Mixtral; without strip, Gemma)."""
    pieces = ["<unk>", "▁", "H", "i", "!", "▁H", "Hi", "▁Hi", "a", "n", "an", "▁an", "▁▁"]
    vocab = {token: index for index, token in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = [("▁", "H"), ("H", "i"), ("▁H", "i"), ("a", "n"), ("▁", "an"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if strip else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return _add_tokens(tokenizer)


def metaspace() -> Tokenizer:
    """Pieces with a mark for their space, no bytes (T5)."""
    vocab = {token: index for index, token in enumerate(["<unk>", "▁", "▁Hi", "an", "▁an", "!", "é"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return _add_tokens(tokenizer)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special)
