"""Work that would hold up the event loop goes to a thread when it is long."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

# Characters, tokens or scores: about as much work as a hop to another thread and back.
_INLINE = 1024


def is_long(size: int) -> bool:
    """Whether work of this size belongs in another thread."""
    return size > _INLINE


async def offload(size: int, work: Callable[[], Result]) -> Result:
    """work(), in another thread if `size` says that it is long."""
    return await asyncio.to_thread(work) if is_long(size) else work()
