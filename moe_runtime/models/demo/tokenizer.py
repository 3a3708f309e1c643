"""Tokenizers of the demo models: SmolLM2's, rebuilt from its GGUF, and a small one for random checkpoints."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from moe_runtime.models.demo.calibration import SENTENCES
from moe_runtime.models.demo.output import write_json
from moe_runtime.models.demo.source import TokenizerSource

BYTE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def smollm2_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Byte-level BPE that first splits every digit off, as SmolLM2 was trained (and as llama.cpp does)."""
    vocab = {token: index for index, token in enumerate(source.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in source.merges)]
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=merges))
    specials = [AddedToken(source.tokens[index], special=True, normalized=False) for index in source.special_ids]
    tokenizer.add_special_tokens(specials)
    return tokenizer


def write_smollm2_tokenizer(folder: Path, source: TokenizerSource, max_length: int) -> None:
    """Writes SmolLM2's tokenizer.json, and a tokenizer_config.json with its special tokens and chat template."""
    smollm2_tokenizer(source).save(str(folder / "tokenizer.json"))
    bos, eos, unk, pad = (source.tokens[i] for i in (source.bos_id, source.eos_id, source.unk_id, source.pad_id))
    special = {"bos_token": bos, "eos_token": eos, "unk_token": unk, "pad_token": pad}
    _write_config(folder, max_length, {**special, "chat_template": source.chat_template})


def write_byte_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Writes a byte-level tokenizer: the special tokens, 256 bytes, then merges learnt from the calibration sentences.

    A vocabulary larger than those sentences can fill leaves the last ids without a token, as padded vocabularies do.
    Raises ValueError for a vocabulary without room for specials and bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(BYTE_SPECIALS) + len(alphabet)
    if vocab_size < least:
        raise ValueError(f"vocab_size {vocab_size}: expected at least {least}, for special tokens and bytes")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(BYTE_SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, bos, eos = BYTE_SPECIALS
    special = {"bos_token": bos, "eos_token": eos, "unk_token": pad, "pad_token": pad}
    _write_config(folder, max_length, {**special, "chat_template": _BYTE_CHAT_TEMPLATE})


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_config(folder: Path, max_length: int, fields: dict[str, Any]) -> None:
    loading = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, "add_prefix_space": False}
    write_json(folder / "tokenizer_config.json", {**loading, "clean_up_tokenization_spaces": False, **fields})
