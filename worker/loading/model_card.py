"""What gateways must know about a model, read from its checkpoint folder: the ModelCard and the tokenizer's files.

Only small JSON files are read. No torch: a worker with the oracle runner describes a model too.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
from tokenizers import Tokenizer

from octavo.wire.bundle import BUNDLE_FILES, bundle_digest, special_tokens
from octavo.wire.checkpoint_files import FileRefused, find_file, read_small_file
from octavo.wire.messages import ModelCard

SAMPLING_DEFAULTS = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**32 - 1),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.nextafter(1e-6, 1.0), 100.0),
}
"""The fields of generation_config.json that a request inherits, with the lowest and highest value that the API allows
in a request; here a top_k of -1 keeps all tokens, as 0 does in a request."""
_POSITION = re.compile(r" at line \d+ column \d+")
# tokenizer.json contains all of these; they would only make the bundle larger.
_OLD_FORMAT = {"vocab.json", "merges.txt", "added_tokens.json"}

_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Where transformers 5 keeps named templates."""

MOST_IDS = 1 << 24
MOST_POSITIONS = 1 << 24
DEFAULT_POSITIONS = 32_768
"""The default if config.json gives none, as in model.config and transformers."""
MOST_FILE_BYTES = 256 << 20
"""Size limit of a tokenizer's file; Qwen2.5's largest has 11 MB."""

Json = dict[str, Any]


class CardError(Exception):
    """A checkpoint folder's JSON files do not describe a model that can be served; names file and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A checkpoint folder, apart from its weights.

    vocab_size: ids that the tokenizer knows (highest id + 1), not the embedding's rows.
    max_model_len: positions that the model supports, YaRN included. notes: for the operator.
    """

    files: dict[str, bytes]
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    notes: tuple[str, ...] = ()

    def card(
        self,
        *,
        name: str,
        fingerprint: str,
        dtype: str,
        max_model_len: int,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
    ) -> ModelCard:
        """The model's card. name: that it is served by."""
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
            tensor_parallel_size=tensor_parallel_size,
            kv_cache_dtype=kv_cache_dtype,
        )


def served_name(model: str) -> str:
    """The name to serve a model by if none was given: the last part of a folder's path, else `model` itself."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model


def describe(folder: Path) -> Described:
    """Read a folder in HF layout. Raises CardError."""
    config = _parse_json(folder, "config.json")
    if config is None:
        raise CardError(f"cannot read {folder / 'config.json'}: it is not there")
    generation = _parse_json(folder, "generation_config.json") or {}
    files = tokenizer_files(folder)
    vocab_size = tokenizer_vocab_size(files["tokenizer.json"])
    check_tokenizer(files["tokenizer.json"], folder / "tokenizer.json")
    rows = config.get("vocab_size", vocab_size)
    if not isinstance(rows, int) or not vocab_size <= rows <= MOST_IDS:
        raise CardError(f"{folder}: tokenizer.json has {vocab_size} ids, config.json a vocab_size of {rows!r:.40}")
    tokens = named_tokens(files)
    eos_token_ids = end_token_ids(config, generation, tokens.end, vocab_size=vocab_size)
    return Described(
        files=files,
        architecture=_architecture(config),
        vocab_size=vocab_size,
        max_model_len=context_len(config),
        eos_token_ids=eos_token_ids,
        default_sampling=default_sampling(generation),
        notes=context_notes(config) + token_notes(tokens.strangers, eos_token_ids) + template_notes(folder),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0])[:100] if isinstance(names, list) and names else "unknown"


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files that gateways need to tokenize and to render chats, by name. Raises CardError if there is no
    tokenizer.json, or the template is not UTF-8."""
    found = {name: _read_file(folder, name) for name in BUNDLE_FILES if name not in _OLD_FORMAT}
    files = {name: content for name, content in found.items() if content is not None}
    if "tokenizer.json" not in files:
        raise CardError(f"{folder}: there is no tokenizer.json in it, so no text can be read or written")
    try:
        files.get(_TEMPLATE, b"").decode()
    except UnicodeDecodeError as error:
        raise CardError(f"{folder / _TEMPLATE} is not UTF-8: byte {error.start} begins no character") from None
    return files


def tokenizer_vocab_size(tokenizer_json: bytes) -> int:
    """Highest id + 1 over the vocabulary and the added tokens. Raises CardError."""
    try:
        tokenizer = msgspec.json.decode(tokenizer_json)
        ids = [token["id"] for token in tokenizer.get("added_tokens") or ()]
        size = int(max([*tokenizer["model"]["vocab"].values(), *ids])) + 1
    except RecursionError:
        raise CardError("tokenizer.json: objects and lists are nested too deeply") from None
    except (msgspec.MsgspecError, AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CardError(f"tokenizer.json is not a tokenizer with a vocabulary: {error!r}") from None
    if not 0 < size <= MOST_IDS:
        raise CardError(f"tokenizer.json: its largest id is {size - 1}, and must be below {MOST_IDS}")
    return size


def check_tokenizer(tokenizer_json: bytes, path: Path) -> None:
    """Raises CardError if the tokenizers library cannot load it: gateways could then serve only token ids. Loads it
    without vocabulary and merges, which take half a second, unless these do not fit together; then the library says
    why. Not with a prefix before every token except a word's first: that, gateways refuse by themselves, and the
    library can end the process over its merges. path: for the message."""
    content = msgspec.json.decode(tokenizer_json)
    if content["model"].get("continuing_subword_prefix") or _fits_together(content["model"]):
        content["model"] |= {"vocab": {}} | ({"merges": []} if "merges" in content["model"] else {})
    try:
        Tokenizer.from_str(msgspec.json.encode(content).decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and where it panics not even that
        why = _POSITION.sub("", str(error))  # a position in the text made here, not in the file
        raise CardError(f"{path} cannot be loaded by tokenizers {version('tokenizers')}: {why[:200]}") from None


def _fits_together(model: Json) -> bool:
    """Whether ids are numbers, and both parts of every merge and its result are in the vocabulary, as in most BPE
    tokenizers. False if that is not obvious."""
    vocab, merges = model["vocab"], model.get("merges", [])
    try:
        pairs = [each.split(" ") if isinstance(each, str) else each for each in merges]
        are_known = all(left in vocab and right in vocab and left + right in vocab for left, right in pairs)
    except (TypeError, ValueError):  # not a list of pairs of texts
        return False
    return are_known and isinstance(merges, list) and all(type(each) is int and each >= 0 for each in vocab.values())


def context_len(config: Mapping[str, Any]) -> int:
    """Positions to serve. YaRN (rope_scaling of type yarn) extends a model's own by its factor; a model that needs dual
    chunk attention beyond some length is served up to there. Raises CardError."""
    cap = dual_chunk_len(config)
    return min(_positions(config), cap) if cap is not None else _positions(config)


def dual_chunk_len(config: Mapping[str, Any]) -> int | None:
    """Positions that a model with dual_chunk_attention_config (Qwen2.5-1M) supports without that attention, which is
    not implemented here; None for every other model. Raises CardError."""
    dual_chunk = config.get("dual_chunk_attention_config")
    if dual_chunk is None:
        return None
    original = dual_chunk.get("original_max_position_embeddings") if isinstance(dual_chunk, dict) else None
    if not _is_count(original):
        raise CardError(
            "config.json: dual_chunk_attention_config is not supported, and its original_max_position_embeddings, up "
            "to which the model could be served without, is missing or no number of tokens"
        )
    return original


def context_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What an operator should know about `context_len`."""
    cap = dual_chunk_len(config)
    if cap is None or cap >= _positions(config):
        return ()
    return (
        f"max_model_len is {cap}, not the {_positions(config)} of config.json: dual chunk attention "
        "(dual_chunk_attention_config), which the model needs beyond, is not supported",
    )


def _positions(config: Mapping[str, Any]) -> int:
    positions = config.get("max_position_embeddings")
    if positions is None:
        positions = DEFAULT_POSITIONS
    if not _is_count(positions):
        raise CardError(f"config.json: max_position_embeddings is {str(positions)[:40]!r}, not a number of tokens")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise CardError("config.json: rope_scaling is not an object")
    kind = scaling.get("type") if scaling.get("rope_type") is None else scaling["rope_type"]
    if kind != "yarn":
        return positions
    name = "original_max_position_embeddings"
    original, factor = scaling.get(name) or config.get(name) or positions, scaling.get("factor", 1.0)
    if not _is_count(original) or not isinstance(factor, int | float) or not 0 < original * factor <= MOST_POSITIONS:
        raise CardError("config.json: rope_scaling: original_max_position_embeddings times factor is no context length")
    return max(positions, int(original * factor))


def _is_count(value: object) -> TypeGuard[int]:
    """Whether it is a number of tokens, up to MOST_POSITIONS, beyond which float32 angles do not tell positions
    apart."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_POSITIONS


def end_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], of_tokenizer: int | None = None, *, vocab_size: int
) -> tuple[int, ...]:
    """EOS ids: those of generation_config.json if it has any, else config.json's; then the tokenizer's own; in that
    order, each once. The tokenizer's is needed since a chat model trained from a base model often has the base model's
    id in both files. Raises CardError."""
    of_generation, of_config = generation.get("eos_token_id"), config.get("eos_token_id")
    found, file = (of_config, "config.json") if of_generation is None else (of_generation, "generation_config.json")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < vocab_size for each in ids):
        numbers = f"{str(found)[:100]} is not within the tokenizer's {vocab_size} ids"
        raise CardError(f"{file}: eos_token_id {numbers}")
    return tuple(dict.fromkeys([*ids, *([] if of_tokenizer is None else [of_tokenizer])]))


class _Added(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_Added] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTokens:
    """What tokenizer_config.json says about tokens. end: the id of its eos_token; None if that is not one of
    tokenizer.json's added tokens. strangers: added tokens that tokenizer.json lacks."""

    end: int | None
    strangers: tuple[str, ...]


def named_tokens(files: Mapping[str, bytes]) -> NamedTokens:
    """Read them from the tokenizer's files. Raises CardError."""
    config, tokens_map = (
        _json_object(name, files.get(name, b"{}")) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    try:
        added = msgspec.json.decode(files["tokenizer.json"], type=_AddedTokens).added_tokens or ()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CardError(f"tokenizer.json: added_tokens: {error}") from None
    ids = {each.content: each.id for each in reversed(added)}
    decoder, more = config.get("added_tokens_decoder"), config.get("additional_special_tokens")
    named = [*(decoder.values() if isinstance(decoder, dict) else ()), *(more if isinstance(more, list) else ())]
    texts = [each.get("content") if isinstance(each, dict) else each for each in named]
    strangers = dict.fromkeys(text for text in texts if isinstance(text, str) and text not in ids)
    return NamedTokens(end=ids.get(special_tokens(config, tokens_map).get("eos_token", "")), strangers=tuple(strangers))


def token_notes(strangers: tuple[str, ...], eos_token_ids: tuple[int, ...]) -> tuple[str, ...]:
    """What an operator should know about the tokens."""
    notes = []
    if strangers:
        listed = ", ".join(map(repr, strangers[:3])) + (", …" if len(strangers) > 3 else "")
        notes.append(
            f"tokenizer_config.json names added tokens that tokenizer.json has not ({listed[:200]}): they are text"
        )
    if not eos_token_ids:
        notes.append(
            "no file names an end token (eos_token_id in generation_config.json or config.json, eos_token in "
            "tokenizer_config.json): outputs end at max_tokens or a stop string only"
        )
    return tuple(notes)


def template_notes(folder: Path) -> tuple[str, ...]:
    """What an operator should know about the chat templates."""
    if not (folder / MORE_TEMPLATES).is_dir():
        return ()
    return (f"{MORE_TEMPLATES} is not read: every chat is written by {_TEMPLATE} or tokenizer_config.json",)


def default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters that generation_config.json recommends; do_sample false means greedy. Raises
    CardError."""
    chosen = {}
    for name, (low, high) in SAMPLING_DEFAULTS.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            span = f"above 0, at most {high:g}" if 0 < low < 1 else f"in [{low:g}, {high:g}]"
            raise CardError(f"generation_config.json: {name} is {str(value)[:40]!r}, should be a number {span}")
        if name == "top_k" and value != int(value):
            raise CardError(f"generation_config.json: top_k is {value}, should be a whole number")
        chosen[name] = 0.0 if (name, value) == ("top_k", -1) else float(value)
    if generation.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return chosen


def _parse_json(folder: Path, name: str) -> Json | None:
    """The object in a JSON file; None if there is no such file. Raises CardError."""
    text = _read_file(folder, name)
    return None if text is None else _json_object(str(folder / name), text)


def _json_object(name: str, text: bytes) -> Json:
    try:
        content = msgspec.json.decode(text)
    except RecursionError:
        raise CardError(f"{name}: objects and lists are nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CardError(f"{name}: {error}") from None
    if not isinstance(content, dict):
        raise CardError(f"{name} is not a JSON object")
    return content


def _read_file(folder: Path, name: str) -> bytes | None:
    try:
        path = find_file(folder, name)
        return None if path is None else read_small_file(path, most_bytes=MOST_FILE_BYTES)
    except FileRefused as error:
        raise CardError(str(error)) from None
    except OSError as error:
        raise CardError(f"cannot read {folder / name}: {error.strerror}") from None
