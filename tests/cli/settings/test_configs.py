from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.errors import CliError
from octavo.cli.main import main
from octavo.cli.settings.addresses import default_endpoint, join_address, make_folders_of_sockets
from octavo.cli.settings.gateway_config import gateway_config
from octavo.cli.settings.groups import GatewaySettings, WorkerSettings
from octavo.cli.settings.model_names import name_of_model, split_model
from octavo.cli.settings.worker_config import default_batch_tokens, worker_config
from octavo.gateway.config import (
    AccessConfig,
    Dialects,
    Exposure,
    GatewayConfig,
    LogFormat,
    PageConfig,
    PeerConfig,
    PortSharing,
    ProcessLimits,
    TlsConfig,
)
from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.grammar.limits import GrammarLimits
from octavo.wire.keys import generate_keys, save_keys
from octavo.worker.config import (
    GPU_MAX_GAP_S,
    GPU_MAX_GAP_STEPS,
    CheckNumerics,
    CurveConfig,
    Deterministic,
    GrammarConfig,
    LoadFormat,
    PrefixCacheMode,
    RunnerKind,
    WorkerConfig,
)
from octavo.worker.loading.loaded import served_name

RUN_DIR = Path("/run/octavo")


def test_settings_left_alone_give_the_gateways_own_defaults() -> None:
    endpoint = default_endpoint(RUN_DIR)
    expected = GatewayConfig(workers=WorkerPoolConfig(endpoints=(endpoint,)))
    assert gateway_config(GatewaySettings(run_dir=RUN_DIR)) == expected


@pytest.mark.parametrize(
    ("given", "page"),
    [
        ({}, None),
        ({"page": "off", "page_port": 7}, None),
        ({"page_port": 7}, PageConfig(port=7)),
        ({"page": "on"}, PageConfig()),
        ({"page": "on", "page_host": "::1", "page_name": ("a.example",)}, PageConfig(host="::1", names=("a.example",))),
    ],
)
def test_a_gateway_has_a_page_where_that_is_asked_for(given: dict[str, object], page: PageConfig | None) -> None:
    assert gateway_config(GatewaySettings(**given)).page == page  # type: ignore[arg-type]


def test_keys_of_workers_may_be_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/me")
    of_gateway = GatewaySettings(gateway_key_file=Path("g.key"), allowed_worker_keys=("~/a.pub", "b.pub"))
    config = gateway_config(of_gateway)
    assert config.workers.allowed_key_files == (Path("/home/of/me/a.pub"), Path("b.pub"))
    with pytest.raises(CliError, match="bad value for --allowed-worker-keys: '~nobody-of-that-name/a': there is no"):
        gateway_config(of_gateway.model_copy(update={"allowed_worker_keys": ("~nobody-of-that-name/a",)}))


def test_a_gateway_that_admits_workers_by_their_keys_has_one_itself() -> None:
    """Without one it would admit every worker, whatever the list says."""
    with pytest.raises(CliError, match="--allowed-worker-keys needs --gateway-key-file") as caught:
        gateway_config(GatewaySettings(allowed_worker_keys=("a.pub",)))
    assert caught.value.exit_code == 2


def test_settings_left_alone_give_the_workers_own_defaults() -> None:
    expected = WorkerConfig(model="folio-chat", gateway_endpoints=(default_endpoint(RUN_DIR),), device="cpu")
    assert worker_config(WorkerSettings(run_dir=RUN_DIR, device="cpu")) == expected


@pytest.mark.parametrize(("device", "seqs", "tokens"), [("cpu", 8, 512), ("cpu", 600, 600), ("cuda:1", 256, 8192)])
def test_a_step_is_as_large_as_the_device_computes_quickly(device: str, seqs: int, tokens: int) -> None:
    assert default_batch_tokens(device, seqs) == tokens


def test_every_setting_of_a_gateway_reaches_its_configuration() -> None:
    settings = GatewaySettings(
        run_dir=RUN_DIR, host="::1", port=7, admin_port=8, metrics_port=9, metrics_host="::1", exposure="insecure",
        dialects="none",
        port_sharing="shared", worker_endpoint=("tcp://127.0.0.1:5",), gateway_key_file=Path("g.key"),
        allowed_worker_keys=("a.pub", "b.pub"), registration_token="word", heartbeat_timeout_s=1.5,
        stall_timeout_s=2.5, drain_grace_s=3.5, max_requests=10, max_prompt_bytes=11, max_message_bytes=2048,
        max_streams_per_connection=13, max_pending_tokens=14, write_stall_s=15.5, pushback_ms=16, tokenizer_threads=17,
        pause_pending_tokens=12,
        keepalive_time_s=18.5, keepalive_timeout_s=19.5, max_connections=24, max_connections_per_peer=25,
        max_connection_idle_s=26.5, log_format="json", log_level="debug",
        tls_cert_file=Path("c.pem"), tls_key_file=Path("k.pem"), tls_client_ca_file=Path("ca.pem"),
        api_keys_file=Path("keys.toml"), public_scopes=("models",), prefix_salt_secret="s",
        status_socket=Path("/run/octavo/s"), supervisor_socket=Path("/run/octavo/v"),
        max_schema_bytes=21, max_schema_depth=22, constraint_timeout_s=23.5,
        template_cpu_s=24.5, max_service_requests=27,
        model_port=("Org/two=11", "a=b=12"),
        expected_model=("one=/somewhere", "Org/two", "/models/three"),
        control_endpoint="ipc:///run/octavo/a.peers.sock", peer_endpoint=("ipc:///run/octavo/b.peers.sock",),
        peer_endpoints_file=Path("p.list"),
    )  # fmt: skip
    config = gateway_config(settings)
    assert config.listen_address == "[::1]:7"
    assert (config.admin_address, config.metrics_address) == ("[::1]:8", "[::1]:9")
    assert config.dialects is Dialects.NONE
    assert config.status_address == "unix:/run/octavo/s"
    assert config.supervisor_address == "unix:/run/octavo/v"
    assert config.access == AccessConfig(
        tls=TlsConfig(cert_file=Path("c.pem"), key_file=Path("k.pem"), client_ca_file=Path("ca.pem")),
        api_keys_file=Path("keys.toml"),
        public_scopes=("models",),
        prefix_salt_secret="s",
    )
    assert (config.exposure, config.port_sharing) == (Exposure.INSECURE, PortSharing.SHARED)
    assert (config.log_format, config.log_level, config.drain_grace_s) == (LogFormat.JSON, "debug", 3.5)
    assert config.expected_models == ("one", "Org/two", "three")
    assert config.model_addresses == (("Org/two", "[::1]:11"), ("a=b", "[::1]:12"))
    assert config.peers == PeerConfig(
        endpoint="ipc:///run/octavo/a.peers.sock",
        others=("ipc:///run/octavo/b.peers.sock",),
        others_file=Path("p.list"),
        key_file=Path("g.key"),
    )
    assert config.workers == WorkerPoolConfig(
        endpoints=("tcp://127.0.0.1:5",),
        registration_token="word",
        server_key_file=Path("g.key"),
        allowed_key_files=(Path("a.pub"), Path("b.pub")),
        heartbeat_timeout_s=1.5,
        stall_timeout_s=2.5,
    )
    assert config.limits.grammar == GrammarLimits(max_source_bytes=21, max_depth=22)
    assert config.limits.render == ProcessLimits(cpu_s=24.5)
    assert unchanged(config.limits) == {"max_metadata_bytes", "max_tokenizing", "max_tokenizing_bytes"}
    assert unchanged(config.connection) == {
        "min_ping_interval_s", "max_ping_strikes", "handshake_timeout_s", "message_timeout_s", "settings_timeout_s",
    }  # fmt: skip


def test_every_setting_of_a_worker_reaches_its_configuration() -> None:
    settings = WorkerSettings(
        model=("name=folder",), revision="r", device="cuda:1", dtype="float16", attention_backend="sdpa",
        max_model_len=2, num_threads=3, check_numerics="on", quantization="int8", deterministic=True,
        kv_cache_dtype="fp8", cpu_isa="avx2", tensor_parallel_size=4, load_format="random",
        check_numerics_limit=4.5, memory_fraction=0.5, num_blocks=6, host_kv_gib=28.5, block_size=8,
        prefix_cache="off", max_num_seqs=9, max_waiting=10, max_batch_tokens=11, max_chunk_tokens=12, max_gap_ms=30,
        aging_s=13.5,
        gateway_endpoint=("ipc:///a", "ipc:///b"), gateway_endpoints_file=Path("g.list"), worker_id="w",
            worker_key_file=Path("w.key"),
        gateway_public_key_file=Path("g.pub"), registration_token="word", heartbeat_interval_s=14.5,
        drain_grace_s=20.5, stall_exit_s=21.5,
        worker_metrics_port=15, metrics_host="::1", audit_every_steps=16, log_format="json", log_level="error",
        max_schema_bytes=22, max_schema_depth=23, grammar_timeout_s=24.5, grammar_threads=25, grammar_cache_entries=26,
        grammar_cache_bytes=27,
        runner="torch", oracle_vocab_size=17, oracle_step_delay_s=18.5, oracle_eos_every=19, preempt_every_steps=20,
    )  # fmt: skip
    config = worker_config(settings)
    assert config == WorkerConfig(
        model="folder", served_name="name", revision="r", device="cuda:1", dtype="float16", attention_backend="sdpa",
        max_model_len=2, num_threads=3, check_numerics=CheckNumerics.ON, quantization="int8", kv_cache_dtype="fp8",
        deterministic=Deterministic.ON, cpu_isa="avx2", tensor_parallel_size=4, load_format=LoadFormat.RANDOM,
        check_numerics_limit=4.5, memory_fraction=0.5, num_blocks=6, host_kv_gib=28.5, block_size=8,
        prefix_cache=PrefixCacheMode.OFF, max_num_seqs=9, max_waiting=10, max_batch_tokens=11, max_chunk_tokens=12,
        max_gap_s=0.03, aging_s=13.5, gateway_endpoints=("ipc:///a", "ipc:///b"),
            gateway_endpoints_file=Path("g.list"), worker_id="w",
        curve=CurveConfig(secret_key_file=Path("w.key"), gateway_public_key_file=Path("g.pub")),
        registration_token="word", heartbeat_interval_s=14.5, drain_grace_s=20.5, stall_exit_s=21.5,
        metrics_port=15, metrics_host="::1",
        grammars=GrammarConfig(
            limits=GrammarLimits(max_source_bytes=22, max_depth=23), timeout_s=24.5, num_threads=25, cache_entries=26,
            cache_bytes=27,
        ),
        audit_every_steps=16, log_format="json", log_level="error", runner=RunnerKind.TORCH, oracle_vocab_size=17,
        oracle_step_delay_s=18.5, oracle_eos_every=19, preempt_every_steps=20,
    )  # fmt: skip
    # torch is RunnerKind's default, and a gap that was asked for is no number of steps: every other field differs from
    # its default, so none was forgotten above.
    assert unchanged(config, required={"model", "gateway_endpoints"}) == {"runner", "max_gap_steps"}


@pytest.mark.parametrize(
    ("device", "asked", "wanted"),
    [
        ("cpu", None, (None, 0.0)),
        ("cuda", None, (GPU_MAX_GAP_S, GPU_MAX_GAP_STEPS)),
        ("cuda:1", 30.0, (0.03, 0.0)),
        ("cpu", 200.0, (0.2, 0.0)),
        ("cuda", 0.0, (None, 0.0)),
    ],
)
def test_the_longest_gap_follows_from_the_device_and_is_strict_where_it_was_asked_for(
    device: str, asked: float | None, wanted: tuple[float | None, float]
) -> None:
    config = worker_config(WorkerSettings(device=device, max_gap_ms=asked))
    assert (config.max_gap_s, config.max_gap_steps) == wanted


def unchanged(config: object, required: frozenset[str] | set[str] = frozenset()) -> set[str]:
    """Names of the fields that have their default."""
    assert is_dataclass(config)
    return {
        each.name for each in fields(config) if each.name not in required and getattr(config, each.name) == each.default
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("folio-chat", (None, "folio-chat")),
        ("small=Qwen/Qwen2.5-0.5B", ("small", "Qwen/Qwen2.5-0.5B")),
        ("/models/a=b", (None, "/models/a=b")),
        ("x=", (None, "x=")),
        ("=folio-chat", (None, "=folio-chat")),
    ],
)
def test_a_model_may_be_given_a_name(text: str, parts: tuple[str | None, str]) -> None:
    assert split_model(text) == parts


def test_a_worker_serves_one_model() -> None:
    with pytest.raises(CliError, match="given 2 times: a, b"):
        worker_config(WorkerSettings(model=("a", "b")))


def test_half_a_pair_of_keys_is_refused() -> None:
    with pytest.raises(CliError, match=r"--worker-key-file is w\.key, --gateway-public-key-file is None"):
        worker_config(WorkerSettings(device="cpu", worker_key_file=Path("w.key")))


def test_an_ipv6_host_gets_brackets() -> None:
    assert [join_address("::1", 1), join_address("h", 2)] == ["[::1]:1", "h:2"]


def test_a_model_is_expected_by_the_name_that_its_worker_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for model in ("folder", str(tmp_path / "folder"), "./folder", "link", "folio-chat", "Org/model"):
        assert name_of_model(model) == served_name(model)
    assert name_of_model("x=folder") == "x"


GATEWAY, WORKER = (GatewaySettings, gateway_config), (WorkerSettings, worker_config)


@pytest.mark.parametrize(
    ("command", "given", "flag", "why"),
    [
        (GATEWAY, {"worker_endpoint": ("x",)}, "--worker-endpoint", "neither ipc"),
        (GATEWAY, {"worker_endpoint": ("tcp://127.0.0.1:5",)}, "--worker-endpoint", "open to every process"),
        (GATEWAY, {"control_endpoint": "ipc://x"}, "--control-endpoint", "absolute path"),
        (
            GATEWAY,
            {"control_endpoint": "ipc:///a", "peer_endpoint": ("tcp://a",)},
            "--peer-endpoint",
            "expected tcp://host:port",
        ),
        (WORKER, {"gateway_endpoint": ("tcp://a:99999",)}, "--gateway-endpoint", "a port from 0 to 65535"),
        (WORKER, {"gateway_endpoint": ("tcp://a:1",), "registration_token": "w"}, "--gateway-endpoint", "CURVE"),
    ],
)
def test_a_bad_endpoint_is_told_with_its_flag(command: Any, given: dict[str, object], flag: str, why: str) -> None:
    settings, config = command
    with pytest.raises(CliError, match=why) as caught:
        config(settings(**given))
    assert (caught.value.what, caught.value.exit_code) == (f"bad value for {flag}", 2)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"peer_endpoint": ("ipc:///a",)}, "--peer-endpoint"),
        ({"peer_endpoints_file": Path("a")}, "--peer-endpoints-file"),
    ],
)
def test_other_gateways_need_a_way_back(given: dict[str, Any], flag: str) -> None:
    with pytest.raises(CliError) as caught:
        gateway_config(GatewaySettings(**given))
    assert (caught.value.what, caught.value.exit_code) == (f"{flag} needs --control-endpoint", 2)


@pytest.mark.parametrize(
    ("command", "flag", "given"),
    [
        ("gateway", "--gateway-key-file", {}),
        ("gateway", "--allowed-worker-keys", {"--gateway-key-file": "g.key"}),
        ("worker", "--worker-key-file", {"--gateway-public-key-file": "g.pub"}),
        ("worker", "--gateway-public-key-file", {"--worker-key-file": "g.key"}),
    ],
)
def test_a_key_file_that_is_none_is_told_with_its_flag(
    command: str,
    flag: str,
    given: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_keys(generate_keys(), tmp_path, "g")
    Path("none").touch(mode=0o600)
    words = [word for pair in (given | {flag: "none"}).items() for word in pair]
    assert main([command, *words, *(["--runner", "oracle"] if command == "worker" else [])]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"error: bad value for {flag}"
    assert told[1].startswith("  none has no public key")


def test_a_folder_of_a_socket_that_others_can_enter_is_told_with_its_flag(tmp_path: Path) -> None:
    make_folders_of_sockets("--worker-endpoint", [f"ipc://{tmp_path}/new/w.sock", "tcp://127.0.0.1:5"])
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(CliError, match=f"has mode 0755.*chmod 700 {tmp_path}/open") as caught:
        make_folders_of_sockets("--worker-endpoint", [f"ipc://{tmp_path}/open/w.sock"])
    assert caught.value.what == "the folder of --worker-endpoint cannot be used"
    assert caught.value.change == "mend the folder, or name another with --worker-endpoint"
