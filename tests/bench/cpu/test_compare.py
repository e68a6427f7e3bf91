"""The CPU benchmark on a toy: it measures what it says, and our side really generates."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from bench.cpu import compare, limits
from bench.cpu.compare import Effort, Entry, Workload, measure, workloads
from bench.cpu.local_engine import LocalEngine
from bench.cpu.peers import sides
from bench.cpu.peers.install import cmake_arguments
from bench.cpu.workloads import Ask, ask, mixed
from bench.shapes import Shape
from octavo.model import CausalLM, ModelConfig, generate
from octavo.model.cpu.isa import Isa, cpu_isa

TOY = ModelConfig(
    vocab_size=10_000,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
SHAPE = Shape(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=10_000)


class Fixed:
    """A side that takes as long as it is told."""

    def __init__(self, name: str, *seconds: float) -> None:
        self.name, self._seconds = name, list(seconds)

    def serve(self, asks: Sequence[Ask]) -> float:
        return self._seconds.pop(0)


def test_our_side_gives_the_tokens_of_the_oracle() -> None:
    model = CausalLM.random(TOY, seed=0)
    for parameter in model.parameters():
        parameter.data *= 8
    asks = mixed(np.random.default_rng(0), count=5, shortest=2, longest=12)
    engine = LocalEngine(model, max_num_seqs=3, max_model_len=30, max_batch_tokens=8)
    expected = [generate(model, a.prompt_ids_T.tolist(), max_new_tokens=a.num_output) for a in asks]
    assert engine.outputs(asks) == expected


def legs(*num_outputs: int) -> list[list[Ask]]:
    rng = np.random.default_rng(0)
    return [[ask(rng, num_prompt=1, num_output=num_output)] for num_output in num_outputs]


@pytest.mark.parametrize(("unit", "wanted"), [("ms/token", 4.0), ("tok/s", 0.25)])
def test_the_least_times_of_each_leg_are_compared_with_ours_of_the_same_weights(unit: str, wanted: float) -> None:
    sides = [
        Entry(side=Fixed("ours", 2.0, 0.9, 9.0, 1.0)),  # two legs a turn, ours first in the first turn
        Entry(side=Fixed("ours, int8", 1.0, 0.5, 1.0, 0.5)),
        Entry(side=Fixed("rival", 6.0, 1.0, 4.9, 8.0), rival_of="ours"),
        Entry(side=Fixed("alone", 1.0, 0.0, 1.0, 0.0), rival_of="-"),
    ]
    workload = Workload(name="w", unit=unit, legs=legs(3, 1), figure=lambda seconds: seconds[0] - seconds[1])
    (line,) = measure(sides, [workload], 2, lambda text: None)
    assert line.seconds["ours"] == [[2.0, 9.0], [0.9, 1.0]]
    assert line.figures == pytest.approx({"ours": 1.1, "ours, int8": 0.5, "rival": 3.9, "alone": 1.0})
    better = 3.9 / 1.1
    assert line.ratios == pytest.approx({"rival": better if wanted > 1 else 1 / better})


def test_the_workloads_are_those_of_the_page() -> None:
    made = {each.name: each for each in workloads(Effort())}
    sizes = {
        name: [(len(leg), len(leg[0].prompt_ids_T), leg[0].num_output) for leg in each.legs]
        for name, each in made.items()
        if not name.startswith("mixed")
    }
    assert sizes == {
        "first token of 512": [(1, 512, 1)],
        "batch 1": [(1, 96, 65), (1, 96, 1)],
        "batch 8": [(8, 48, 32), (8, 48, 1)],
        "batch 32": [(32, 48, 32), (32, 48, 1)],
    }
    assert made["batch 1"].figure([7.4, 1.0]) == pytest.approx(100.0)  # ms a token
    assert made["batch 8"].figure([3.48, 1.0]) == pytest.approx(100.0)  # tokens a second
    several = made["mixed, 16 requests"].legs[0]
    assert len(several) == 16
    assert all(20 <= len(each.prompt_ids_T) <= 200 and 20 <= each.num_output <= 200 for each in several)


def test_the_whole_run_prints_and_writes_every_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(repeats=2, first_tokens=8, decode_tokens=2, batch_tokens=2, mixed_requests=3, longest=24)
    monkeypatch.setattr(sides, "FOLDER", tmp_path / "none")
    monkeypatch.setitem(compare.PUBLISHED, "0.5B", SHAPE)
    monkeypatch.setattr(compare, "QUICK", effort)
    monkeypatch.setattr(
        compare, "measure_limits", lambda clock: limits.measure_limits(clock, read_bytes=1 << 22, size=64)
    )
    console = Console(record=True, width=200, file=io.StringIO())
    monkeypatch.setattr(compare, "Console", lambda width: console)
    path = tmp_path / "deep" / "figures.json"
    assert compare.main(["--quick", "--threads", "1", "--json", str(path)]) == 0
    written, text = json.loads(path.read_text()), console.export_text()
    assert {line["workload"] for line in written["lines"]} == {each.name for each in workloads(effort)}
    for line in written["lines"]:
        assert all(len(leg) == 2 for legs_ in line["seconds"].values() for leg in legs_)
        assert set(line["ratios"]) == {"transformers, bf16 weights"}
    assert written["class"] == cpu_isa().word
    assert written["machine"]["torch"] == torch.__version__
    assert {"fp32", "bf16"} <= written["limits"]["products"].keys()
    assert text.count("OpenVINO GenAI and llama.cpp are left out: there is no") == 1
    assert "make bench-peers" in text
    assert "GB/s" in text


FAKE = """
import json, sys
print("a library says hello", flush=True)
print(json.dumps({"name": "fake 1", "arguments": sys.argv[1:]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["outputs"] == [0]:
        sys.exit(3)
    answer = {"error": "no"} if asked["outputs"] == [1] else {"seconds": float(sum(map(len, asked["prompts"])))}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of peers whose Python is ours, and its scripts' folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "dies.py").write_text("import there_is_no_such_module")
    monkeypatch.setattr(sides, "FOLDER", tmp_path)
    monkeypatch.setattr(sides, "_SCRIPTS", tmp_path)
    return tmp_path


def test_a_peer_is_asked_over_its_input_and_says_what_is_wrong(peers: Path) -> None:
    side = sides.PeerSide("fake", "fake.py", "x")
    try:
        assert side.version == "fake 1"
        rng = np.random.default_rng(0)
        assert side.serve([ask(rng, num_prompt=5, num_output=2), ask(rng, num_prompt=7, num_output=2)]) == 12.0
        with pytest.raises(RuntimeError, match="fake: no"):
            side.serve([ask(rng, num_prompt=5, num_output=1)])
        with pytest.raises(RuntimeError, match="fake ended with status 3"):
            side.serve([ask(rng, num_prompt=5, num_output=0)])
    finally:
        side.close()
        side.close()


def test_a_peer_that_fails_at_the_first_request_is_left_out_in_a_sentence(peers: Path) -> None:
    told: list[str] = []
    ours, theirs = Entry(side=Fixed("ours", 1.0)), Entry(side=sides.PeerSide("fake", "fake.py"), rival_of="ours")
    try:
        ready = compare.warm([ours, theirs], [ask(np.random.default_rng(0), num_prompt=5, num_output=0)], told.append)
    finally:
        theirs.side.close()  # type: ignore[attr-defined]
    assert (ready, told) == ([ours], ["fake is left out: fake ended with status 3"])


def test_a_peer_that_cannot_start_is_left_out_in_a_sentence(peers: Path) -> None:
    with pytest.raises(sides.PeerMissing, match=r"^fake is left out: it does not start here; make bench-peers"):
        sides.PeerSide("fake", "dies.py")
    with pytest.raises(sides.PeerMissing, match=r"^the peers are left out: their environment cannot write a model"):
        sides.random_gguf(SHAPE, "q8_0")


def test_llama_is_left_out_where_it_would_use_what_is_hidden(peers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "random_gguf", lambda shape, weights: peers / "model")
    (peers / "serve_llama.py").write_text(FAKE)
    monkeypatch.setattr(sides, "machine_isa", lambda: Isa.AMX)
    monkeypatch.setattr(sides, "cpu_isa", lambda: Isa.AVX2)
    with pytest.raises(sides.PeerMissing, match=r"above avx2; make bench-peers ISA=avx2 compiles one"):
        sides.llama(SHAPE, "q8_0", 1, "wall")
    (peers / "llama-avx2").mkdir()
    sides.llama(SHAPE, "q8_0", 1, "wall").close()


@pytest.mark.parametrize("isa", [Isa.AVX2, Isa.AVX512, Isa.VNNI, Isa.BF16, Isa.AMX])
def test_llama_is_compiled_with_nothing_above_its_class(isa: Isa) -> None:
    switches = dict(each[2:].split("=") for each in cmake_arguments(isa).split())
    assert switches["GGML_NATIVE"] == "OFF"
    wanted = {
        "AVX2": Isa.AVX2,
        "AVX512": Isa.AVX512,
        "AVX512_VNNI": Isa.VNNI,
        "AVX512_BF16": Isa.BF16,
        "AMX_BF16": Isa.AMX,
    }
    for name, least in wanted.items():
        assert switches[f"GGML_{name}"] == ("ON" if least <= isa else "OFF")
