"""What one lane processes in one step: slices of requests, decided before any tensor is touched."""

from dataclasses import dataclass

from attention_nodes.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Slice:
    """tokens[start : start + count] of a request; `samples` when that is its last known token."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        return self.end == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """Single-token slices come first, so that decode rows are one contiguous run."""

    slices: tuple[Slice, ...]

    @property
    def tokens(self) -> int:
        return sum(piece.count for piece in self.slices)

    @property
    def decodes(self) -> int:
        """Leading slices of one token."""
        return sum(piece.count == 1 for piece in self.slices)

    @property
    def sampled(self) -> tuple[Slice, ...]:
        return tuple(piece for piece in self.slices if piece.samples)
