"""JSON answers that may be long."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

from moe_runtime.gateway.offload import offload


async def json_answer(body: Mapping[str, Any], size: int) -> Response:
    """The body as JSON; size: its characters, numbers or other pieces, about, which decide where it is encoded."""
    return Response(await offload(size, lambda: msgspec.json.encode(body)), media_type="application/json")
