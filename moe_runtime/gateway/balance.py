"""Which attention node gets a request: the one with the fewest tokens still to compute."""

from collections.abc import Mapping


class Balancer:
    """Spreads requests by outstanding tokens: prompts not yet computed plus tokens not yet produced.

    capacities: the largest request (prompt and new tokens) that each node can hold.
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self._capacities = dict(capacities)
        self._outstanding = dict.fromkeys(capacities, 0)
        self._requests: dict[str, tuple[str, int, int]] = {}

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Tokens still to compute, per node."""
        return self._outstanding

    def place(self, request_id: str, prompt_tokens: int, max_tokens: int, alive: Mapping[str, bool]) -> str | None:
        """Choose a node and charge the request to it; None if no living node can hold it."""
        total = prompt_tokens + max_tokens
        nodes = [node for node, capacity in self._capacities.items() if alive[node] and capacity >= total]
        if not nodes:
            return None
        node = min(nodes, key=lambda node: self._outstanding[node])
        self._outstanding[node] += total
        self._requests[request_id] = (node, total, prompt_tokens)
        return node

    def produced(self, request_id: str, tokens: int) -> None:
        """The request has new tokens; with its first ones the prompt is computed too."""
        node, left, prompt_tokens = self._requests[request_id]
        done = min(left, tokens + prompt_tokens)
        self._outstanding[node] -= done
        self._requests[request_id] = (node, left - done, 0)

    def release(self, request_id: str) -> str:
        """The request has ended; gives the node that held it."""
        node, left, _ = self._requests.pop(request_id)
        self._outstanding[node] -= left
        return node

    def requests_of(self, node: str) -> list[str]:
        """The open requests that a node holds."""
        return [request_id for request_id, (holder, _, _) in self._requests.items() if holder == node]
