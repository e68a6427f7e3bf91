"""What gateways must know of a model, read from its checkpoint folder: the ModelCard and the tokenizer's files.

Only small JSON files are read. No torch: a worker with the oracle runner describes a model too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from wire.bundle import BUNDLE_FILES, bundle_digest
from wire.messages import ModelCard

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "repetition_penalty")
# tokenizer.json holds what these hold; they would only make the bundle larger.
_OLD_FORMAT = {"vocab.json", "merges.txt", "added_tokens.json"}

Json = dict[str, Any]


class CardError(Exception):
    """A checkpoint folder whose JSON files do not describe a model that can be served; names file and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A checkpoint folder without its weights.

    vocab_size: ids that the tokenizer knows (highest id + 1), not the embedding's rows.
    max_model_len: positions that the model was made for, YaRN included.
    """

    files: dict[str, bytes]
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]

    def card(self, *, name: str, fingerprint: str, dtype: str, max_model_len: int) -> ModelCard:
        """The card under the name that it is served by."""
        return ModelCard(
            name=name,
            fingerprint=fingerprint,
            architecture=self.architecture,
            dtype=dtype,
            max_model_len=max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            default_sampling=self.default_sampling,
            tokenizer_digest=bundle_digest(self.files),
        )


def describe(folder: Path) -> Described:
    """Read a folder in HF layout. Raises CardError."""
    config = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    files = tokenizer_files(folder)
    vocab_size = tokenizer_vocab_size(files["tokenizer.json"])
    rows = config.get("vocab_size", vocab_size)
    if not isinstance(rows, int) or rows < vocab_size:
        raise CardError(f"{folder}: tokenizer.json has {vocab_size} ids, config.json a vocab_size of {rows}")
    return Described(
        files=files,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        vocab_size=vocab_size,
        max_model_len=context_len(config),
        eos_token_ids=end_token_ids(config, generation, vocab_size=vocab_size),
        default_sampling=default_sampling(generation),
    )


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files that gateways need to tokenize and to render chats. Raises CardError without a tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        raise CardError(f"{folder}: there is no tokenizer.json in it, so no text can be read or written")
    names = [name for name in BUNDLE_FILES if name not in _OLD_FORMAT and (folder / name).is_file()]
    return {name: (folder / name).read_bytes() for name in names}


def tokenizer_vocab_size(tokenizer_json: bytes) -> int:
    """Highest id + 1 over the vocabulary and the added tokens. Raises CardError."""
    try:
        tokenizer = msgspec.json.decode(tokenizer_json)
        ids = [token["id"] for token in tokenizer.get("added_tokens") or ()]
        return int(max([*tokenizer["model"]["vocab"].values(), *ids])) + 1
    except (msgspec.MsgspecError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CardError(f"tokenizer.json is not a tokenizer with a vocabulary: {error!r}") from None


def context_len(config: Mapping[str, Any]) -> int:
    """Positions of the model; YaRN (rope_scaling of type yarn) extends them by its factor. Raises CardError."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        raise CardError(f"config.json: max_position_embeddings is {positions!r}")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return positions
    original = scaling.get("original_max_position_embeddings") or positions
    return max(positions, int(original * scaling.get("factor", 1.0)))


def end_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], *, vocab_size: int) -> tuple[int, ...]:
    """EOS ids: generation_config.json's list where it has one, else config.json's; in their order, each once."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [found] if isinstance(found, int) else list(found or ())
    if not all(isinstance(each, int) and 0 <= each < vocab_size for each in ids):
        raise CardError(f"eos_token_id {ids} is not within the tokenizer's {vocab_size} ids")
    return tuple(dict.fromkeys(ids))


def default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """What generation_config.json recommends; do_sample false means greedy."""
    chosen = {name: float(generation[name]) for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return chosen


def _read_json(path: Path) -> Json:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CardError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise CardError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise CardError(f"{path} is not a JSON object")
    return content
