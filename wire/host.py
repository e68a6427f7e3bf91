"""A process and its host: whether two processes share a host, and how many descriptors one may have."""

import os
import resource
from pathlib import Path


def pid_namespace() -> str:
    """Equal strings mean that a pid names the same process for both; "" where the system does not show it."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
    return f"{namespace}@{boot_id}"


MAX_DESCRIPTORS = 65_536  # more than a process of ours can use; a table for millions takes memory


def raise_descriptor_limit() -> int:
    """Let this process open as many files as its hard limit allows; how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else MAX_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
