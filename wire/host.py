"""A process and its host: whether two processes share a host, how many descriptors and cores one may have, how its
threads wait, and when it ends: with which other process, or where it stands still."""

import ctypes
import faulthandler
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


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


_PROBE_STACK_BYTES = 64 << 10
_PROBE_TIMEOUT_S = 30.0
_COUNT_THREADS = """import sys, threading
threading.stack_size(int(sys.argv[2]))
done, number = threading.Event(), 0
try:
    while number < int(sys.argv[1]):
        threading.Thread(target=done.wait, daemon=True).start()
        number += 1
except RuntimeError:
    pass
sys.stdout.write(str(number))
sys.stdout.flush()
done.set()
"""


def threads_to_be_had(wanted: int) -> int:
    """How many more threads, at most so many, can be started now. Processes of the same user, or of the same container,
    count against the same limit. Asked in a process that ends: the C library gives up nothing of the address space that
    threads once had."""
    command = [sys.executable, "-I", "-S", "-c", _COUNT_THREADS, str(wanted), str(_PROBE_STACK_BYTES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except BlockingIOError:  # not even the process
        return 0
    except (OSError, subprocess.SubprocessError):  # another limit: who meets it says so
        return wanted
    return int(done.stdout) if done.stdout.isdigit() else wanted


_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Cores that this process may run on at once: those of its affinity, or what the container's quota leaves."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        try:
            granted, period = (cgroups / "cpu.max").read_text().split()
        except FileNotFoundError:  # the first version of cgroups
            granted, period = ((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        quota = int(granted) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max": no quota
        return cores
    return cores if quota < 0 else max(1, min(cores, round(quota)))


def let_threads_sleep() -> None:
    """OpenMP's threads sleep while they wait, unless the environment says otherwise; before torch loads them. Where
    others use the cores, threads that spin take many times as long: each waits for one that does not run."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask a process to end: SIGTERM, Ctrl-C, and SIGHUP of a closed terminal unless nohup ignores it."""
    has_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if has_hangup else ()))


def arm_stall_guard(limit_s: float) -> bool:
    """Unless it is called again in so many seconds, the process ends with 1, all stacks on stderr: by a thread of C,
    even while another thread keeps the interpreter's lock. False where no thread is to be had; each call takes one."""
    try:
        faulthandler.dump_traceback_later(limit_s, exit=True)
    except RuntimeError:
        return False
    return True


def disarm_stall_guard() -> None:
    """The process lives on. Idempotent."""
    faulthandler.cancel_dump_traceback_later()


def die_with(parent: int) -> None:
    """SIGKILL for this process when the one that started it ends, by whatever means. Linux only (prctl
    PR_SET_PDEATHSIG); elsewhere it does nothing."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
