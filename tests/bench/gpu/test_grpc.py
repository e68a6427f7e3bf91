"""The measurement through gRPC, with a small service and a load generator of three lines."""

import argparse
from pathlib import Path

import pytest

pytest.importorskip("smg_grpc_proto")
from bench.gpu.grpc import BenchError, measure, parse

GENERATOR = """
import json, sys
import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb, vllm_engine_pb2_grpc as pb_grpc

request = pb.GenerateRequest(stream=True, tokenized=pb.TokenizedInput(input_ids=[10_000]))
request.sampling_params.max_tokens = int(sys.argv[3])
request.sampling_params.ignore_eos = True
with grpc.insecure_channel(sys.argv[1]) as channel:
    answers = list(pb_grpc.VllmEngineStub(channel).Generate(request))
json.dump({"tokens": sum(len(answer.chunk.token_ids) for answer in answers)}, open(sys.argv[2], "w"))
"""


def arguments(tmp_path: Path, source: str) -> argparse.Namespace:
    generator = tmp_path / "load.py"
    generator.write_text(source)
    words = ["--load-generator", str(generator), "--shape", "tiny", "--device", "cpu", "--gateways", "1"]
    return parse([*words, "--load-flags", "7", "--", "--num-blocks=256", "--num-threads=1"])


def test_a_measurement_starts_the_service_reports_the_load_and_stops_it(tmp_path: Path) -> None:
    report = measure(arguments(tmp_path, GENERATOR), tmp_path)
    assert report["load"] == {"tokens": 7}
    assert (report["shape"], report["load_flags"]) == ("tiny", ["7"])
    share = report["cpu_share"]
    assert isinstance(share, dict)
    assert {role: len(each) for role, each in share.items()} == {"gateway": 1, "worker": 1}


def test_without_a_generator_of_ones_own_octavo_bench_measures(tmp_path: Path) -> None:
    words = ["--shape", "tiny", "--device", "cpu", "--gateways", "1"]
    flags = "--num-prompts 3 --input-len 8 --output-len 5"
    report = measure(parse([*words, "--load-flags", flags, "--", "--num-blocks=256", "--num-threads=1"]), tmp_path)
    load = report["load"]
    assert isinstance(load, dict)
    assert [(run["completed"], run["total_output_tokens"]) for run in load["runs"]] == [(3, 15)]


def test_a_load_generator_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no such thing"):
        measure(arguments(tmp_path, "raise SystemExit('no such thing')"), tmp_path)
