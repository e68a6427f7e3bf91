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
    """A bundle that does not match its digest, or contains files that do not belong in one."""


def bundle_digest(files: dict[str, bytes]) -> str:
    """SHA-256 hex over names and contents, in name order; lengths are included, so that different bundles never give
    the same bytes."""
    digest = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def check_bundle(files: dict[str, bytes], digest: str) -> None:
    """Raises BundleError for an unexpected name (gateways write the files to disk), no files, or a wrong digest."""
    strangers = sorted(set(files) - set(BUNDLE_FILES))
    if strangers:
        raise BundleError(f"unexpected file {strangers[0][:80]!r}")
    if not files:
        raise BundleError("no files")
    actual = bundle_digest(files)
    if actual != digest:
        raise BundleError(f"digest is {actual}, announced was {digest[:80]!r}")


def special_tokens(config: Mapping[str, Any], tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Name ("eos_token") -> text, of those that have one, as in transformers.

    config: tokenizer_config.json. tokens_map: special_tokens_map.json; used if config lists no added_tokens_decoder,
    and then it takes precedence: such checkpoints were saved before that field existed.
    """
    of_map = {} if "added_tokens_decoder" in config else tokens_map
    named = {name: of_map.get(name, config.get(name)) for name in SPECIAL_NAMES}
    extra = config.get("extra_special_tokens")
    texts = {name: _text(token) for name, token in (named | (extra if isinstance(extra, dict) else {})).items()}
    return {name: text for name, text in texts.items() if text}


def _text(token: object) -> str | None:
    """A token is its text, or an object with the text and further properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
