"""How much memory this process has had at most (Linux)."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def give_back_at_once():
    """Freed memory is no longer kept by malloc, where it has such settings.

    What it keeps of copies of 48 KiB is a matter of time: a save of 256 MiB in 5,461 leaves takes 20 to 28 MB so,
    43 to 109 without (two cores with AVX-512, n = 24).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 64 << 10)
        mallopt(_MMAP_THRESHOLD, 32 << 10)


def peak():
    """The most memory that this process has had since `reset_peak`, bytes: its own and shared pages."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmHWM"))


def reset_peak():
    """Forget the peak so far; returns what the process has now, bytes."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return peak()
