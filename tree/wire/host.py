"""What tells two processes that they share a host and can compare process ids."""

import os
from pathlib import Path


def pid_namespace() -> str:
    """Equal strings mean that a pid names the same process for both; "" where the system cannot tell."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
    return f"{namespace}@{boot_id}"
