"""How large the images are, without building any: the wheels of a lock, as they are downloaded and unpacked.

    python deploy/image_sizes.py [gateway worker-cpu worker-cuda]

Prints rows of a Markdown table (docs/supply-chain.md has them). pip fetches the wheels, gigabytes for worker-cuda, into
a folder that is removed. What an image has besides is not in it: the base image, a compiler in those of workers,
torch's build for CPUs in worker-cpu, which deploy/install_torch.py installs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

LOCKS = Path(__file__).resolve().parent / "locks"
ROLES = ("gateway", "worker-cpu", "worker-cuda")
PYTHON = "3.12"
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 42)))  # Debian 13


def fetch(lock: Path, folder: Path) -> list[Path]:
    """The wheels that the images' Python would install. Raises CalledProcessError."""
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", f"--python-version={PYTHON}", "-r", str(lock)]
    options += [f"--platform={each}" for each in PLATFORMS]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "-d", str(folder)]
    subprocess.run([*command, *options], check=True)
    return sorted(folder.glob("*.whl"))


def sizes(wheels: list[Path]) -> tuple[int, int]:
    """Bytes as downloaded, and unpacked."""
    unpacked = 0
    for wheel in wheels:
        with ZipFile(wheel) as archive:
            unpacked += sum(entry.file_size for entry in archive.infolist())
    return sum(wheel.stat().st_size for wheel in wheels), unpacked


def row(role: str) -> str:
    """One line of the table, with the three largest wheels."""
    with tempfile.TemporaryDirectory() as folder:
        wheels = fetch(LOCKS / f"{role}.txt", Path(folder))
        packed, unpacked = sizes(wheels)
        largest = sorted(wheels, key=lambda wheel: -sizes([wheel])[1])[:3]
        named = ", ".join(f"{wheel.name.split('-')[0]} {megabytes(sizes([wheel])[1])}" for wheel in largest)
        return f"| `{role}` | {len(wheels)} | {megabytes(packed)} | {megabytes(unpacked)} | {named} |"


def megabytes(size: int) -> str:
    """Rounded, GB from a thousand on."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def main(roles: list[str]) -> int:
    """0, or 1 where pip could not fetch a lock's wheels, or 2 for a role that has no image."""
    if unknown := [role for role in roles if role not in ROLES]:
        sys.stderr.write(f"error: {unknown[0]!r} has no image; there are {', '.join(ROLES)}\n")
        return 2
    for role in roles or ROLES:
        try:
            sys.stdout.write(f"{row(role)}\n")
        except subprocess.CalledProcessError:
            sys.stderr.write(
                f"error: pip could not fetch the wheels of deploy/locks/{role}.txt; the lines above say why\n"
            )
            return 1
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
