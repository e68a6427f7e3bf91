"""The tokenizer files that travel from a worker to its gateways: which may, and their digest."""

import hashlib

BUNDLE_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)


class BundleError(ValueError):
    """A bundle that is not what its digest says, or has files that do not belong into one."""


def bundle_digest(files: dict[str, bytes]) -> str:
    """SHA-256 hex over names and contents, in name order; lengths between them, so that no two bundles run together."""
    digest = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def check_bundle(files: dict[str, bytes], digest: str) -> None:
    """Raises BundleError: an unexpected name (a gateway writes them to files), no files, or the wrong digest."""
    strangers = sorted(set(files) - set(BUNDLE_FILES))
    if strangers:
        raise BundleError(f"unexpected file {strangers[0][:80]!r}")
    if not files:
        raise BundleError("no files")
    actual = bundle_digest(files)
    if actual != digest:
        raise BundleError(f"digest is {actual}, announced was {digest[:80]!r}")
