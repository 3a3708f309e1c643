"""Ctrl-C, SIGTERM and a closed terminal as something to ask for, so that no cleanup is ever interrupted."""

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While entered, stop signals are only counted; once is a request to stop, again means to hurry."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def requested(self) -> bool:
        return bool(self.received)

    @property
    def exit_code(self) -> int:
        """What a shell reports for a program ended by the first signal."""
        return 128 + self.received[0]

    def __enter__(self) -> "StopSignals":
        for number in _SIGNALS:
            # nohup ignores SIGHUP on purpose.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
