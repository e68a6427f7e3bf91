"""Writes a GGUF file with random weights in the shape of Qwen2.5, which llama.cpp and OpenVINO GenAI both read. Runs in
the peers' environment: `python random_gguf.py '{"hidden_size": 896, …}' q8_0 FILE`.

The tokenizer is as large as the model's but useless: requests are token ids.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

TYPES = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
STD = 0.02


def write(shape: dict[str, int], weights: str, path: Path) -> None:
    """shape: the fields of bench.shapes.Shape, and head_dim."""
    writer = gguf.GGUFWriter(path, "qwen2")
    layers, D, I = shape["num_layers"], shape["hidden_size"], shape["intermediate_size"]
    N, K, H, V = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"], shape["vocab_size"]
    writer.add_name("random")
    writer.add_block_count(layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(I)
    writer.add_head_count(N)
    writer.add_head_count_kv(K)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(FILE_TYPES[weights])
    _add_tokenizer(writer, V)
    rng, wanted = np.random.default_rng(0), TYPES[weights]

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), dtype=np.float32) * STD
        writer.add_tensor(f"{name}.weight", quantize(values, wanted), raw_dtype=wanted)

    def vector(name: str, size: int, base: float) -> None:
        values = base + rng.standard_normal(size, dtype=np.float32) * STD
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd", V, D)
    for n in range(layers):
        for name, rows in (("q", N * H), ("k", K * H), ("v", K * H)):
            matrix(f"blk.{n}.attn_{name}", rows, D)
            vector(f"blk.{n}.attn_{name}.bias", rows, 0.0)
        matrix(f"blk.{n}.attn_output", D, N * H)
        matrix(f"blk.{n}.ffn_gate", I, D)
        matrix(f"blk.{n}.ffn_up", I, D)
        matrix(f"blk.{n}.ffn_down", D, I)
        for norm in ("attn_norm", "ffn_norm"):
            vector(f"blk.{n}.{norm}.weight", D, 1.0)
    vector("output_norm.weight", D, 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Add every byte, two letters for each further token, and three special tokens at the end."""
    letters = _byte_letters()
    words = [*letters, *(one + other for one in letters for other in letters)]
    words += [words[256 + i % 60_000] + letters[i // 60_000 + 33] for i in range(max(0, size - len(words)))]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*words[: size - len(specials)], *specials]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 3) + [gguf.TokenType.CONTROL] * 3)
    writer.add_token_merges([f"{one} {other}" for one in letters[33:43] for other in letters[33:43]])
    for add in (writer.add_bos_token_id, writer.add_pad_token_id):
        add(size - 3)
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's byte-level tokenizer."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    codes, more = [], 256
    for byte in range(256):
        codes.append(byte if byte in plain else more)
        more += byte not in plain
    return [chr(code) for code in codes]


if __name__ == "__main__":
    write(json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
