"""Errors a user or a peer can cause, one class per kind of reaction."""


class ConfigError(ValueError):
    """A configuration, a flag or a model's config says something that cannot be done."""


class CheckpointError(ValueError):
    """A checkpoint's tensor is missing, left over, wrongly shaped or unreadable; the message names it."""


class RequestError(ValueError):
    """A request that can never be served (too long, larger than the KV pool); the message carries true counts."""


class OverloadedError(RuntimeError):
    """A queue is at its bound; the same request may succeed later."""


class ProtocolError(RuntimeError):
    """A peer sent something that does not fit; the message names both values."""


class LinkClosedError(ConnectionError):
    """The peer of a link is gone, or the link was closed on this side."""


class LinkTimeoutError(TimeoutError):
    """A peer did not do its part within the configured time."""
