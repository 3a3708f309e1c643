"""Which KV blocks are free: a fixed pool of block ids, handed out and taken back whole.

Conservation law, checked by tests when idle: free + held == total.
"""


class BlockPool:
    """Ids 0..blocks-1. Freed blocks are reused first, while they are warm in the cache."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(
                f"a KV pool of {blocks} blocks of {block_size} tokens holds nothing: expected at least 1 of 1"
            )
        self.total = blocks
        self.block_size = block_size
        self._free = list(range(blocks - 1, -1, -1))
        self._held = bytearray(blocks)

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` block ids, or None (and nothing changed) when fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._held[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """Take blocks back; each must be held."""
        for block in blocks:
            assert self._held[block], f"block {block} was released twice"
            self._held[block] = 0
        self._free.extend(reversed(blocks))
