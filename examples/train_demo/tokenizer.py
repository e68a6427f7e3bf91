"""Trains Folio's tokenizer: byte-level BPE that splits text exactly as Qwen2's does, with Qwen2's special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
TOOL_TAGS = ("<tool_call>", "</tool_call>")
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A tokenizer with exactly `vocab_size` ids, the special ones last as in Qwen2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    num_learned = vocab_size - len(SPECIAL) - len(TOOL_TAGS)
    trainer = trainers.BpeTrainer(
        vocab_size=num_learned, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in TOOL_TAGS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_len: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers expects them."""
    folder.mkdir(parents=True, exist_ok=True)
    described = json.loads(tokenizer.to_str())
    described["decoder"] = described["post_processor"]  # the options that Qwen2's file has; decoding ignores them
    (folder / "tokenizer.json").write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n")
    template = TEMPLATE.read_text()
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": token in SPECIAL,
        }
        for token in (*SPECIAL, *TOOL_TAGS)
    }  # fmt: skip
    config = {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added,
        "additional_special_tokens": [TURN_START, TURN_END], "bos_token": None, "chat_template": template,
        "clean_up_tokenization_spaces": False, "eos_token": TURN_END, "errors": "replace",
        "model_max_length": max_len, "pad_token": END_OF_TEXT, "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (folder / "chat_template.jinja").write_text(template)
