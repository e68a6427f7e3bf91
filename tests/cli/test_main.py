"""The command line as people type it: help, mistakes, and what comes out."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from octavo.cli.app import service_command, whole_command
from octavo.cli.main import GC_THRESHOLD, SERVICES, main
from octavo.cli.serve.commands import PROCESSES
from octavo.cli.settings.groups import (
    ALL_KEYS,
    AllSettings,
    CallSettings,
    ClientSettings,
    GatewaySettings,
    HealthSettings,
    RequestSettings,
    ServeSettings,
    WorkerSettings,
)
from octavo.cli.settings.setting import Settings, flag_of, help_of, variable_of
from octavo.v1 import model_pb2
from tests.support.gateway.scripted_server import Script, running

SETTINGS: dict[str, type[Settings]] = {
    "serve": ServeSettings, "tour": ServeSettings, "doctor": ServeSettings, "gateway": GatewaySettings,
    "worker": WorkerSettings, "chat": ClientSettings, "generate": ClientSettings, "bench": ClientSettings,
    "embed": RequestSettings, "models": CallSettings, "cancel": CallSettings, "health": HealthSettings,
}  # fmt: skip
"""Of each command; those that generate nothing have no sampling."""


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in map(variable_of, ALL_KEYS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", SETTINGS)
def test_a_command_has_exactly_the_flags_of_its_settings_and_its_own(command: str) -> None:
    commands = whole_command().commands
    flags = {flag for parameter in commands[command].params for flag in parameter.opts}
    settings = SETTINGS[command].model_fields
    own = {
        "chat": {"--system", "--receipt"},
        "generate": {
            *("--as", "--chat", "--system", "--token-ids", "--receipt", "--json", "prompt"),
            *("--json-schema", "--format-as-annotation", "--json-object", "--regex", "--ebnf", "--choice"),
            *("--num-outputs", "-n", "--min-tokens", "--ignore-eos", "--include-stop", "--typical-p", "--bad-word"),
            *("--logit-bias", "--allowed-ids", "--logprobs", "--prompt-logprobs", "--echo", "--return-prompt"),
            "--truncate-prompt-tokens",
        },
        "embed": {"--pooling", "--raw", "texts"},
        "health": {"--live", "--worker"},
        "cancel": {"request_id"},
        "bench": {
            *("--request-rate", "--burstiness", "--max-concurrency", "--warmups", "--processes", "--save", "--picture"),
            *("--dataset", "--num-prompts", "--input-len", "--output-len", "--range-ratio", "--dataset-seed"),
            "--ignore-eos",
        },
        "models": {"--json"},
    }
    assert flags - {"--help", "-h"} == {flag_of(name) for name in settings} | {"--config"} | own.get(command, set())


@pytest.mark.parametrize("columns", ["60", "80", "400"])
@pytest.mark.parametrize("command", SETTINGS)
def test_help_names_flag_variable_and_default_of_every_setting_at_any_width(
    command: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    words = set(re.split(r"[\s(),]+", shown))
    for name, field in SETTINGS[command].model_fields.items():
        is_shown = help_of(field).visibility == "shown"
        assert (flag_of(name) in words) is is_shown, name
        assert (variable_of(name) in words) is is_shown, name


def every_command() -> list[list[str]]:
    top = whole_command().commands
    inner = [[name, each] for name, group in top.items() for each in getattr(group, "commands", {})]
    return [[], *([name] for name in top), *inner]


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("path", every_command(), ids=" ".join)
def test_help_fits_the_terminal_and_cuts_nothing(
    path: list[str], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert re.findall(r"<list\[\w+\]>|<\w+ range>", shown) == []  # such words are Python's
    assert shown.startswith(" ".join(["Usage: octavo", *path]))
    too_long = [line for line in shown.splitlines() if len(line) > columns]
    assert [line for line in too_long if len(line.split()) > 1] == []
    command = whole_command()
    for name in path:
        command = command.commands[name]
    flags = {flag for each in command.params if not getattr(each, "hidden", False) for flag in each.opts}
    assert flags <= set(re.split(r"[\s,/.\[\]]+", shown)) | {"--help", "-h"}


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["serve", "--max-num-seq", "3"],
            ["error: bad command line", "no such option: --max-num-seq", "→ did you mean --max-num-seqs?"],
        ),
        (["srve"], ["error: bad command line", "No such command 'srve'.", "→ did you mean 'serve'?"]),
        (["opena"], ["error: bad command line", "No such command 'opena'.", "→ see `octavo --help`"]),
        (
            ["serve", "--block-size", "0"],
            [
                "error: bad value for --block-size",
                "--block-size is 0: input should be greater than or equal to 1",
                "→ Tokens of a KV block",
            ],
        ),
        (  # there is no room for an output behind any prompt
            ["serve", "--max-model-len", "1"],
            [
                "error: bad value for --max-model-len",
                "--max-model-len is 1: input should be greater than or equal to 2",
                "→ Prompt and output tokens together, at most; unset: the model's own limit",
            ],
        ),
        (
            ["serve", "--model-port", "one:50052"],
            [
                "error: bad value for --model-port",
                "'one:50052' is not NAME=PORT",
                "→ give a model's name and a port from 1 to 65535",
            ],
        ),
        (
            ["serve", "--runner=oracle", "--model=one=x", "--model=two=y", "--model-port=tow=50052"],
            ["error: bad value for --model-port", "no model 'tow' is served here", "→ did you mean two?"],
        ),
        (
            ["worker", "--model", "a", "--model", "b"],
            [
                "error: a worker serves one model",
                "--model was given 2 times: a, b",
                "→ start one `octavo worker` per model, or `octavo serve` with all of them",
            ],
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_three_lines(
    arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert error_lines(capsys) == lines


def test_a_service_has_its_commands_as_help_shows_them_and_no_others() -> None:
    def flags_of(commands: dict[str, Any]) -> dict[str, list[list[str]]]:
        return {name: [each.opts for each in command.params] for name, command in commands.items()}

    whole = flags_of(whole_command().commands)
    assert flags_of(service_command().commands) == {name: whole[name] for (name,) in SERVICES}


@pytest.mark.parametrize("command", [*PROCESSES])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("log_format = 'xml'", ["error: bad value for --log-format", "log_format in FILE is 'xml'"]),
        ("port_ = 1", ["error: unknown key in the configuration file", "FILE has 'port_'"]),
        (None, ["error: no configuration file", "FILE is not a file"]),
    ],
)
def test_a_process_reads_its_file_without_making_options(
    command: str, text: str | None, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what is wrong with it as it does where options are given."""
    file = tmp_path / "of.toml"
    if text is not None:
        file.write_text(text)
    told = []
    for words in (["--config", str(file)], [f"--config={file}"]):
        assert main([command, *words]) == 2
        told.append(error_lines(capsys))
    assert told[0] == told[1]
    told_of_file = [line.replace(str(file), "FILE") for line in told[0]]
    assert all(line.startswith(start) for line, start in zip(told_of_file, lines, strict=False)), told_of_file


@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_a_process_imports_nothing_that_draws_or_parses(command: str, tmp_path: Path) -> None:
    file = tmp_path / "of.toml"
    file.write_text("gateway_endpoint = ['none']\nworker_endpoint = ['none']\nrunner = 'oracle'\n")
    program = (
        "import sys; from octavo.cli.main import main\n"
        f"assert main([{command!r}, '--config', {str(file)!r}]) == 2\n"
        "print(*sorted({'octavo.wire.logs', 'structlog', 'typer', 'pygments', 'rich.traceback'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "octavo.wire.logs structlog\n"


def options_that(are_wanted: Callable[[Any], bool]) -> list[tuple[list[str], str]]:
    """The command and the long flag of each such option of any command."""
    found = []
    for path in every_command():
        command = whole_command()
        for name in path:
            command = command.commands[name]
        found += [(path, max(each.opts, key=len)) for each in command.params if are_wanted(each)]
    return found


def own_numbers() -> list[tuple[list[str], str]]:
    """Every number among the options of every command that is no setting."""

    def is_own_number(option: Any) -> bool:
        kind = str(getattr(option, "type_descriptor", None) and option.type_descriptor.annotation)
        return ("int" in kind or "float" in kind) and option.name not in ALL_KEYS

    found = options_that(is_own_number)
    assert len(found) == 20
    return found


@pytest.mark.parametrize("value", ["-1e300", "-1", "nan", 400 * "9", 5000 * "9"], ids=lambda value: value[:6])
@pytest.mark.parametrize(("path", "flag"), own_numbers(), ids=str)
def test_a_number_that_cannot_be_is_told_by_its_flag(
    path: list[str], flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"generate": ["x"], "cancel": ["r"], "scale": ["2"], "verify": ["folio-chat", "--check-numerics"]}
    assert main([*path, *words.get(path[-1], []), f"{flag}={value}"]) == 2
    assert flag in (told := capsys.readouterr().err)
    assert len(told) < 700


@pytest.mark.parametrize("command", ["serve", "worker", "pull folio-chat", "verify folio-chat"])
def test_a_revision_of_what_has_none_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--revision", "v1"]) == 2
    assert error_lines(capsys)[:2] == [
        "error: --revision is of Hugging Face ids",
        "--revision is 'v1', and folio-chat is no Hugging Face id",
    ]


def path_options() -> list[tuple[list[str], str]]:
    """Every option of every command that help shows a path for."""
    found = options_that(lambda option: getattr(option, "metavar", None) == "<path>")
    assert len(found) > 50
    return found


@pytest.mark.parametrize(("path", "flag"), path_options(), ids=str)
def test_an_empty_path_is_told_by_its_flag(
    path: list[str], flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"new": ["a"], "new-api": ["a"], "generate": ["x"], "cancel": ["r"], "scale": ["2"], "verify": ["m"]}
    assert main([*path, *words.get(path[-1], []), f"{flag}="]) == 2
    assert flag in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_that_are_no_settings_take_the_home_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main(["keys", "new", "w", "--folder=~/keys"]) == 0
    assert sorted(path.name for path in (tmp_path / "home" / "keys").iterdir()) == ["w.key", "w.pub"]
    assert main(["keys", "new", "w", "--folder=~nobody-of-that-name/keys"]) == 2
    assert "'--folder': there is no such home folder" in capsys.readouterr().err


def test_nobody_to_talk_to_is_told_in_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--port", "1", "--timeout-s", "60"]) == 1
    lines = error_lines(capsys)
    assert (lines[0], lines[-1]) == (
        "error: no service answers",
        "→ start one with `octavo serve`, or give its --host and --port",
    )


def test_a_service_without_tls_is_told_in_three_lines_and_no_others() -> None:
    """gRPC's C core writes lines of its own format, past what Python has for stderr."""
    with grpc_server() as port:
        command = [sys.executable, "-m", "octavo.cli.main", "models", "--tls", "on", "--port", str(port)]
        variables = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    first, _, last = done.stderr.splitlines()
    assert first == "error: no connection"
    assert last.endswith("is it TLS? see --tls, --tls-ca-file and --client-cert-file")


@contextmanager
def grpc_server() -> Iterator[int]:
    """The port of one that speaks plain text."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def test_keys_are_made_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["keys", "new", "w"]) == 0
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["w.key", "w.pub"]
    capsys.readouterr()
    assert main(["keys", "new", "w"]) == 1
    assert error_lines(capsys)[1].startswith("keys/w.key exists")


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--num-prompts", "99999999999"],
        ["bench", "--warmups", "99999999999"],
        ["bench", "--input-len", "99999999999"],
        ["bench", "--output-len", "99999999999"],
        ["sizing", "--memory", "inf"],
        ["verify", "folio-chat", "--prompts", "99999999999"],
        ["verify", "folio-chat", "--max-new-tokens", "99999999999"],
        ["verify", "folio-chat", "--num-threads", "99999999"],
    ],
    ids=" ".join,
)
def test_a_number_that_would_take_all_memory_is_refused_at_once(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"Invalid value for '{words[-2]}'" in error_lines(capsys)[1]


@pytest.mark.parametrize("name", ["", "../w", "a/b", "/tmp/w", "a\nb"])
def test_keys_are_made_in_their_folder_only(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    assert main(["keys", "new", name]) == 1
    assert error_lines(capsys)[1] == f"{name!r} is no name of a file in keys"
    assert list(tmp_path.iterdir()) == []


def test_config_show_tells_where_each_value_came_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "octavo.toml").write_text("workers = 3\nregistration_token = 'secret-word'")
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "32")
    assert main(["config", "show", "--port", "77"]) == 0
    shown = capsys.readouterr().out
    for row in (
        "port = 77  (flag --port; serve, gateway, client)",
        "block_size = 32  (environment OCTAVO_BLOCK_SIZE; serve, worker)",
        "workers = 3  (file octavo.toml; serve)",
    ):
        assert row in shown.splitlines()
    assert "secret-word" not in shown


@pytest.mark.parametrize("columns", ["40", "80"])
def test_config_show_is_whole_lines_in_a_pipe_and_cuts_nothing_in_a_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    folder = "/" + "/".join(f"a-long-folder-{number}" for number in range(20))
    arguments = ["config", "show", "--run-dir", folder, "--model", "a=b", "--model", "c"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"run_dir = {folder}  (flag --run-dir; serve, gateway, worker)" in lines
    assert "model = a=b, c  (flag --model; serve, worker)" in lines
    assert len(lines) == sum(help_of(field).visibility == "shown" for field in AllSettings.model_fields.values())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    values = "".join(line.split("│")[2].strip() for line in shown.splitlines() if line.startswith("│"))
    assert folder in values


def test_models_can_be_had_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    info = model_pb2.ModelInfo(name="m", max_model_len=5, kv_capacity_tokens=1 << 40)
    info.limits.max_message_bytes = 1 << 41
    client = SimpleNamespace(models=lambda: [info, model_pb2.ModelInfo(name="n")])
    monkeypatch.setattr("octavo.cli.client.calls.connect", lambda settings: nullcontext(client))
    assert main(["models", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["name"], first["max_model_len"], first["kv_capacity_tokens"]) == ("m", 5, 1 << 40)
    assert first["limits"]["max_message_bytes"] == 1 << 41
    assert (second["name"], second["num_workers"], second["eos_token_ids"]) == ("n", 0, [])


def test_an_answer_as_json_has_every_field_those_that_are_zero_too(capsys: pytest.CaptureFixture[str]) -> None:
    with running(Script(texts=())) as target:
        assert main(["generate", "--json", "--port", target.rpartition(":")[2], "x"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["text"], told["token_ids"], told["prompt_token_ids"]) == ("", [], [])
    assert told["finished"]["usage"].keys() == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert (told["finished"]["output_index"], told["finished"]["usage"]["cached_tokens"]) == (0, 0)


def test_debug_shows_the_traceback_and_may_stand_anywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "")
    assert main(["generate", "x", "--port", "1", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_DEBUG", "")
    assert main(["generate", "x", "--port", "1"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_bad_ids_are_refused_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--as", "ids", "1,x"]) == 2
    assert error_lines(capsys)[0] == "error: bad token ids"


def test_every_command_that_the_readme_names_exists_and_every_command_is_named(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    table = readme.split("| command | what it does |")[1].split("\n\n")[0]
    named = {
        word.split()[0] for cell in re.findall(r"^\| ([^|]*)\|", table, re.M) for word in re.findall(r"`([^`]+)`", cell)
    }
    commands = whole_command().commands
    assert named == {name for name, command in commands.items() if not command.hidden}


def test_every_flag_in_the_documents_exists(repository: Path) -> None:
    documents = [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]
    shown = {flag for path in documents for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text())}
    commands = list(whole_command().commands.values())
    commands += [each for group in commands for each in getattr(group, "commands", {}).values()]
    known = {flag for command in commands for parameter in command.params for flag in parameter.opts}
    of_others = {"--build", "--profile", "--local", "--policy", "--worker-urls"}  # docker compose, pip-audit, smg
    of_others |= {"--prometheus-host", "--tool-call-parser"}  # smg
    of_others |= {"--total-queued-requests-metric"}  # Kubernetes' inference gateways
    of_others |= {"--text", "--only"}  # python -m bench.cpu.quant_error
    of_others |= {"--wait", "--upgrade", "--generate-hashes"}  # docker compose, uv
    of_others |= {"--require-hashes", "--no-deps", "--only-binary", "--no-build-isolation", "--index-url"}  # pip
    of_others |= {"--go", "--go-grpc"}  # protoc's plugins for Go, as in --go_out
    of_others |= {"--requests", "--jobs", "--shrink", "--seeds", "--results"}  # python -m sim
    of_others |= {"--from-file", "--from-literal", "--replicas", "--namespace", "--timeout"}  # kubectl
    of_others |= {"--build-arg"}  # docker
    of_others |= {"--head"}  # ray start
    of_others |= {"--pip-args", "--find-links", "--spec"}  # pipx, pip
    of_others |= {"--grpc-port"}  # vLLM
    of_others |= {"--debug"}  # of every command, taken off before the command sees it
    of_others |= {"--commit"}  # python -m tests.structure.figures
    engine = (repository / "integrations/dynamo/octavo_dynamo/engine.py").read_text()  # it cannot be imported here
    of_others |= set(re.findall(r'"(--[a-z-]+)"', engine))
    of_others |= {"--router-mode", "--migration-limit", "--http-host", "--http-port"}  # python -m dynamo.frontend
    of_others |= {"--no-router-track-active-blocks"}  # likewise
    of_others |= {"--endpoint", "--discovery-backend", "--dyn-tool-call-parser", "--help"}  # Dynamo's backends
    assert shown - known <= of_others | {"--flag"}


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])
def test_a_terminal_without_unicode_gets_question_marks_not_an_error(handler: str) -> None:
    program = "import octavo.cli.main as cli; cli.main = lambda _: print('1 \u00d7 2 \U0001f98a'); cli.run([])"
    variables = os.environ | {"PYTHONIOENCODING": f"ascii:{handler}"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("1 ? 2 ?\n", "", 0)


def test_a_command_and_what_it_imports_are_rarely_walked_for_garbage() -> None:
    program = "import gc, octavo.cli.main as cli; cli.main = lambda _: print(gc.get_threshold()[0]); cli.run([])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) == GC_THRESHOLD


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(closed: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = (
        "import sys, octavo.cli.main as cli\n"
        "def main(_):\n"
        "    print('a'); print('b', file=sys.stderr); sys.stdin.read()\n"
        f"    open({str(seen)!r}, 'w').write(str([each.fileno() for each in (sys.stdin, sys.stdout, sys.stderr)]))\n"
        "cli.main = main; cli.run([])"
    )
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program], timeout=60, check=False)
    assert (done.returncode, seen.read_text()) == (0, "[0, 1, 2]")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full")
def test_a_full_disk_behind_stdout_is_one_error(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "octavo.cli.main", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.splitlines()[0], len(done.stderr.splitlines())) == (
        1,
        "error: the disk is full",
        3,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full")
def test_a_log_that_cannot_be_written_is_no_failure() -> None:
    program = "import sys, octavo.cli.main as cli; sys.stderr = open('/dev/full', 'w')\n"
    program += "cli.main = lambda _: sys.stderr.write('x') * 0; cli.run([])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words", [["config", "show"], ["sizing", "folio-chat", "--context", "512"]]
)  # lines, and a table of rich's
def test_a_reader_that_leaves_early_is_no_error(words: list[str]) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


def test_another_pipe_that_breaks_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: CallSettings) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("octavo.cli.client.calls.connect", broken)
    assert main(["models"]) == 1
    assert capsys.readouterr().err.startswith("error: broken pipe\n")


def test_a_working_directory_that_was_removed_is_left(tmp_path: Path) -> None:
    program = "import os; import octavo.cli.main as cli; cli.main = lambda _: print(os.getcwd()); cli.run([])"
    command = f'cd {tmp_path} && mkdir gone && cd gone && rmdir ../gone && exec "$0" -P -c "$1"'
    done = subprocess.run(["sh", "-c", command, sys.executable, program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("/\n", "", 0)


def test_nothing_is_imported_before_ctrl_c_is_minded() -> None:
    program = "import sys; before = set(sys.modules); import octavo.cli.main; print(*set(sys.modules) - before)"
    command = [sys.executable, "-P", "-c", f"import sys; sys.path = {sys.path}; {program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    light = {"__future__", "importlib", "importlib._bootstrap", "importlib._bootstrap_external", "warnings", "_imp"}
    assert set(done.stdout.split()) - light == {"octavo", "octavo.cli", "octavo.cli.main"}


@pytest.mark.parametrize("program", ["octavo.cli.main", "octavo.cli"])
@pytest.mark.parametrize("module", ["signal", "typer"])  # the first that is imported, and one of many
def test_ctrl_c_while_modules_are_imported_ends_quietly(module: str, program: str, tmp_path: Path) -> None:
    interrupt = "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)"
    # A shell's job may be told to ignore it.
    (tmp_path / f"{module}.py").write_text(f"import os, _signal as signal; {interrupt}")
    folders = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", program, "ps"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 130)


def test_a_terminal_of_unknown_size_gets_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["models", "--help"]) == 0
    assert "octavo models" in capsys.readouterr().out
