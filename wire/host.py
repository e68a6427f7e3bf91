"""A process and its host: whether two processes share one, limits on descriptors, threads and cores, how threads wait,
and guards that end the process with its parent or when it stalls."""

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


def most_descriptors() -> int:
    """Files that a process of ours may open, once it has called `raise_descriptor_limit`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    return wanted if soft == resource.RLIM_INFINITY else max(soft, wanted)


def raise_descriptor_limit() -> int:
    """Let this process open as many files as its hard limit allows. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = most_descriptors()
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


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
    """How many more threads can be started now, up to `wanted`. Processes of the same user or container count against
    the same limit. Tried in a child process, because the C library never returns the address space of threads."""
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
    """Cores that this process may use at once: its CPU affinity, or the container's quota if that is lower."""
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
    """Make OpenMP's threads sleep while they wait, unless the environment says otherwise; call before torch is
    imported. Where others use the cores too, spinning threads take many times as long: each waits for one that is not
    running."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def ending_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a process to end: SIGTERM, Ctrl-C, and SIGHUP of a closed terminal unless nohup ignores it."""
    has_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if has_hangup else ()))


def arm_stall_guard(limit_s: float) -> bool:
    """Unless called again within limit_s, the process exits with status 1 and prints all stacks to stderr. A C thread
    does this, even while another thread holds the interpreter lock. False if no thread could be started; each call
    starts one."""
    try:
        faulthandler.dump_traceback_later(limit_s, exit=True)
    except RuntimeError:
        return False
    return True


def disarm_stall_guard() -> None:
    """Cancel the guard. Idempotent."""
    faulthandler.cancel_dump_traceback_later()


def die_with(parent: int) -> None:
    """SIGKILL this process when its parent ends, however that happens. Linux only (prctl PR_SET_PDEATHSIG); elsewhere a
    no-op."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
