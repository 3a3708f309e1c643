"""Which requests can be served at all: checked once, before anything is queued, with true counts in the refusal."""

from dataclasses import dataclass

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
        if prompt < 1 or asked < 1:
            raise RequestError(f"the prompt has {prompt} tokens and max_tokens is {asked}: expected at least 1 of each")
        foreign = next((token for token in request.tokens if not 0 <= token < self.vocab), None)
        if foreign is not None:
            raise RequestError(f"token id {foreign} is outside the vocabulary 0..{self.vocab - 1}")
        counts = f"the prompt has {prompt} tokens and max_tokens is {asked}"
        if prompt + asked > self.max_context:
            raise RequestError(f"{counts}: together {prompt + asked}, but the context holds {self.max_context}")
        if request.generated >= asked:
            raise RequestError(f"{request.generated} tokens were generated before, but max_tokens is {asked}")
        needed = self.pool.blocks_for(request.most_tokens)
        if needed > self.pool.total:
            raise RequestError(
                f"{counts}: that needs {needed} KV blocks of {self.pool.block_size} tokens, "
                f"but the pool has {self.pool.total}"
            )
