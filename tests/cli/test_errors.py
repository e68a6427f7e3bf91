"""What people read when something is wrong, and the checks before anything starts."""

import errno
import os
import re
import socket
import tempfile
from pathlib import Path

import grpc
import pytest

from octavo.cli.errors import CliError, did_you_mean, nearest
from octavo.cli.explain import explain
from octavo.cli.serve import ports
from octavo.cli.serve.launch import READY_FILE, run_folder
from octavo.cli.serve.ports import busy_port, choose_ports, free_port, held_port, require_free
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools.doctor import examine, findings_table
from octavo.cli.tools.doctor_checks import Finding, Verdict, check_ports, check_run_folder, check_variables
from octavo.client.errors import DeadlineExceeded, FieldViolation, InvalidRequest, Overloaded, Unavailable
from octavo.gateway.auth.key_file import AccessFileError
from octavo.gateway.config import ConnectionConfig
from octavo.gateway.rpc.addresses import AddressError, BindError
from octavo.gateway.rpc.connections import TooFewDescriptors, connection_limits
from octavo.model.errors import CheckpointError
from octavo.wire.endpoints import EndpointError
from octavo.wire.keys import KeyFileError
from octavo.wire.run_dir import MAX_RUN_DIR_BYTES, RunDirError
from octavo.worker.loading.memory import DoesNotFit
from octavo.worker.loading.model_card import CardError
from octavo.worker.runners.group import GroupLost


def lines(error: BaseException) -> tuple[str, str, str]:
    explained = explain(error)
    return explained.what, explained.numbers, explained.change


def test_no_folder_for_temporary_files_names_the_variable() -> None:
    error = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    explained = explain(error)
    assert (explained.numbers, explained.change) == (error.strerror, "name one with TMPDIR")


def test_a_limit_on_files_names_the_limit_to_raise() -> None:
    with pytest.raises(TooFewDescriptors) as refused:
        connection_limits(ConnectionConfig(), 64)
    assert lines(refused.value) == (
        "too few files may be open",
        "ulimit -n is 64: a gateway needs at least 128 file descriptors",
        "raise ulimit -n (a container's is --ulimit nofile)",
    )


def test_a_rank_that_is_lost_while_it_loads_is_no_defect_to_be_reported() -> None:
    what, numbers, change = lines(GroupLost("rank 1 of 2 ended with status -9; its log says why"))
    assert (what, numbers) == ("a rank of the worker was lost", "rank 1 of 2 ended with status -9; its log says why")
    assert "out of memory" in change


def test_an_error_that_comes_in_three_parts_stays_as_it_is() -> None:
    parts = ("it does not fit", "5.2 GiB > 5.0 GiB", "try --memory-fraction 0.95")
    assert lines(DoesNotFit(*parts)) == parts
    assert lines(CliError(*parts)) == parts


def test_a_failed_call_names_fields_reason_and_what_to_change() -> None:
    refused = InvalidRequest(
        "m",
        code=grpc.StatusCode.INVALID_ARGUMENT,
        reason="INVALID_FIELD",
        violations=(FieldViolation(field="a.b", description="too large"), FieldViolation(field="c", description="no")),
    )
    assert lines(refused) == ("the request failed: INVALID_FIELD", "a.b: too large; c: no", "change that field")
    absent = Unavailable("refused", code=grpc.StatusCode.UNAVAILABLE)
    assert lines(absent)[0] == "no service answers"


def test_a_message_that_is_too_large_for_grpc_is_told_in_bytes() -> None:
    said = "CLIENT: Sent message larger than max (30000013 vs. 16777216)"
    told = lines(Overloaded(said, code=grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert told[:2] == ("the message is too large", "30,000,013 bytes, and at most 16,777,216 may be")


def test_a_prompt_that_is_too_long_is_not_blamed_on_max_tokens() -> None:
    """A larger number than the context has room for is cut, so that a smaller one changes nothing."""
    too_long = InvalidRequest(
        "2048 prompt tokens and at least 1 of output do not fit into the context of 2048 tokens",
        code=grpc.StatusCode.INVALID_ARGUMENT,
        reason="EXCEEDS_CAPACITY",
    )
    assert lines(too_long)[2] == "ask for less of what the line above counts, such as a shorter prompt"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (RunDirError("x"), "the run directory cannot be used"),
        (OSError(errno.EADDRINUSE, "in use"), "a port is busy"),
        (PermissionError(errno.EACCES, "Permission denied", "/f"), "permission denied"),
        (ModuleNotFoundError("No module named 'x'"), "a package is missing"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError"),
        (OSError(errno.ENOSPC, "No space left on device", "/cache/file"), "the disk is full"),
        (RecursionError("maximum recursion depth exceeded"), "something is nested too deeply to be read"),
        (OverflowError("cannot convert float infinity to integer"), "a number is too large"),
        (MemoryError(), "there is too little memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "there is too little memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "there is too little memory"),
        (RuntimeError("can't start new thread"), "no more processes or threads can be started"),
        (BlockingIOError(errno.EAGAIN, "x"), "no more processes or threads can be started"),
        (OSError(errno.EMFILE, "Too many open files", "/f"), "too many files are open"),
        (OSError(errno.EFBIG, "File too large"), "a file may not become so large"),
        (RuntimeError("Could not determine home directory."), "this user has no home folder"),
        (OSError(errno.EACCES, "cannot bind ipc:///Tmp/x: Permission denied"), "permission denied"),
        (CardError("config.json: max_position_embeddings is 'many'"), "the checkpoint cannot be served"),
    ],
)
def test_every_other_error_has_a_first_line(error: Exception, what: str) -> None:
    assert lines(error)[0] == what


def test_a_path_that_is_no_text_names_the_locale() -> None:
    with pytest.raises(UnicodeEncodeError) as caught:
        b"/tmp/\xe4".decode("ascii", "surrogateescape").encode()
    assert "LC_ALL=C.UTF-8" in lines(caught.value)[2]


@pytest.mark.parametrize(
    "error",
    [
        EndpointError("'x' is neither ipc:///path nor tcp://host:port"),
        AddressError("'x' is not host:port"),
        KeyFileError("cannot read key file x"),
        AccessFileError("the keys", "are not TOML", "mend them"),
    ],
)
def test_a_setting_that_is_wrong_ends_a_command_with_2(error: Exception) -> None:
    assert explain(error).exit_code == 2


def test_what_the_system_does_not_allow_ends_it_with_1() -> None:
    assert explain(BindError("--port", "192.0.2.1:1")).exit_code == 1


def test_the_words_of_an_error_keep_their_case() -> None:
    error = OSError(errno.EACCES, "cannot bind ipc:///Tmp/x: Permission denied")
    assert lines(error)[1] == "cannot bind ipc:///Tmp/x: Permission denied"


@pytest.mark.parametrize(
    ("address", "why"),
    [("192.0.2.1:0", "Cannot assign requested address"), ("nosuch.invalid:0", "not known|failure in name|No address")],
)
def test_an_address_that_cannot_be_bound_says_why(address: str, why: str) -> None:
    assert re.search(f"--port {address} cannot be bound: .*({why})", str(BindError("--port", address)))


@pytest.mark.parametrize("host", ["192.0.2.1", "nosuch.invalid", "a..b", "x" * 300])
def test_an_address_that_is_not_this_hosts_names_its_flag(host: str) -> None:
    with pytest.raises(CliError) as caught:
        choose_ports(ServeSettings(metrics_host=host, port=0, metrics_port=0, worker_metrics_port=0))
    assert (caught.value.what, caught.value.exit_code) == ("bad value for --metrics-host", 2)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"metrics_port": 65500, "gateways": 2}, "--metrics-port"),
        ({"worker_metrics_port": 65535, "workers": 2}, "--worker-metrics-port"),
    ],
)
def test_ports_that_are_counted_beyond_the_last_one_name_their_flag(given: dict[str, int], flag: str) -> None:
    settings = ServeSettings(**{"port": 0, "metrics_port": 0, "worker_metrics_port": 0} | given)  # type: ignore[arg-type]
    with pytest.raises(CliError) as caught:
        choose_ports(settings)
    assert (caught.value.what, caught.value.exit_code) == (f"bad value for {flag}", 2)


@pytest.mark.parametrize(
    ("given", "clash"),
    [
        ({"openai": 50051}, "--port and --openai come to 50051"),
        ({"port": 0, "admin_port": 9090}, "--admin-port and --metrics-port come to 9090"),
        (
            {"port": 0, "gateways": 2, "worker_metrics_port": 9190},
            "--metrics-port and --worker-metrics-port come to 9190",
        ),
    ],
)
def test_two_listeners_that_want_one_port_are_named(given: dict[str, int], clash: str) -> None:
    with pytest.raises(CliError) as caught:
        choose_ports(ServeSettings(**given))  # type: ignore[arg-type]
    assert (caught.value.what, caught.value.numbers) == ("two listeners want one port", clash)
    assert caught.value.exit_code == 2


def test_brackets_around_an_address_are_taken_off() -> None:
    settings = ServeSettings(host="[::1]", metrics_host="[::]", page_host="[::1]", openai_host="127.0.0.1")
    assert (settings.host, settings.metrics_host, settings.page_host) == ("::1", "::", "::1")
    assert settings.openai_host == "127.0.0.1"


def test_a_path_that_is_too_long_for_sockets_is_left_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with run_folder(None) as made, socket.socket(socket.AF_UNIX) as listener:
            assert made.stat().st_mode & 0o777 == 0o700
            listener.bind(str(made / "gateway-99.peers.sock"))
        assert not made.exists()
    too_long = rf"the path of run directory .* bytes, of which {MAX_RUN_DIR_BYTES} leave room"
    with pytest.raises(CliError, match=too_long), run_folder(long):
        pass


def test_the_longest_run_directory_has_room_for_the_longest_name() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as listener:
        longest = Path(short) / ("x" * (MAX_RUN_DIR_BYTES - len(short) - 1))
        with run_folder(longest) as made:
            listener.bind(str(made / "gateway-99.peers.sock"))
        with pytest.raises(CliError, match="leave room"), run_folder(longest.with_name(longest.name + "x")):
            pass


def test_a_deadline_that_passed_before_the_service_could_say_so_names_the_flag_too() -> None:
    error = DeadlineExceeded("Deadline Exceeded", code=grpc.StatusCode.DEADLINE_EXCEEDED)
    assert lines(error)[2] == "give a longer --timeout-s"


def test_a_full_disk_is_told_whatever_came_of_it() -> None:
    error = CheckpointError("cannot be downloaded")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/cache/blob")
    assert lines(error)[:2] == ("the disk is full", "/cache/blob")


def test_a_busy_port_is_seen_before_anything_starts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(CliError, match=f"another process listens on 127.0.0.1:{port}") as caught:
            require_free("127.0.0.1", port, "worker_metrics_port")
    assert "--worker-metrics-port" in caught.value.change
    require_free("127.0.0.1", port, "worker_metrics_port")


def test_an_address_of_another_host_is_told_as_such() -> None:
    with pytest.raises(CliError, match=r"Cannot assign requested address"):
        require_free("192.0.2.1", 50051, "port")
    assert (
        busy_port("h", 1, "port", OSError(errno.EACCES, "Permission denied")).change
        == "choose another port with --port"
    )


def test_free_ports_are_never_the_same() -> None:
    taken: set[int] = set()
    assert len({free_port("127.0.0.1", taken) for _ in range(20)}) == 20 == len(taken)


def test_a_port_that_the_system_chooses_is_none_of_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    admin, of_model, *others = (free_port("127.0.0.1", set()) for _ in range(5))

    def offer(host: str, taken: set[int]) -> int:
        """A system that offers the ports asked for first, as it may."""
        port = next(each for each in (admin, of_model, *others) if each not in taken)
        taken.add(port)
        return port

    monkeypatch.setattr(ports, "free_port", offer)
    settings = ServeSettings(
        admin_port=admin,
        model=["one=x", "two=y"],
        model_port=[f"two={of_model}"],
        metrics_port=0,
        worker_metrics_port=0,
    )
    assert choose_ports(settings) == others


def test_a_held_port_can_be_shared_and_not_taken() -> None:
    with held_port("127.0.0.1", 0) as port:
        with pytest.raises(CliError):
            require_free("127.0.0.1", port, "port")
        with socket.socket() as sharing:
            sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sharing.bind(("127.0.0.1", port))


def test_a_run_folder_has_one_service_at_a_time(tmp_path: Path) -> None:
    """A second one would take the names of the first one's sockets and files, and remove them at its end."""
    given = tmp_path / "given"
    given.mkdir(mode=0o700)
    with run_folder(given):
        (given / READY_FILE).write_text("127.0.0.1:1\n")
        with pytest.raises(CliError, match="another service that runs has the run directory"), run_folder(given):
            pass
        assert (given / READY_FILE).exists()
    with run_folder(given):
        pass


def test_a_run_folder_is_ours_alone_and_gone_afterwards(tmp_path: Path) -> None:
    with run_folder(None) as made:
        assert made.stat().st_mode & 0o777 == 0o700
    assert not made.exists()
    given = tmp_path / "run"
    with run_folder(given):
        (given / "gateway-0.sock").touch()
    assert not given.exists()


def test_a_run_folder_that_was_there_stays_and_must_be_closed_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / READY_FILE).touch()
    with run_folder(tmp_path) as folder:
        assert not (folder / READY_FILE).exists()
    assert tmp_path.exists()
    tmp_path.chmod(0o755)
    with pytest.raises(CliError, match="mode 0755"), run_folder(tmp_path):
        pass
    tmp_path.chmod(0o700)


def test_the_nearest_name_is_found_or_none() -> None:
    assert nearest("Max_Num_Seq", ["max_num_seqs", "port"]) == "max_num_seqs"
    assert nearest("zzz", ["max_num_seqs", "port"]) is None
    assert did_you_mean("zzz", ["port"], otherwise="see --help") == "see --help"


def test_doctor_finds_busy_ports_open_folders_and_mistyped_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQ", "3")
    assert check_variables() == [
        Finding(
            name="environment",
            verdict=Verdict.WARNING,
            detail="OCTAVO_MAX_NUM_SEQ is no setting",
            advice="did you mean OCTAVO_MAX_NUM_SEQS?",
        )
    ]
    tmp_path.chmod(0o755)
    assert check_run_folder(ServeSettings(run_dir=tmp_path)).verdict is Verdict.BAD
    tmp_path.chmod(0o700)
    assert check_run_folder(ServeSettings(run_dir=tmp_path)).verdict is Verdict.GOOD
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        busy = ServeSettings(port=listener.getsockname()[1], metrics_port=0, worker_metrics_port=0)
        assert [each.verdict for each in check_ports(busy)] == [Verdict.WARNING]


@pytest.mark.parametrize("setting", ["admin_port", "openai", "page_port", "model_port"])
def test_doctor_looks_at_every_port_that_serve_would_listen_on(setting: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        value = [f"folio-chat={number}"] if setting == "model_port" else number
        settings = ServeSettings(port=0, metrics_port=0, worker_metrics_port=0, **{setting: value})  # type: ignore[arg-type]
        (found,) = check_ports(settings)
    assert (found.verdict, found.detail) == (Verdict.WARNING, f"another process listens on 127.0.0.1:{number}")


def test_doctor_finds_two_listeners_that_want_one_port() -> None:
    (found,) = check_ports(ServeSettings(openai=50051))
    told = "two listeners want one port: --port and --openai come to 50051"
    assert (found.verdict, found.detail) == (Verdict.BAD, told)


@pytest.mark.parametrize("flag", ["--host", "--metrics-host", "--page-host", "--openai-host"])
def test_doctor_finds_an_address_that_serve_would_refuse(flag: str) -> None:
    settings = ServeSettings(openai=0, **{flag.removeprefix("--").replace("-", "_"): "192.0.2.1"})  # type: ignore[arg-type]
    (found,) = check_ports(settings)
    assert (found.verdict, found.detail) == (
        Verdict.BAD,
        f"bad value for {flag}: '192.0.2.1' is no address of this host: Cannot assign requested address",
    )


def test_doctor_looks_at_everything_and_prints_it() -> None:
    findings = examine(ServeSettings(port=0, metrics_port=0, worker_metrics_port=0))
    names = {each.name for each in findings}
    assert {"python", "torch", "memory", "/dev/shm", "run directory", "ports", "open files"} <= names
    assert findings_table(findings).row_count == len(findings)
