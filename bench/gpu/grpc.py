"""The whole service under a load generator: streamed tokens per second through gRPC, on the machine that this runs on.

Writes a checkpoint of random weights, starts `octavo serve` on it, runs `octavo bench` against it, stops it. One JSON
object on stdout, also to --out.

    python -m bench.gpu.grpc [--shape 0.5B] [--device cuda] [--gateways 4] [--load-flags FLAGS] [--out FILE]
        [-- more flags of `octavo serve`]

On a CPU: `--shape tiny --device cpu --load-flags '--num-prompts 8 --input-len 16 --output-len 16'`. With
--load-generator PATH another one measures, called as `python PATH HOST:PORT OUT.json [--load-flags …]`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.gpu.device import need_cuda
from bench.random_checkpoint import write_checkpoint
from bench.serving import wait_until_serving
from bench.shapes import SHAPES
from octavo.cli.serve.ports import free_port

STOP_TIMEOUT_S = 30.0
CACHES = (
    "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
    "FLASHINFER_WORKSPACE_BASE",
)  # fmt: skip
"""Variables that name folders of compiled or tuned kernels: ours, those of libraries, the driver's."""
SUMS_VARIABLE = "OCTAVO_SUMS"
SERVICE = "octavo.v1.InferenceService"


class BenchError(RuntimeError):
    """The service or the load generator failed; the message has the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service. start_s: from the command until it was ready."""

    process: subprocess.Popen[bytes]
    target: str
    log: Path
    start_s: float

    def cpu_s(self) -> dict[str, dict[int, float]]:
        """CPU seconds so far, by role and process."""
        found: dict[str, dict[int, float]] = {"gateway": {}, "worker": {}}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words, times = child.cmdline(), child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            for role, processes in found.items():
                if role in words:
                    processes[child.pid] = times.user + times.system
        return found


def environment(caches: Path | None = None) -> dict[str, str]:
    """The environment without settings of a service, except how its ranks sum. caches: a folder for everything that is
    compiled or tuned."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_") or name == SUMS_VARIABLE
    }
    return kept | ({} if caches is None else {name: str(caches / name.lower()) for name in CACHES})


@contextmanager
def serving(folder: Path, flags: list[str], *, start_timeout_s: float, caches: Path | None = None) -> Iterator[Service]:
    """`octavo serve FLAGS`, ready. caches: used instead of this machine's. Raises BenchError if it never is ready."""
    port, log, begin_s = free_port("127.0.0.1", set()), folder / "service.log", time.monotonic()
    target = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "octavo.cli.main", "serve", f"--port={port}", "--metrics-port=0"]
    command += ["--worker-metrics-port=0", "--log-level=warning", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment(caches), stdout=output, stderr=output)
    try:
        try:
            wait_until_serving(target, SERVICE, timeout_s=start_timeout_s, is_alive=lambda: process.poll() is None)
        except TimeoutError:
            raise BenchError(f"the service is not ready:\n{log.read_text()[-4000:]}") from None
        yield Service(process=process, target=target, log=log, start_s=time.monotonic() - begin_s)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop by SIGTERM or, if that fails, by force, children included."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        for child in family:
            if child.is_running():
                child.kill()


def run_load(generator: Path | None, service: Service, folder: Path, flags: list[str], *, timeout_s: float) -> object:
    """The report of `octavo bench`, or of another generator. Raises BenchError."""
    out = folder / "load.json"
    port = service.target.rpartition(":")[2]
    ours = ["-m", "octavo.cli.main", "bench", f"--port={port}", f"--save={out}"]
    theirs = [] if generator is None else [str(generator.resolve()), service.target, str(out)]
    command = [sys.executable, *(theirs or ours), *flags]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode or not out.exists():
        said, log = done.stderr[-3000:], service.log.read_text()[-3000:]
        raise BenchError(f"the load generator failed ({done.returncode}):\n{said}\nthe service said:\n{log}")
    return json.loads(out.read_text())


def shares(before_s: dict[int, float], after_s: dict[int, float], seconds: float) -> list[float]:
    """Cores that each process kept busy, the busiest first, since connections do not spread evenly over gateways."""
    used = [after_s[pid] - before_s.get(pid, 0.0) for pid in after_s]
    return sorted((round(each / seconds, 3) for each in used), reverse=True)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Measure everything; one report."""
    begin_s = time.monotonic()
    model = arguments.model or write_checkpoint(folder / "random-model", SHAPES[arguments.shape])
    written_s = time.monotonic() - begin_s
    flags = [f"--model={model}", f"--device={arguments.device}", f"--gateways={arguments.gateways}"]
    flags += [f"--max-model-len={arguments.max_model_len}", *arguments.serve_flags]
    with serving(folder, flags, start_timeout_s=arguments.start_timeout_s) as service:
        before, begin_s = service.cpu_s(), time.monotonic()
        load = run_load(
            arguments.load_generator, service, folder, arguments.load_flags, timeout_s=arguments.load_timeout_s
        )
        seconds, after = time.monotonic() - begin_s, service.cpu_s()
    return {
        "shape": None if arguments.model else arguments.shape,
        "serve_flags": flags,
        "load_flags": arguments.load_flags,
        "cpus": len(os.sched_getaffinity(0)),
        "checkpoint_s": round(written_s, 2),
        "start_s": round(service.start_s, 2),
        "load_s": round(seconds, 2),
        "cpu_share": {role: shares(before[role], after[role], seconds) for role in after},
        "load": load,
    }


def parse(words: list[str]) -> argparse.Namespace:
    """The command line; what follows `--` goes to `octavo serve`."""
    own, serve_flags = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, list[str]())
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load-generator", type=Path, help="another one than octavo bench")
    parser.add_argument("--load-flags", type=shlex.split, default=[])
    parser.add_argument("--model", type=Path, help="a checkpoint folder, instead of random weights")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--start-timeout-s", type=float, default=240.0)
    parser.add_argument("--load-timeout-s", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(own)
    arguments.serve_flags = serve_flags
    return arguments


def main() -> None:
    """Measure and print. Raises SystemExit with the output if the service or the load generator failed."""
    arguments = parse(sys.argv[1:])
    if arguments.device.startswith("cuda"):
        need_cuda()
    try:
        with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
            text = json.dumps(measure(arguments, Path(folder)))
    except BenchError as error:
        raise SystemExit(f"error: {error}") from None
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
