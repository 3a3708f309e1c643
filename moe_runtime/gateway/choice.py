"""One choice on its way to a text: tokens in, pieces of text with their scores out, and where the text ends."""

from itertools import repeat

import msgspec

from moe_runtime.gateway.detokenizer import Detokenizer
from moe_runtime.gateway.echo import Echo
from moe_runtime.gateway.metrics import RequestClock
from moe_runtime.gateway.scores import HeldScores, ScoredToken
from moe_runtime.gateway.stop_strings import StopStrings
from moe_runtime.protocol.messages import Submit, TokenOutput, TokenScore


class Delta(msgspec.Struct, frozen=True):
    """New text of one choice, and the tokens that it belongs to where scores are asked for.

    In a choice's last delta finish_reason is `stop` or `length`; stop_reason is then the stop string that ended the
    text, or the token id if the request named it, else null.
    """

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    scored: tuple[ScoredToken, ...] = ()


class TextRules(msgspec.Struct, frozen=True):
    """What a request says of its texts. stop_token_ids: those that it names itself, without end-of-text.

    include_stop keeps what ended the text as if it were part of it. No stop string is looked for in the text of the
    first min_tokens tokens. scored: every piece of text comes with the scores of its tokens.
    """

    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    scored: bool = False


class Choice:
    """The text of one engine request. prompt_scores gathers what the engine says of the prompt's tokens.

    prompt_tokens: what usage counts, which is 0 for all but the first choice of a prompt.
    """

    def __init__(
        self,
        index: int,
        submit: Submit,
        detokenizer: Detokenizer,
        rules: TextRules,
        clock: RequestClock,
        prompt_tokens: int,
        echo: Echo | None = None,
    ) -> None:
        self.index = index
        self.submit = submit
        self.clock = clock
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.prompt_scores: list[TokenScore] = []
        self._detokenizer = detokenizer
        self._rules = rules
        self._stops = StopStrings(rules.stops, rules.include_stop)
        self._echo = echo
        self._held = HeldScores(len(echo.text) if echo else 0) if rules.scored else None

    def accept(self, output: TokenOutput) -> Delta:
        """What these tokens complete. The token that ended the text is not part of it, unless include_stop."""
        self.prompt_scores.extend(output.prompt_scores)
        stopped = output.finish_reason == "stop"
        tokens = output.token_ids[:-1] if stopped else output.token_ids
        text = ""
        for token, score in zip(tokens, output.scores or repeat(None), strict=False):
            text += self._find_stop(self._push(token, score))
            if self._stops.hit is not None:
                return self._delta(text, "stop", self._stops.hit)
        return self._delta(text) if output.finish_reason is None else self._end(text, output)

    def _push(self, token: int, score: TokenScore | None) -> str:
        self.completion_tokens += 1
        piece = self._detokenizer.push(token)
        if self._held is not None:
            assert score is not None, "a token without the score that was asked for"
            self._held.add(token, score, len(piece))
        return piece

    def _find_stop(self, piece: str) -> str:
        return piece if self.completion_tokens <= self._rules.min_tokens else self._stops.push(piece)

    def _end(self, text: str, output: TokenOutput) -> Delta:
        """The engine has ended the text: what is still held, and the last token where it is part of the text."""
        stopped = output.finish_reason == "stop"
        if stopped and self._rules.include_stop:
            score = output.scores[-1] if output.scores else None
            text += self._push(output.token_ids[-1], score) + self._detokenizer.finish()
        else:
            text += self._find_stop(self._detokenizer.finish()) + self._stops.finish()
            self.completion_tokens += 1 if stopped else 0
        if self._stops.hit is not None:
            return self._delta(text, "stop", self._stops.hit)
        named = stopped and output.token_ids[-1] in self._rules.stop_token_ids
        return self._delta(text, output.finish_reason, output.token_ids[-1] if named else None)

    def _delta(self, text: str, finish_reason: str | None = None, stop_reason: str | int | None = None) -> Delta:
        scored: tuple[ScoredToken, ...] = ()
        if self._held is not None:
            scored = self._take_scores(len(text), finish_reason is not None)
        # What is known of the prompt is complete with the first token.
        if self._echo is not None and (self.completion_tokens or finish_reason is not None):
            text = self._echo.text + text
            if self._held is not None:
                scored = self._echo.scored(self.prompt_scores) + scored
            self._echo = None
        return Delta(self.index, text, finish_reason, stop_reason, scored)

    def _take_scores(self, chars: int, last: bool) -> tuple[ScoredToken, ...]:
        assert self._held is not None
        if not last:
            return self._held.sent(chars)
        return self._held.rest() if self._stops.hit is None else self._held.cut(chars)
