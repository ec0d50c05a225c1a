"""How much memory this process has had at most (Linux)."""


def peak():
    """The most memory that this process has had since `reset_peak`, bytes: its own and shared pages."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmHWM"))


def reset_peak():
    """Forget the peak so far; returns what the process has now, bytes."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return peak()
