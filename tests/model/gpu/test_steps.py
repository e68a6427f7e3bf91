"""Decode and mixed steps against the model's own forward on the reference backend, on a GPU or in the interpreter."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import CausalLM, KvPool, ModelConfig, generate
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.attention.prefill import list_last_tiles, list_tiles
from octavo.model.parallel import Ranks
from tests.support.model.interpreter import cut_decodes_coarsely
from tests.support.model.ranks import alone, cut, on_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
S, M = 16, 12
CONFIG = {
    "model_type": "qwen2", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False}
NOT_ON_DEVICE = pytest.mark.skipif(DEVICE == "cuda", reason="a device takes this path with 16-bit weights only")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        cut_decodes_coarsely(monkeypatch)


def ints(values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int32)).to(DEVICE)


class Device:
    """Steps over a random model: rows 0 … 4, tables of random blocks, every block NaN until written."""

    def __init__(self, model: CausalLM, path: str) -> None:
        P = 5 * M + 1
        self.kv = KvPool(model.config, P, S, model.dtype, DEVICE)
        for pool in (*self.kv.k_pools, *self.kv.v_pools):
            pool[:-1] = float("nan")
        self.state = RowState(num_slots=5, table_width=M, scratch_block=P - 1, device=DEVICE)
        self.state.table_RM[:5] = ints(np.random.default_rng(0).permutation(P - 1)).view(5, M)
        weights = GpuWeights.take(model, max_positions=S * M)
        self.decode = DecodeStep(weights, self.state, self.kv, max_batch=8, vocab_size=300)
        of_many = {64: "split_k-64"} if path.startswith("split_k") else {}
        self.decode.autotuner.names = dict.fromkeys(range(1, 9), path) | of_many
        self.mixed = MixedStep(self.decode, max_tokens=256)

    def prefill(self, chunks: list[tuple[int, list[int], int, bool]], decodes: list[int]) -> list[int]:
        """chunks: (row, ids, start, is last). Returns the sampled tokens, decodes first."""
        ids = [-1] * len(decodes) + [token for _, ids, _, _ in chunks for token in ids]
        rows = decodes + [row for row, ids, _, _ in chunks for _ in ids]
        positions = [0] * len(decodes) + [start + i for _, ids, start, _ in chunks for i in range(len(ids))]
        firsts = np.cumsum([len(decodes), *(len(ids) for _, ids, _, _ in chunks)]).tolist()
        placed = [(row, firsts[i], start, len(ids)) for i, (row, ids, start, _) in enumerate(chunks)]
        ended = [i for i, chunk in enumerate(chunks) if chunk[3]]
        for i in ended:
            self.state.num_prompt_R[chunks[i][0]] = chunks[i][2] + len(chunks[i][1])
        self.mixed.run(
            MixedInputs(
                num_decodes=len(decodes), ids_T=ints(ids), row_T=ints(rows), position_T=ints(positions),
                tiles_W4=ints(list_tiles(placed)), last_tiles_W4=ints(list_last_tiles(placed[i] for i in ended)),
                last_S=ints([*range(len(decodes)), *(firsts[i + 1] - 1 for i in ended)]),
                rows_S=ints(decodes + [chunks[i][0] for i in ended]), ended_E=ints([chunks[i][0] for i in ended]),
                position_E=ints([chunks[i][2] + len(chunks[i][1]) - 1 for i in ended]),
            )
        )  # fmt: skip
        return self.decode.token_B[: len(decodes) + len(ended)].tolist()

    def step(self, rows: list[int]) -> list[int]:
        """A decode step, padded by scratch rows."""
        self.decode.rows_B[: len(rows) + 2] = ints([*rows, self.state.scratch_row, self.state.scratch_row])
        self.decode.run(len(rows) + 2)
        return self.decode.token_B[: len(rows)].tolist()


@pytest.mark.timeout(1500)  # half a minute of one core in the interpreter
@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("cublas", {}),
        ("cublas", {"tie_word_embeddings": False}),
        ("cublas", QWEN3),
        pytest.param("split_k-16", {}, marks=[pytest.mark.slow, NOT_ON_DEVICE]),
        pytest.param("split_k-16", QWEN3, marks=[pytest.mark.slow, NOT_ON_DEVICE]),
        pytest.param("small_batch", {}, marks=pytest.mark.slow),
        pytest.param("small_batch", QWEN3, marks=pytest.mark.slow),
        pytest.param("small_batch", {"tie_word_embeddings": False}, marks=pytest.mark.slow),
    ],
)
def test_steps_give_the_tokens_of_the_naive_model(path: str, changes: dict[str, object]) -> None:
    config = ModelConfig.from_dict(CONFIG | changes)
    model = CausalLM.random(config, seed=1, dtype=torch.float32, device=DEVICE)
    with torch.no_grad():
        model.norm.weight += torch.randn_like(model.norm.weight) * 0.2
        for layer in model.decoder_layers:
            layer.input_layernorm.weight += torch.randn_like(layer.input_layernorm.weight) * 0.2
    rng = np.random.default_rng(3)
    prompts = {row: rng.integers(0, 290, size).tolist() for row, size in enumerate((5, 33, 70, 16))}
    expected = {row: generate(model, prompt, max_new_tokens=6) for row, prompt in prompts.items()}
    device = Device(model, path)
    got: dict[int, list[int]] = {row: [] for row in prompts}

    def keep(rows: list[int], tokens: list[int]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            got[row].append(token)

    keep([0], device.prefill([(0, prompts[0], 0, True), (2, prompts[2][:40], 0, False)], []))
    keep([0, 1, 2], device.prefill([(1, prompts[1], 0, True), (2, prompts[2][40:], 40, True)], [0]))
    keep([2, 0, 1], device.step([2, 0, 1]))
    keep([1, 0, 2, 3], device.prefill([(3, prompts[3], 0, True)], [1, 0, 2]))
    for _ in range(2):
        keep([3, 1, 0, 2], device.step([3, 1, 0, 2]))
    assert got == {row: expected[row][: len(got[row])] for row in got}
    assert [len(tokens) for tokens in got.values()] == [6, 5, 5, 3]


RANK_CONFIG = CONFIG | {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}


def whole_model(changes: dict[str, object]) -> CausalLM:
    return CausalLM.random(ModelConfig.from_dict(RANK_CONFIG | changes), seed=1, dtype=torch.float32, device=DEVICE)


def tokens_of_rank(ranks: Ranks, changes: dict[str, object], path: str = "cublas") -> dict[str, object]:
    """A prompt, another in two chunks beside a decode, and decodes of both."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            cut_decodes_coarsely(patch)  # a rank's process has no fixtures
        device = Device(cut(whole_model(changes), ranks), path)
        tokens = [device.prefill([(0, [5, 6, 7], 0, True), (1, list(range(200, 217)), 0, False)], [])]
        tokens.append(device.prefill([(1, list(range(217, 220)), 17, True)], [0]))
        tokens.append(device.step([0, 1]))
    return {"tokens": tokens, "logits": device.decode.join_logits(2).clone()}


class FewRows:
    """Sums of up to four rows by a way of their own, from memory of their own (`PeerSums`), as devices have one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._memory, self.num_sums = ranks, torch.empty(4 * 64), 0

    def takes(self, partial: torch.Tensor) -> bool:
        return partial.numel() <= len(self._memory)

    def room(self, like: torch.Tensor) -> torch.Tensor:
        return self._memory[: like.numel()].view(like.shape).fill_(torch.nan)

    def first_room(self, like: torch.Tensor) -> torch.Tensor:
        return self.room(like)

    def add(self, room: torch.Tensor, x: torch.Tensor) -> None:
        summed = torch.empty_like(x)
        self.sum(room, summed)
        x += summed

    def sum(self, room: torch.Tensor, out: torch.Tensor) -> None:
        assert room.data_ptr() == self._memory.data_ptr() != out.data_ptr()
        self.num_sums += 1
        out.copy_(self._ranks.sum(room.clone()))
        room.fill_(torch.nan)


def tokens_by_peers(ranks: Ranks) -> dict[str, object]:
    """`tokens_of_rank`, where steps of few rows sum another way."""
    peers = FewRows(ranks)
    found = tokens_of_rank(replace(ranks, peers=peers), {})
    return {**found, "sums": peers.num_sums}


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_gpu_ranks.py has the ways that devices have")
@pytest.mark.timeout(600)
def test_sums_of_few_rows_may_go_another_way(tmp_path: Path) -> None:
    expected = alone(tokens_of_rank, {})
    for found in on_ranks(2, tokens_by_peers, tmp_path):
        assert found["sums"] > 4
        assert found["tokens"] == expected["tokens"]
        assert np.abs(found["logits"] - expected["logits"]).max() < 1e-5


class ByShares:
    """Sums of streams, of products that lie beside them (`DividedSums`), as devices of one host have them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.num_sums = ranks, 0
        self._stream = self._products = torch.empty(0)

    def stream(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._stream, self._products = torch.empty(shape, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
        return self._stream

    def takes(self, x: torch.Tensor) -> bool:
        return x.data_ptr() == self._stream.data_ptr()

    def parts(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        yield slice(0, len(x)), self._products[: len(x)]

    def add(self, x: torch.Tensor) -> None:
        self.num_sums += 1
        x += self._ranks.sum(self._products[: len(x)].clone())
        self._products.fill_(torch.nan)

    def arrivals(self, x: torch.Tensor) -> Iterator[slice]:
        yield slice(0, len(x))


def tokens_by_shares(ranks: Ranks) -> dict[str, object]:
    """`tokens_of_rank`, where streams are summed by shares, and products are our own where they may be."""
    shares = ByShares(ranks)
    found = tokens_of_rank(replace(ranks, divided=shares), {}, "split_k-16")
    return {**found, "sums": shares.num_sums}


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_gpu_ranks.py has the ways that devices have")
@pytest.mark.timeout(600)
def test_streams_that_are_summed_by_shares_keep_a_librarys_products(tmp_path: Path) -> None:
    """Those write the room that is summed; ours would write the stream."""
    expected = alone(tokens_of_rank, {})
    for found in on_ranks(2, tokens_by_shares, tmp_path):
        assert found["sums"] == 4  # of both mixed steps: the last layer is finished for few tokens alone
        assert found["tokens"] == expected["tokens"]
        assert np.abs(found["logits"] - expected["logits"]).max() < 1e-5


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_gpu_ranks.py has what two ranks on a device can do")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("changes", [{}, QWEN3], ids=["qwen2", "qwen3"])
def test_two_ranks_give_the_tokens_and_logits_of_one(changes: dict[str, object], tmp_path: Path) -> None:
    expected = alone(tokens_of_rank, changes)
    whole = whole_model(changes)
    first, second = (
        generate(whole, [5, 6, 7], max_new_tokens=3),
        generate(whole, list(range(200, 220)), max_new_tokens=2),
    )
    assert expected["tokens"] == [first[:1], [first[1], second[0]], [first[2], second[1]]]
    for found in on_ranks(2, tokens_of_rank, tmp_path, changes):
        assert found["tokens"] == expected["tokens"]
        assert np.abs(found["logits"] - expected["logits"]).max() < 1e-5
