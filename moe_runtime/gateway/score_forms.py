"""Scores as OpenAI's two endpoints and vLLM's prompt_logprobs write them."""

from collections.abc import Mapping, Sequence
from typing import Any

from moe_runtime.gateway.scores import ScoredToken
from moe_runtime.gateway.token_bytes import TokenBytes, token_text
from moe_runtime.protocol.messages import TokenScore

# JSON has no infinity: a token that the model holds impossible has this log-probability, as in vLLM.
LOWEST_LOGPROB = -9999.0


def json_logprob(logprob: float) -> float:
    """A number that JSON can carry, whatever comes: minus infinity and NaN are LOWEST_LOGPROB, and none is above 0."""
    return min(logprob, 0.0) if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class ScoreForms:
    """Writes scores with `top` alternatives each, of which the engine may have reported more."""

    def __init__(self, token_bytes: TokenBytes, top: int) -> None:
        self._bytes = token_bytes
        self._top = top

    def completion(self, scored: Sequence[ScoredToken]) -> dict[str, list[Any]]:
        """Parallel lists. Each dict of top_logprobs also has the token itself, as one more where it is not among them.

        Tokens of the same text share an entry there: the token itself goes first, then the better one.
        """
        return {
            "tokens": [self._text(entry.token) for entry in scored],
            "token_logprobs": [None if entry.score is None else json_logprob(entry.score.logprob) for entry in scored],
            "top_logprobs": [
                None if entry.score is None else self._by_text(entry.token, entry.score) for entry in scored
            ],
            "text_offset": [entry.offset for entry in scored],
        }

    def chat(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = []
        for entry in scored:
            assert entry.score is not None, "a chat's answer has no tokens of its prompt"
            top = [self._chat_entry(token, logprob) for token, logprob in entry.score.top[: self._top]]
            content.append({**self._chat_entry(entry.token, entry.score.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def prompt(self, ids: Sequence[int], scores: Sequence[TokenScore]) -> list[dict[str, Any] | None]:
        """One entry per token of the prompt, null for the first: by token id, the token itself before the best ones."""
        return [None, *(self._by_id(token, score) for token, score in zip(ids[1:], scores, strict=True))]

    def _text(self, token: int) -> str:
        return token_text(self._bytes[token])

    def _by_text(self, token: int, score: TokenScore) -> Mapping[str, float]:
        best: dict[str, float] = {}
        for other, logprob in score.top[: self._top]:
            best.setdefault(self._text(other), json_logprob(logprob))
        best[self._text(token)] = json_logprob(score.logprob)
        return best

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes[token]
        return {"token": token_text(data), "logprob": json_logprob(logprob), "bytes": list(data)}

    def _by_id(self, token: int, score: TokenScore) -> dict[str, Any]:
        ranked = {token: (score.rank, score.logprob)}
        for rank, (other, logprob) in enumerate(score.top[: self._top], start=1):
            ranked.setdefault(other, (rank, logprob))
        return {
            str(token): {"logprob": json_logprob(logprob), "rank": rank, "decoded_token": self._text(token)}
            for token, (rank, logprob) in ranked.items()
        }
