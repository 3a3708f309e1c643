"""SmolLM2's tokenizer, rebuilt from the vocabulary and merges in its GGUF."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moe_runtime.models.demo.source import TokenizerSource


def smollm2_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Byte-level BPE that first splits every digit off, as SmolLM2 was trained (and as llama.cpp's `smollm` splits)."""
    vocab = {token: index for index, token in enumerate(source.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in source.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(source.tokens[index], special=True, normalized=False) for index in source.special_ids])
    return tokenizer
