"""What every node process does first, and what its environment holds."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence

PARENT_PID = "MOE_RUNTIME_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
# About 0.1 ms: longer than the gap between two parallel regions of a layer, shorter than any wait for another process.
_SPINS = "10000"


def die_with_parent() -> None:
    """Make sure that this process ends when the launcher does, even by SIGKILL; call it before anything slow.

    Linux: the kernel sends SIGKILL (prctl PR_SET_PDEATHSIG). Elsewhere a daemon thread looks at the parent's id.
    A process started by hand is tied to the shell or program that started it.
    """
    parent = int(os.environ.get(PARENT_PID, os.getppid()))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent-watch", daemon=True).start()
    # The parent may have died before the kernel was asked to watch it.
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def pin(cores: Sequence[int]) -> None:
    """Run on these cores alone, threads that are started later included; no cores: anywhere."""
    if cores:
        os.sched_setaffinity(0, cores)


def yield_to_others() -> None:
    """Let a wake-up of this process not interrupt whoever runs on its core (Linux: SCHED_BATCH).

    For FFN nodes: an attention node that has written to one still has to write to the next.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def child_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """A node's environment: `base` (the launcher's own) with thread counts fixed and idle threads soon asleep.

    Idle OpenMP threads must not spin for long: beside a busy process on few cores that costs milliseconds a call. Nor
    may they sleep at once: a step has thousands of short parallel regions, and a wake-up each made it 1.5 times as
    long.
    """
    count = str(threads)
    return {
        **base,
        PARENT_PID: str(os.getpid()),
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "GOMP_SPINCOUNT": _SPINS,
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
