"""transformers on the same checkpoint, in float32: what a greedy text and a token's log-probability must be."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
from transformers.convert_slow_tokenizer import bytes_to_unicode


class Reference:
    """The model and its tokenizer, for one prompt at a time."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, experts_implementation="eager"
        )
        self._byte_of_character = {character: byte for byte, character in bytes_to_unicode().items()}
        self.eos = self._model.config.eos_token_id
        self.vocab = self._model.config.vocab_size

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def chat_ids(self, messages: list[dict[str, str]], **settings: object) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def readable_ids(self) -> list[int]:
        """Tokens whose text is printable ASCII: what they spell can be cut anywhere and compared as text."""
        texts = {token: self.text([token]) for token in range(self.vocab)}
        return [token for token, text in texts.items() if text and text.isascii() and text.isprintable()]

    def text(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def name(self, token: int) -> str:
        r"""A token as log-probabilities name it: its text, or `bytes:\xNN` where its bytes are no text."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_bytes(self, token: int) -> bytes:
        characters = self.tokenizer.convert_ids_to_tokens(token)
        if token in self.tokenizer.all_special_ids:
            return characters.encode()
        return bytes(self._byte_of_character[character] for character in characters)

    def greedy(self, prompt: Sequence[int], tokens: int, *processors: LogitsProcessor, eos: bool = True) -> list[int]:
        """The new tokens of transformers' generate, the end-of-text token included; without `eos` it does not end."""
        ids_1T = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out_1T = self._model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList(processors),
                eos_token_id=self.eos if eos else None,
                pad_token_id=0,
            )
        return out_1T[0, len(prompt) :].tolist()

    def greedy_text(self, prompt: str, tokens: int, *processors: LogitsProcessor) -> str:
        made = self.greedy(self.ids(prompt), tokens, *processors)
        return self.text(made[:-1] if made[-1] == self.eos else made)

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-softmax [T, V] of the logits after each token: row t scores the token at t + 1."""
        with torch.inference_mode():
            return self._model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)
