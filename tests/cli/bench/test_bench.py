"""`octavo bench` against a service on the oracle: what it sends, what it writes, and what it says of mistakes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from octavo.cli.main import main
from tests.support.services.service import Service, environment, launch

INVALID = "Invalid value for"
ORACLE = ("--runner=oracle", "--num-blocks=1024", "--oracle-vocab-size=500", "--gateways=2", "--oracle-eos-every=5")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with launch(tmp_path_factory.mktemp("service"), *ORACLE, "--oracle-step-delay-s=0.002") as running:
        running.wait_until_supervised()
        yield running


def bench(service: Service | None, *words: str) -> subprocess.CompletedProcess[str]:
    port = service.port if service is not None else 1
    command = [sys.executable, "-m", "octavo.cli.main", "bench", f"--port={port}", *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)


def test_help_says_what_holds_where_chat_and_generate_take_the_models_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--help"]) == 0
    told = "Unset, --temperature is 0 here, and --max-tokens what the dataset or --output-len says."
    assert told in " ".join(capsys.readouterr().out.split())


def test_every_token_is_counted_and_the_figures_are_kept(service: Service, tmp_path: Path) -> None:
    save, picture = tmp_path / "out.json", tmp_path / "out.svg"
    lengths = ["--num-prompts=12", "--input-len=20", "--output-len=9"]
    done = bench(service, *lengths, f"--save={save}", f"--picture={picture}")
    assert done.returncode == 0, done.stderr
    content = json.loads(save.read_text())
    (run,) = content["runs"]
    assert (content["target"], content["model_id"], content["dataset"]) == (service.target, "folio-chat", "random")
    counts = ("completed", "failed", "total_input_tokens", "total_output_tokens", "request_rate", "max_concurrency")
    assert [run[name] for name in counts] == [12, 0, 12 * 20, 12 * 9, "inf", None]
    assert run["output_throughput"] == pytest.approx(12 * 9 / run["duration"])
    assert 0 < run["mean_ttft_ms"] <= run["mean_e2el_ms"] <= 1e3 * run["duration"]
    assert f"{'Total generated tokens:':<40} 108" in done.stdout.splitlines()
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert done.stderr.splitlines()[-1] == "run 1 of 1: requests 12/12"


def test_a_sweep_over_concurrencies_keeps_each_limit_from_several_processes(service: Service, tmp_path: Path) -> None:
    save = tmp_path / "out.json"
    words = ["--num-prompts=12", "--input-len=8", "--output-len=12", "--max-concurrency=1,3", "--max-concurrency=5"]
    done = bench(service, *words, "--processes=2", f"--save={save}", f"--picture={tmp_path / 'sweep.svg'}")
    assert done.returncode == 0, done.stderr
    runs = json.loads(save.read_text())["runs"]
    assert [(run["max_concurrency"], run["completed"], run["total_output_tokens"]) for run in runs] == [
        (limit, 12, 144) for limit in (1, 3, 5)
    ]
    assert all(run["max_concurrent_requests"] <= run["max_concurrency"] for run in runs)
    table = done.stdout.rstrip().splitlines()[-4:]
    assert table[0].split()[:2] == ["rate", "concurrency"]
    assert [line.split()[1] for line in table[1:]] == ["1", "3", "5"]


def test_requests_come_when_they_are_due(service: Service, tmp_path: Path) -> None:
    """A trace of one second, and the same lengths at a rate: neither can be over sooner than its last request comes."""
    trace, save = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"timestamp": 250 * index, "input_length": 5 + index, "output_length": 3} for index in range(5)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert bench(service, f"--dataset={trace}", f"--save={save}").returncode == 0
    (run,) = json.loads(save.read_text())["runs"]
    assert (run["request_rate"], run["completed"], run["total_input_tokens"]) == ("trace", 5, 5 + 6 + 7 + 8 + 9)
    assert run["duration"] >= 1.0
    assert bench(service, f"--dataset={trace}", f"--save={save}", "--request-rate=4").returncode == 0
    (run,) = json.loads(save.read_text())["runs"]
    assert (run["request_rate"], run["completed"]) == (4.0, 5)


def test_answers_end_where_the_model_ends_them_unless_lengths_are_exact(service: Service, tmp_path: Path) -> None:
    prompts, save = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(json.dumps({"prompt": f"once upon {index}"}) for index in range(6)))
    words = [f"--dataset={prompts}", "--num-prompts=6", "--output-len=200", f"--save={save}"]
    assert bench(service, *words).returncode == 0
    assert json.loads(save.read_text())["runs"][0]["total_output_tokens"] < 6 * 200
    assert bench(service, *words, "--ignore-eos").returncode == 0
    assert json.loads(save.read_text())["runs"][0]["total_output_tokens"] == 6 * 200


def test_runs_find_no_prefix_of_a_former_run(service: Service, tmp_path: Path) -> None:
    """Sixty blocks of prompt, sent in two runs: the second must compute them again."""
    before = cached_tokens(service)
    assert (
        bench(service, "--num-prompts=4", "--input-len=240", "--output-len=2", "--max-concurrency=1,2").returncode == 0
    )
    assert cached_tokens(service) == before


def cached_tokens(service: Service) -> float:
    """Prefix-cache hits of the worker so far, as its metrics tell."""
    text = service.log.read_text()
    port = text.split("/metrics  (worker-0)")[0].rpartition(":")[2]
    from octavo.cli.serve.readiness import read_metrics

    return sum(value for _, value in read_metrics(f"http://127.0.0.1:{port}/metrics")["octavo_prefix_cache_hits_total"])


def test_requests_that_fail_are_counted_by_their_reason(service: Service, tmp_path: Path) -> None:
    done = bench(service, "--num-prompts=3", "--input-len=100000", "--output-len=8", "--warmups=0")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "note: 3 requests failed: EXCEEDS_CAPACITY"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--request-rate=0"], ["error: bad value for --request-rate", "'0' is no rate"]),
        (["--request-rate=1,fast"], ["error: bad value for --request-rate", "'fast' is no rate"]),
        (["--request-rate=1e-300"], ["error: bad value for --request-rate", "'1e-300' is no rate"]),
        (["--request-rate=1e300"], ["error: bad value for --request-rate", "'1e300' is no rate"]),
        (["--max-concurrency=99999999"], ["error: bad value for --max-concurrency", "'99999999' is no count"]),
        (["--burstiness=1e300"], ["error: bad value for --burstiness", "--burstiness is 1e+300"]),
        (["--max-concurrency=0"], ["error: bad value for --max-concurrency", "'0' is no count"]),
        (["--burstiness=0"], ["error: bad value for --burstiness", "--burstiness is 0"]),
        (["--burstiness=inf", "--request-rate=1"], ["error: bad value for --burstiness", "--burstiness is inf"]),
        (["--picture=a.png"], ["error: bad value for --picture", "--picture is a.png"]),
        (["--save=/nowhere/a.json"], ["error: bad value for --save", "there is no folder /nowhere"]),
        (["--save=/etc"], ["error: bad value for --save", "/etc is a folder"]),
        (
            ["--num-prompts=0"],
            [
                "error: bad command line",
                "Invalid value for '--num-prompts': Input should be greater than or equal to 1",
            ],
        ),
        (
            ["--model-name=other"],
            ["error: which model?", "--model-name is 'other', and the service has folio-chat"],
        ),
        (
            ["--dataset=/nowhere/data"],
            ["error: the dataset cannot be used", "/nowhere/data: No such file or directory"],
        ),
    ],
)
def test_a_mistake_is_told_before_anything_is_sent(
    words: list[str], lines: list[str], service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", f"--port={service.port}", *words])
    written = capsys.readouterr()
    said = [line.strip() for line in written.err.splitlines()]
    assert (code, written.out, said[:2], len(said)) == (2, "", lines, 3)


def test_where_no_service_is_it_says_so() -> None:
    done = bench(None)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: no service answers")
