import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from octavo.cli.errors import CliError
from octavo.cli.settings.groups import ALL_KEYS, COMMANDS, AllSettings, ClientSettings, FrontSettings, ServeSettings
from octavo.cli.settings.resolve import Origin, Source, read_file, resolve
from octavo.cli.settings.setting import Settings, flag_of, variable_of


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [*map(variable_of, ALL_KEYS), "OCTAVO_CONFIG"]:
        monkeypatch.delenv(name, raising=False)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "octavo.toml"
    path.write_text(text)
    return path


def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "port = 1\nblock_size = 8\nworkers = 2")
    monkeypatch.setenv("OCTAVO_PORT", "3")
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "32")
    resolved = resolve(ServeSettings, {"port": 4})
    found = {
        name: (getattr(resolved.settings, name), resolved.origins[name])
        for name in ("port", "block_size", "workers", "host")
    }
    assert found == {
        "port": (4, Origin(source=Source.FLAG, where="--port")),
        "block_size": (32, Origin(source=Source.ENVIRONMENT, where="OCTAVO_BLOCK_SIZE")),
        "workers": (2, Origin(source=Source.FILE, where="octavo.toml")),
        "host": ("127.0.0.1", Origin(source=Source.DEFAULT, where="")),
    }


@given(st.dictionaries(st.sampled_from(["flag", "environment", "file"]), st.integers(1, 65535)))
@hypothesis_settings(max_examples=30)
def test_the_strongest_source_that_is_set_wins_whatever_else_is(ports: dict[str, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        path = Path("octavo.toml")
        path.write_text(f"port = {ports['file']}" if "file" in ports else "")
        if "environment" in ports:
            patch.setenv("OCTAVO_PORT", str(ports["environment"]))
        resolved = resolve(ServeSettings, {"port": ports["flag"]} if "flag" in ports else {})
    strongest = next((name for name in ("flag", "environment", "file") if name in ports), "default")
    assert (resolved.settings.port, resolved.origins["port"].source.value) == (ports.get(strongest, 50051), strongest)


def test_several_values_are_a_repeated_flag_a_list_in_the_file_or_separated_by_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(ServeSettings, {"model": ["a", "b"]}).settings.model == ("a", "b")
    monkeypatch.setenv("OCTAVO_MODEL", "c, d")
    assert resolve(ServeSettings, {}).settings.model == ("c", "d")
    monkeypatch.delenv("OCTAVO_MODEL")
    write(tmp_path, 'model = ["e", "f"]')
    assert resolve(ServeSettings, {}).settings.model == ("e", "f")


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "")
    assert resolve(ServeSettings, {}).origins["port"].source is Source.DEFAULT


def test_a_key_of_another_command_is_no_error_and_a_mistyped_one_is(tmp_path: Path) -> None:
    path = write(tmp_path, "max_tokens = 5")
    resolve(ServeSettings, {}, file=path, known_keys=ALL_KEYS)
    path.write_text("max_num_seq = 5")
    with pytest.raises(CliError) as caught:
        resolve(ServeSettings, {}, file=path, known_keys=ALL_KEYS)
    assert (caught.value.numbers, caught.value.change, caught.value.exit_code) == (
        f"{path} has 'max_num_seq'",
        "did you mean max_num_seqs?",
        2,
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("port = [", "is not TOML"),
        ("port = " + 5000 * "[", "is not TOML"),
        ("port = 70000", "bad value for --port"),
        ("port = " + 5000 * "9", "is not TOML"),
        (f"keepalive_time_s = {10**400}", "bad value for --keepalive-time-s"),
        ("prefix_cache = 'maybe'", "bad value for --prefix-cache"),
        ("drain_grace_s = inf", "bad value for --drain-grace-s"),
        ("aging_s = nan", "bad value for --aging-s"),
        ("workers = true", "bad value for --workers"),
        ("max_model_len = true", "bad value for --max-model-len"),
        ("aging_s = false", "bad value for --aging-s"),
        ("model = []", "bad value for --model"),
        ("model = ['']", "bad value for --model"),
        ("host = ''", "bad value for --host"),
        ("metrics_host = '[]'", "bad value for --metrics-host"),
    ],
)
def test_a_bad_file_is_told_in_three_lines_that_name_it(tmp_path: Path, text: str, what: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(CliError) as caught:
        resolve(ServeSettings, {}, file=path, known_keys=ALL_KEYS)
    assert what in caught.value.what
    assert str(path) in caught.value.what + caught.value.numbers
    assert caught.value.exit_code == 2


def test_a_bad_value_is_told_by_the_name_that_it_was_given_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, complaint = write(tmp_path, "port = 70000"), "input should be less than or equal to 65535"
    with pytest.raises(CliError) as in_the_file:
        resolve(ServeSettings, {}, file=path, known_keys=ALL_KEYS)
    monkeypatch.setenv("OCTAVO_PORT", "70001")
    with pytest.raises(CliError) as in_the_environment:
        resolve(ServeSettings, {}, file=path, known_keys=ALL_KEYS)
    assert in_the_file.value.numbers == f"port in {path} is 70000: {complaint}"
    assert in_the_environment.value.numbers == f"OCTAVO_PORT is '70001': {complaint}"


def test_a_file_that_is_no_text_is_told_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "octavo.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(CliError, match=r"octavo\.toml is not TOML: it is not UTF-8 text, from its byte 6 on"):
        resolve(ServeSettings, {})


def test_what_is_said_of_a_very_long_value_can_be_read(tmp_path: Path) -> None:
    for text in ("port = " + 5000 * "9", "port = " + 4000 * "9", "device = '" + 5000 * "x" + "'\nport = 'x'"):
        with pytest.raises(CliError) as caught:
            resolve(ServeSettings, {}, file=write(tmp_path, text), known_keys=ALL_KEYS)
        assert len(caught.value.numbers) < 500
        assert "set_int_max_str_digits" not in caught.value.numbers


def numbers_of(group: type[Settings]) -> list[str]:
    """The settings of a group that are numbers."""
    fields = group.model_fields.items()
    return [name for name, field in fields if {int, float} & {field.annotation, *get_args(field.annotation)}]


def what_is_said_of(group: type[Settings], name: str, value: object) -> str:
    """The first line, or nothing where the value is taken."""
    try:
        resolve(group, {name: value})
    except CliError as refused:
        return refused.what
    return ""


@pytest.mark.parametrize("value", [10**11, 10**400, 1e300, -1e300, "nan", "9" * 5000], ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("group", [AllSettings, FrontSettings])
def test_a_number_that_no_host_could_have_is_refused_by_its_flag(group: type[Settings], value: object) -> None:
    high = {"seed", "max_tokens", "top_k", "check_numerics_limit", "grammar_cache_bytes"}  # they may be that large
    names = [name for name in numbers_of(group) if value != 10**11 or name not in high]
    assert {name: what_is_said_of(group, name, value) for name in names} == {
        name: f"bad value for {flag_of(name)}" for name in names
    }


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text("port = 7", "utf-8-sig")
    assert read_file(file, frozenset({"port"})) == {"port": 7}


@pytest.mark.timeout(30)
def test_a_pipe_is_read_until_its_writer_closes_it() -> None:
    reader, writer = os.pipe()

    def write_slowly() -> None:
        with open(writer, "w") as file:
            for piece in ("po", "rt = ", "7"):
                print(piece, end="", file=file, flush=True)
                time.sleep(0.05)

    thread = threading.Thread(target=write_slowly)
    thread.start()
    try:
        found = resolve(ServeSettings, {}, file=Path(f"/dev/fd/{reader}"), known_keys=ALL_KEYS)
    finally:
        thread.join()
        os.close(reader)
    assert found.settings.port == 7
    assert found.origins["port"] == Origin(source=Source.FILE, where=f"/dev/fd/{reader}")


@pytest.mark.timeout(30)
def test_a_pipe_of_which_nothing_comes_is_refused_and_nobody_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.cli.settings.resolve.PIPE_TIMEOUT_S", 0.2)
    named = tmp_path / "octavo.toml"
    os.mkfifo(named)
    with pytest.raises(CliError, match=r"octavo\.toml: It was not written to its end within 0.2 s"):
        resolve(ServeSettings, {}, file=named, known_keys=ALL_KEYS)
    reader, writer = os.pipe()
    try:
        os.write(writer, b"port = 7")
        with pytest.raises(CliError, match="not written to its end within") as caught:
            read_file(Path(f"/dev/fd/{reader}"), ALL_KEYS)
        assert caught.value.exit_code == 2
        os.close(writer)
        with pytest.raises(CliError, match="Nothing was written into it"):
            read_file(Path(f"/dev/fd/{reader}"), ALL_KEYS)
    finally:
        os.close(reader)


def test_a_pipe_has_no_more_than_a_file_of_settings_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.settings.resolve.MOST_PIPE_BYTES", 8)
    reader, writer = os.pipe()
    os.write(writer, b"port = 70")
    os.close(writer)
    try:
        with pytest.raises(CliError, match="More than 8 bytes"):
            read_file(Path(f"/dev/fd/{reader}"), ALL_KEYS)
    finally:
        os.close(reader)


def test_what_took_the_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    """A folder, a device: nothing but files and pipes is read."""
    for other in (tmp_path, Path("/dev/null")):
        with pytest.raises(CliError, match="is not a file"):
            resolve(ServeSettings, {}, file=other, known_keys=ALL_KEYS)
        with pytest.raises(CliError, match=r"Is a directory|Not a regular file"):
            read_file(other, ALL_KEYS)


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "many")
    with pytest.raises(CliError, match="OCTAVO_MAX_NUM_SEQS is 'many'"):
        resolve(ServeSettings, {})


def test_a_variable_of_commas_names_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service without a worker would never be ready."""
    monkeypatch.setenv("OCTAVO_MODEL", ",")
    with pytest.raises(CliError, match="OCTAVO_MODEL is ','"):
        resolve(ServeSettings, {})


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(CliError, match=r"absent\.toml is not a file"):
        resolve(ServeSettings, {})


def paths() -> list[tuple[type[Settings], str]]:
    """Every setting that is a path, with a command's group that has it."""
    found = {
        name: group
        for group in COMMANDS.values()
        for name, field in group.model_fields.items()
        if Path in (field.annotation, *get_args(field.annotation))
    }
    assert len(found) > 15
    return [(group, name) for name, group in found.items()]


@pytest.mark.parametrize(("group", "name"), paths())
def test_a_path_may_begin_with_the_home_folder_wherever_it_is_written(
    group: type[Settings], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/of/me")
    file = write(tmp_path, f'{name} = "~/a"')
    assert getattr(resolve(group, {}, file=file).settings, name) == Path("/home/of/me/a")
    assert getattr(resolve(group, {name: "~"}).settings, name) == Path("/home/of/me")
    monkeypatch.setenv(variable_of(name), "a/~")
    assert getattr(resolve(group, {}).settings, name) == Path("a/~")
    with pytest.raises(CliError, match=f"{flag_of(name)} is '~nobody-of-that-name/a': there is no such home folder"):
        resolve(group, {name: "~nobody-of-that-name/a"})


def test_the_configuration_file_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "port = 7")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    monkeypatch.setenv("OCTAVO_CONFIG", "~/octavo.toml")
    assert resolve(ServeSettings, {}).settings.port == 7
    monkeypatch.setenv("OCTAVO_CONFIG", "~nobody-of-that-name/octavo.toml")
    with pytest.raises(CliError, match=r"OCTAVO_CONFIG is '~nobody-of-that-name/octavo\.toml': there is no such home"):
        resolve(ServeSettings, {})


@pytest.mark.parametrize(("group", "name"), paths())
def test_an_empty_path_is_refused_by_its_name_and_an_empty_variable_is_none(
    group: type[Settings], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was this folder, where the file of settings has nothing in quotes."""
    file = write(tmp_path, f'{name} = ""\n')
    with pytest.raises(CliError) as refused:
        resolve(group, {}, known_keys=ALL_KEYS)
    assert refused.value.what == f"bad value for {flag_of(name)}"
    assert refused.value.numbers == f"{name} in {file.name} is '': a path should not be empty; leave it out instead"
    write(tmp_path, f'{name} = "a\\u0000b"\n')
    with pytest.raises(CliError, match="a path should have no NUL in it"):
        resolve(group, {}, known_keys=ALL_KEYS)
    write(tmp_path, "")
    monkeypatch.setenv(variable_of(name), "")
    assert getattr(resolve(group, {}).settings, name) is None


def test_flag_variable_and_key_are_one_name_for_every_setting() -> None:
    for group in COMMANDS.values():
        for name in group.model_fields:
            assert flag_of(name)[2:].replace("-", "_") == variable_of(name).removeprefix("OCTAVO_").lower() == name


def test_a_setting_that_two_commands_share_is_the_same_in_both() -> None:
    for one in COMMANDS.values():
        for other in COMMANDS.values():
            for name in one.model_fields.keys() & other.model_fields.keys():
                assert repr(one.model_fields[name]) == repr(other.model_fields[name]), name


STARTED = """
from octavo.cli.app import whole_command
from octavo.cli.settings.setting import Settings
whole_command()
def all_of(group): return [group, *(each for kind in group.__subclasses__() for each in all_of(kind))]
groups = all_of(Settings)
assert len(groups) > 10
print([each.__name__ for each in groups if each.__pydantic_complete__])
"""


def test_a_command_that_has_no_settings_builds_none() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_a_list_is_called_a_list(tmp_path: Path) -> None:
    file = tmp_path / "of.toml"
    file.write_text("stop = 3")
    with pytest.raises(CliError, match=r"is 3: input should be a list$"):
        resolve(ClientSettings, {}, file=file)


@pytest.mark.parametrize("host", ["http://localhost", "127.0.0.1:50051", "a b", "a\nb", "localhost/", "[::1]:7"])
def test_a_host_is_no_url_and_has_no_port(host: str) -> None:
    with pytest.raises(CliError, match="a host name or an address alone") as caught:
        resolve(ClientSettings, {"host": host})
    assert caught.value.what == "bad value for --host"


@pytest.mark.parametrize("host", ["localhost", "::1", "[::]", "fe80::1%eth0", "münchen.example", "0.0.0.0"])
def test_hosts_have_names_and_addresses(host: str) -> None:
    assert resolve(ClientSettings, {"host": host}).settings.host == host.strip("[]")
