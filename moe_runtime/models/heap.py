"""Memory that loading has freed, given back to the system."""

import ctypes


def trim_heap() -> None:
    """Return freed pages between live ones, which glibc keeps; nothing where the C library cannot.

    Weights that are quantized while they are read leave holes of several times their own size.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
