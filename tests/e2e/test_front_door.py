"""A guarded service from end to end: keys made by the command, TLS, tenants apart in the prefix cache, a silent log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import Client, Unauthorized, tls_credentials
from octavo.cli.main import main
from octavo.client.errors import Unavailable
from tests.support.gateway.certificates import Authority
from tests.support.services.guarded import GuardedService, guarded_service, octavo

PROMPT_WORD, SYSTEM_WORD = "xylophone-secret-prompt", "zeppelin-secret-system"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A file of keys made by the command, and the keys that it printed."""
    folder = tmp_path_factory.mktemp("keys")
    made = {}
    for name, extra in {"ann": (), "bob": (), "cem": ("--tenant", "cem"), "ops": ("--scope", "admin")}.items():
        done = octavo("keys", "new-api", name, "--file", "etc/keys.toml", *extra, folder=folder)
        assert done.returncode == 0, done.stderr
        made[name] = done.stdout.strip()
    path = folder / "etc/keys.toml"
    path.write_text(
        path.read_text() + '[tenants.bob]\nshare_prefixes_with = "b"\n[tenants.cem]\nshare_prefixes_with = "b"\n'
    )
    return path, made


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    oracle_checkpoint: Path,
    authority: Authority,
    keys: tuple[Path, dict[str, str]],
) -> Iterator[GuardedService]:
    pair = authority.sign("gateway")
    with guarded_service(
        tmp_path_factory.mktemp("guarded"), "--runner=oracle", f"--model=o={oracle_checkpoint}", "--num-blocks=256",
        f"--tls-cert-file={pair.cert}", f"--tls-key-file={pair.key}", f"--api-keys-file={keys[0]}",
        "--gateways=2", "--log-level=debug", "--oracle-eos-every=1000000",
    ) as running:  # fmt: skip
        yield running


def client(service: GuardedService, authority: Authority, key: str | None) -> Client:
    return Client(service.target, credentials=tls_credentials(ca_file=authority.cert), api_key=key)


def test_the_command_makes_keys_that_stand_nowhere(keys: tuple[Path, dict[str, str]]) -> None:
    path, made = keys
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(set(made.values())) == 4
    assert [key for key in made.values() if key in path.read_text()] == []


def test_a_name_that_is_taken_is_refused_and_the_file_stays(keys: tuple[Path, dict[str, str]]) -> None:
    path, _ = keys
    before = path.read_bytes()
    more = ("new", "--expires", "2099-01-01T00:00:00Z\n[tenants.more]")
    for arguments in (("ann",), ("new", "--scope", "root"), ("new", "--expires", "soon"), more, ('a"b',)):
        done = octavo("keys", "new-api", *arguments, "--file", path, folder=path.parent)
        assert (done.returncode > 0, done.stdout) == (True, ""), arguments
        assert len(done.stderr.strip().splitlines()) == 3, done.stderr
    assert path.read_bytes() == before


def test_the_clients_show_their_key(
    service: GuardedService, authority: Authority, keys: tuple[Path, dict[str, str]]
) -> None:
    with client(service, authority, keys[1]["ann"]) as good:
        assert good.complete(text="hello", max_tokens=3).finished.usage.completion_tokens == 3
    for key in (None, "wrong-key", keys[1]["ops"]):
        with client(service, authority, key) as bad, pytest.raises(Unauthorized) as caught:
            bad.complete(text="hello", max_tokens=3)
        assert caught.value.reason == ("PERMISSION_DENIED" if key == keys[1]["ops"] else "UNAUTHENTICATED")
    with Client(service.target, api_key=keys[1]["ann"]) as plain, pytest.raises(Unavailable):
        plain.complete(text="hello", max_tokens=3, timeout_s=60)


def test_the_commands_show_their_key_and_print_it_nowhere(
    service: GuardedService, authority: Authority, keys: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    place = ("--port", service.port, "--tls-ca-file", authority.cert)
    key = keys[1]["ann"]
    done = octavo("generate", "hello", *place, "--max-tokens=2", folder=tmp_path, API_KEY=key)
    assert done.returncode == 0, done.stderr
    assert "│ o" in octavo("models", *place, folder=tmp_path, API_KEY=key).stdout
    assert octavo("health", *place, folder=tmp_path).stdout == "SERVING\n"
    assert octavo("health", *place, folder=tmp_path, API_KEY="wrong").stdout == "REFUSED\n"
    refused = octavo("generate", "hello", *place, folder=tmp_path)
    assert refused.returncode == 1
    assert "OCTAVO_API_KEY" in refused.stderr
    plain = octavo("generate", "hello", "--port", service.port, "--timeout-s=60", folder=tmp_path, API_KEY=key)
    assert (plain.returncode, len(plain.stderr.strip().splitlines())) == (1, 3)
    for arguments in (("config", "show"), ("config", "show", "--json")):
        shown = octavo(*arguments, folder=tmp_path, API_KEY=key, PREFIX_SALT_SECRET="pepper")
        assert shown.returncode == 0
        assert shown.stdout.count("(hidden)") == 2
        assert key not in shown.stdout
        assert "pepper" not in shown.stdout


def test_cached_tokens_come_from_ones_own_tenant_or_group_only(
    service: GuardedService, authority: Authority, keys: tuple[Path, dict[str, str]]
) -> None:
    prompt = list(range(3, 103))

    def cached(name: str) -> int:
        with client(service, authority, keys[1][name]) as each:
            return each.complete(token_ids=prompt, max_tokens=2).finished.usage.cached_tokens

    assert [cached(name) for name in ("ann", "ann", "bob", "bob", "cem", "ann")] == [0, 96, 0, 96, 96, 96]


def test_the_log_has_no_prompt_no_output_and_no_key(
    service: GuardedService, authority: Authority, keys: tuple[Path, dict[str, str]]
) -> None:
    """At level debug, for requests that work and for requests that fail."""
    with client(service, authority, keys[1]["ann"]) as ann:
        texts = [
            ann.complete(text=f"{PROMPT_WORD} {n}", max_tokens=30, stop=[f"{PROMPT_WORD}-stop"]).text for n in range(3)
        ]
        messages = [("system", SYSTEM_WORD), ("user", PROMPT_WORD)]
        texts.append(ann.complete(messages=messages, max_tokens=30).text)
        for bad in (
            {"text": PROMPT_WORD, "top_p": 7.0},
            {"text": PROMPT_WORD * 2000},
            {"text": PROMPT_WORD, "model": "no"},
        ):
            with pytest.raises(Exception, match=r"\("):
                ann.complete(**{"text": PROMPT_WORD} | bad)  # type: ignore[arg-type]
        ann.tokenize(PROMPT_WORD)
    log = service.log
    assert log.count('"caller": "ann"') >= 4
    hidden = [PROMPT_WORD, SYSTEM_WORD, *(text for text in texts if len(text) > 8), *keys[1].values()]
    assert [word for word in hidden if word in log] == []


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_bad_files_are_told_in_three_lines_before_anything_starts(
    command: str, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, other = authority.sign("one"), authority.sign("two")
    cases = {
        "do not belong together": (f"--tls-cert-file={pair.cert}", f"--tls-key-file={other.key}"),
        "only --tls-cert-file is given": (f"--tls-cert-file={pair.cert}",),
        "--api-keys-file cannot be read": ("--api-keys-file=absent.toml",),
        "there is no scope": ("--public-scopes=everything",),
    }
    for words, arguments in cases.items():
        assert main([command, *arguments, "--port=0"]) in (1, 2)
        lines = capsys.readouterr().err.strip().splitlines()
        assert words in "\n".join(lines)
        assert len(lines) == 3
