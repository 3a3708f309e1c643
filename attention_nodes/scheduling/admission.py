"""Which requests can be served at all: checked once, before anything is queued, with true counts in the refusal."""

from dataclasses import dataclass
from itertools import chain

from attention_nodes.cache.block_pool import BlockPool
from attention_nodes.scheduling.request import Request
from moe_runtime.errors import RequestError


@dataclass(frozen=True)
class Admission:
    """The bounds of one node: its whole KV pool, the context in tokens, the vocabulary."""

    pool: BlockPool
    max_context: int
    vocab: int

    def check(self, request: Request) -> None:
        """Raise RequestError unless the request, alone on the node, could run to its last token."""
        prompt, asked = request.generated_from, request.sampling.max_tokens
        if prompt < 1 or asked < 0:
            raise RequestError(f"the prompt has {prompt} tokens and max_tokens is {asked}: expected at least 1 and 0")
        self._check_ids(request)
        counts = f"the prompt has {prompt} tokens and max_tokens is {asked}"
        if prompt + asked > self.max_context:
            raise RequestError(f"{counts}: together {prompt + asked}, but the context holds {self.max_context}")
        if request.generated and request.generated >= asked:
            raise RequestError(f"{request.generated} tokens were generated before, but max_tokens is {asked}")
        needed = self.pool.blocks_for(request.most_tokens)
        if needed > self.pool.total:
            raise RequestError(
                f"{counts}: that needs {needed} KV blocks of {self.pool.block_size} tokens, "
                f"but the pool has {self.pool.total}"
            )

    def _check_ids(self, request: Request) -> None:
        """A stop token may lie outside: some checkpoints' end-of-text id does, and it simply never comes."""
        params = request.sampling
        if not all(params.bad_words):
            raise RequestError("bad_words holds an empty sequence of tokens")
        for field, ids in (
            ("the prompt", request.tokens),
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("bad_words", chain.from_iterable(params.bad_words)),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            foreign = next((token for token in ids if not 0 <= token < self.vocab), None)
            if foreign is not None:
                raise RequestError(f"token id {foreign} in {field} is outside the vocabulary 0..{self.vocab - 1}")
