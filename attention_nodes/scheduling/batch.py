"""What one lane processes in one step: slices of requests, decided before any tensor is touched."""

from dataclasses import dataclass
from functools import cached_property

from attention_nodes.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Slice:
    """tokens[start : start + count] of a request."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def last(self) -> bool:
        """Nothing of the request's known tokens is left after it."""
        return self.end == len(self.request.tokens)

    @property
    def samples(self) -> bool:
        return self.last and self.request.sampling.max_tokens > 0

    @property
    def scored(self) -> range:
        """Where in the request the prompt tokens stand that this slice has to score: it predicts them, and their
        scores were not sent yet.
        """
        return self.request.unscored(self.start + 1, self.end + 1)


@dataclass(frozen=True)
class Batch:
    """Single-token slices come first, so that decode rows are one contiguous run."""

    slices: tuple[Slice, ...]

    @cached_property
    def tokens(self) -> int:
        return sum(piece.count for piece in self.slices)

    @cached_property
    def sampled(self) -> tuple[Slice, ...]:
        return tuple(piece for piece in self.slices if piece.samples)

    @cached_property
    def head_rows(self) -> int:
        """Rows of hidden states that the LM head sees: to sample, and to score prompt tokens."""
        return len(self.sampled) + sum(len(piece.scored) for piece in self.slices)
