"""A tokenizer whose tokens are single bytes, so that tests can spell any text, and cut any character, by hand."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIALS) + 6  # padded, as real models' vocabularies are
TEMPLATE = (
    "{% if tone is defined %}<|im_start|>tone\n{{ tone | upper }}{{ '!' * (loudness | default(0)) }}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.token_to_id("<|im_end|>")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    TOKENIZER.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
