"""A load without HTTP: requests straight to an attention node over its own protocol, which is what the engine can do.

The yardstick for everything that stands between a client and the engine.
"""

import time
import uuid
from collections.abc import Sequence
from types import TracebackType

import zmq

from moe_runtime.bench.stream_load import Run
from moe_runtime.protocol.messages import (
    RequestFailed,
    SamplingParams,
    Submit,
    TokenOutput,
    decode_from_attention,
    encode,
)


class DirectClient:
    """One DEALER socket to the attention node at `endpoint`; timeout_s bounds every wait for its next message."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        self._timeout_s = timeout_s
        self._socket.rcvtimeo = int(timeout_s * 1000)
        self._socket.connect(endpoint)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        """Submit all prompts at once, greedy, to max_tokens each, and take every token.

        Raises RuntimeError if the node refuses one, TimeoutError if it falls silent.
        """
        name = uuid.uuid4().hex
        sampling = SamplingParams(max_tokens, temperature=0.0)
        cpu, start = time.process_time(), time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._socket.send(encode(Submit(f"{name}-{index}", tuple(prompt), sampling)))
        tokens, unfinished = 0, len(prompts)
        while unfinished:
            for output in self._receive():
                tokens += len(output.token_ids)
                unfinished -= output.finish_reason is not None
        return Run(time.perf_counter() - start, tokens, time.process_time() - cpu)

    def _receive(self) -> Sequence[TokenOutput]:
        try:
            message = decode_from_attention(self._socket.recv())
        except zmq.Again as error:
            raise TimeoutError(f"no token within {self._timeout_s:g} s") from error
        if isinstance(message, RequestFailed):
            raise RuntimeError(f"the node refused a request: {message.message}")
        return message.outputs

    def __enter__(self) -> "DirectClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()
