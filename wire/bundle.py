"""The tokenizer files that travel from a worker to its gateways: which may, their digest, and the special tokens that
they name."""

import hashlib
from collections.abc import Mapping
from typing import Any

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

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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


def special_tokens(config: Mapping[str, Any], tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Name ("eos_token") -> text, of those that have one, as transformers has them.

    config: tokenizer_config.json. tokens_map: special_tokens_map.json, which counts where config lists no
    added_tokens_decoder, and then first: checkpoints saved before there was one.
    """
    of_map = {} if "added_tokens_decoder" in config else tokens_map
    named = {name: of_map.get(name, config.get(name)) for name in SPECIAL_NAMES}
    extra = config.get("extra_special_tokens")
    texts = {name: _text(token) for name, token in (named | (extra if isinstance(extra, dict) else {})).items()}
    return {name: text for name, text in texts.items() if text}


def _text(token: object) -> str | None:
    """A token is its text or, with what else is said of it, an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
