"""Pins every image of others in docker-compose.yml and deploy/*.Dockerfile by the digest that its tag has now.

`make pin-images` runs it; it asks the registries with `docker buildx imagetools`, which needs no running daemon. The
tag stays in front of the digest, so that people can read it and tools can follow it.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = re.compile(
    r"^(?P<head>\s*image:\s*|FROM\s+)(?P<image>[\w./-]+:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?", re.MULTILINE
)
"""An image with a tag. Images without one are built from this repository."""


class NoDigest(Exception):
    """A registry did not tell."""


def main() -> int:
    """0, or 1 where a digest could not be had; then no file is changed."""
    files = [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy").glob("*.Dockerfile"))]
    texts = {file: file.read_text() for file in files}
    images = sorted({match["image"] for text in texts.values() for match in REFERENCE.finditer(text)})
    try:
        digests = {image: digest_of(image) for image in images}
    except NoDigest as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    for file, text in texts.items():
        file.write_text(REFERENCE.sub(lambda match: f"{match['head']}{match['image']}@{digests[match['image']]}", text))
    sys.stdout.write("".join(f"{image}@{digest}\n" for image, digest in digests.items()))
    return 0


def digest_of(image: str) -> str:
    """Of all its platforms together. Raises NoDigest."""
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoDigest(f"{image}: docker cannot be asked: {error}") from error
    said = done.stdout.strip()
    if done.returncode != 0 or not re.fullmatch(r"sha256:[0-9a-f]{64}", said):
        why = (done.stderr.strip().splitlines() or [said or "no answer"])[-1]
        raise NoDigest(f"{image}: its registry gave no digest: {why}")
    return said


if __name__ == "__main__":
    sys.exit(main())
