"""The model's tokenizer and chat template. Importing transformers takes seconds, so it happens when one is loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Encoding

from moe_runtime.errors import CheckpointError
from moe_runtime.gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from moe_runtime.gateway.errors import invalid
from moe_runtime.gateway.token_bytes import TokenBytes

# What a template can do wrong with what it is given; a wrong type within an expression is one of Python's own errors.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# Some messages repeat the whole conversation.
_MAX_FAULT_CHARS = 200


class TextTokenizer:
    """Text to token ids and back, by the checkpoint's own files. All methods may run in any thread.

    silent_ids: special tokens. token_bytes: every token's bytes, special ones too. Raises CheckpointError if the
    directory has no fast tokenizer.
    """

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{model_dir}: no tokenizer could be loaded: {error}") from error
        if not tokenizer.is_fast:
            raise CheckpointError(f"{model_dir}: a tokenizer.json is needed, found only {type(tokenizer).__name__}")
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = tokenizer.added_tokens_decoder.items()
        self.silent_ids = frozenset(token for token, entry in added if entry.special)
        self.token_bytes = TokenBytes(self._backend)
        self._bytes_without_special = TokenBytes(self._backend, self.silent_ids)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """special_tokens: also what the tokenizer adds around every text, such as a begin-of-text token."""
        return self.encoding(text, special_tokens).ids

    def encoding(self, text: str, special_tokens: bool) -> Encoding:
        """The same with its count known before there is a list, which takes time during which no thread runs."""
        # The batch form leaves out offsets, which nobody needs: half the time and a fraction of the memory.
        return self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Bytes that are no character become U+FFFD; ids beyond the vocabulary have no text; nothing is cleaned up."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for ids beyond it."""
        return [self._backend.id_to_token(token) or "" for token in ids]

    def detokenizer(self, context_ids: Sequence[int], skip_special: bool) -> Detokenizer:
        """For the text that follows context_ids; with skip_special special tokens have none."""
        if self.token_bytes.exact:
            return ByteDetokenizer(self._bytes_without_special if skip_special else self.token_bytes, context_ids)
        silent_ids = self.silent_ids if skip_special else frozenset()
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special), silent_ids, context_ids)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The chat template's text. Raises ApiError 400 if it refuses.

        variables: the client's own, for the template. add_generation_prompt: up to where the assistant's next answer
        begins; continue_final_message: up to the end of the last message's own text.
        """
        if not self._tokenizer.chat_template:
            raise invalid("this model has no chat template; use /v1/completions", "messages")
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except _TEMPLATE_FAULTS as error:
            fault = str(error)[:_MAX_FAULT_CHARS] or type(error).__name__
            raise invalid(f"the chat template refuses these messages: {fault}", "messages") from error
