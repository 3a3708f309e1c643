"""An attention node without a model: speaks protocol/messages.py and answers with whatever tokens a test asks for."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from moe_runtime.protocol.control import RequestAddress
from moe_runtime.protocol.messages import (
    Abort,
    RequestFailed,
    StepOutputs,
    Submit,
    TokenOutput,
    TokenScore,
    decode_to_attention,
    encode,
)

IDLE_POLL_MS = 20
# Prompt tokens that are scored in one step.
PROMPT_CHUNK = 3


def some_score(token: int, top: int) -> TokenScore:
    """A made-up score that only depends on the token, with as many best tokens as asked for."""
    best = tuple((max(token - 2, 0) + rank, -0.25 * rank) for rank in range(top))
    return TokenScore(-token / 16, token + 1, best)


@dataclass
class Answer:
    """One request's steps, then its end: a finish reason, a failure (kind, message), or none at all.

    score: of a token, with so many best ones, where the request asks for scores.
    """

    steps: list[tuple[int, ...]]
    finish: str | None = "length"
    failure: tuple[str, str] | None = None
    score: Callable[[int, int], TokenScore] = some_score


def echo(submit: Submit) -> Answer:
    """The prompt's tokens over and over, one a step, until max_tokens."""
    prompt = submit.prompt_ids
    return Answer([(prompt[index % len(prompt)],) for index in range(submit.sampling.max_tokens)])


@dataclass
class OpenRequest:
    """An answer on its way: the next step, and the next prompt token to score."""

    sender: bytes
    submit: Submit
    answer: Answer
    position: int = 0
    prompt_position: int = 1

    def next_output(self) -> TokenOutput | None:
        """Scores of the prompt first, the last of them with the first tokens; None once there is nothing more."""
        prompt_scores = self._next_prompt_scores()
        if prompt_scores and self.prompt_position < len(self.submit.prompt_ids):
            return TokenOutput(self.submit.request_id, (), prompt_scores=prompt_scores)
        tokens = self.answer.steps[self.position] if self.position < len(self.answer.steps) else ()
        last = self.position >= len(self.answer.steps) - 1 and self.answer.failure is None
        finish = self.answer.finish if last else None
        if not tokens and finish is None:
            return None
        self.position += 1
        top = self.submit.sampling.logprobs
        scores = () if top is None else tuple(self.answer.score(token, top) for token in tokens)
        return TokenOutput(self.submit.request_id, tokens, finish, scores, prompt_scores)

    def _next_prompt_scores(self) -> tuple[TokenScore, ...]:
        top = self.submit.sampling.prompt_logprobs
        if top is None:
            return ()
        chunk = self.submit.prompt_ids[self.prompt_position : self.prompt_position + PROMPT_CHUNK]
        self.prompt_position += len(chunk)
        return tuple(self.answer.score(token, top) for token in chunk)


@dataclass
class FakeEngine:
    """Runs in a thread of its own from start() to stop(). `step_s` is the time of a step; `held` stops all steps."""

    node: str
    kv_tokens: int = 400
    max_context: int = 512
    script: Callable[[Submit], Answer] = echo
    step_s: float = 0.0
    held: bool = False
    submitted: list[Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    open: dict[str, OpenRequest] = field(default_factory=dict)

    def start(self) -> RequestAddress:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.node, daemon=True)
        self._thread.start()
        return RequestAddress(self.node, f"tcp://127.0.0.1:{port}", self.kv_tokens, self.max_context)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(10)
        self._context.term()

    def reset(self) -> None:
        self.script, self.step_s, self.held = echo, 0.0, False
        self.submitted.clear()
        self.aborted.clear()

    def _run(self) -> None:
        while not self._stopping.is_set():
            stepping = bool(self.open) and not self.held
            if self._socket.poll(0 if stepping else IDLE_POLL_MS):
                sender, frame = self._socket.recv_multipart()
                self._hear(sender, decode_to_attention(frame))
            elif stepping:
                time.sleep(self.step_s)
                self._step()
        self._socket.close()

    def _hear(self, sender: bytes, message: Submit | Abort) -> None:
        if isinstance(message, Submit):
            self.open[message.request_id] = OpenRequest(sender, message, self.script(message))
            self.submitted.append(message)
        elif self.open.pop(message.request_id, None) is not None:
            self.aborted.append(message.request_id)

    def _step(self) -> None:
        """One token group of every open request, in one message per gateway; failures apart."""
        outputs: dict[bytes, list[TokenOutput]] = {}
        for request_id, request in list(self.open.items()):
            output = request.next_output()
            if output is not None:
                outputs.setdefault(request.sender, []).append(output)
                if output.finish_reason is not None:
                    del self.open[request_id]
            elif request.answer.failure is not None:
                del self.open[request_id]
                failure = RequestFailed(request_id, *request.answer.failure)
                self._socket.send_multipart([request.sender, encode(failure)])
        for sender, batch in outputs.items():
            self._socket.send_multipart([sender, encode(StepOutputs(tuple(batch)))])
