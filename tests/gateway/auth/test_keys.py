"""Keys and the file that has them."""

import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.gateway.auth.authenticator import Caller, KeyEntry, KeyRing, Scope, TenantLimits, digest_of, new_key
from octavo.gateway.auth.key_file import AccessFileError, load_access_list, parse_access_list

KEY = "octavo-0123456789abcdef0123456789"
SHA = hashlib.sha256(KEY.encode()).hexdigest()


def caller(name: str) -> Caller:
    return Caller(name=name, tenant=name, scopes=frozenset({Scope.GENERATE}))


def test_new_keys_differ_and_are_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 43


def test_a_ring_finds_exactly_its_keys() -> None:
    entries = [KeyEntry(digest=digest_of(f"key-{n}"), caller=caller(f"c{n}")) for n in range(5)]
    ring = KeyRing(entries)
    assert [ring.find(f"key-{n}") for n in range(5)] == entries
    assert [ring.find(key) for key in ("", "key-", "key-5", "KEY-1", "key-1 ", "\udc80")] == [None] * 6
    assert KeyRing(()).find("key-1") is None


@pytest.mark.parametrize("key", ["key-0", "key-9", "nobody's"])
def test_every_entry_is_compared_whatever_matches(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant work: the same comparisons for the first key, the last key and none."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    ring = KeyRing([KeyEntry(digest=digest_of(f"key-{n}"), caller=caller("c")) for n in range(10)])
    ring.find(key)
    assert compared == [(digest_of(key), digest_of(f"key-{n}")) for n in range(10)]


def test_a_file_gives_callers_with_tenants_scopes_limits_and_groups(write_keys: Callable[[str], Path]) -> None:
    path = write_keys(f"""
        [defaults]
        max_requests = 3
        weight = 2
        [keys.plain]
        key = "{KEY}"
        [keys.full]
        sha256 = "{"ab" * 32}"
        tenant = "acme"
        scopes = ["admin"]
        expires = 1970-01-01T00:01:00Z
        [certificates.billing]
        subject = "billing.internal"
        tenant = "acme"
        [tenants.acme]
        max_queued = 2
        tokens_per_minute = 100
        burst_tokens = 10
        share_prefixes_with = "family"
        weight = 7
    """)
    access = load_access_list(path)
    plain, full = access.ring._entries
    limits = TenantLimits(max_queued=2, tokens_per_minute=100, burst_tokens=10)
    default = frozenset({Scope.GENERATE, Scope.MODELS})
    assert plain == KeyEntry(
        digest=bytes.fromhex(SHA),
        caller=Caller(name="plain", tenant="plain", scopes=default, limits=TenantLimits(max_requests=3), weight=2),
    )
    assert full == KeyEntry(
        digest=b"\xab" * 32,
        caller=Caller(
            name="full",
            tenant="acme",
            scopes=frozenset({Scope.ADMIN}),
            limits=limits,
            sharing_group="family",
            weight=7,
        ),
        expires_s=60.0,
    )
    billing = Caller(name="billing", tenant="acme", scopes=default, limits=limits, sharing_group="family", weight=7)
    assert access.certificates == {"billing.internal": billing}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("[keys.a]", "keys.a: needs sha256 or key"),
        (f'[keys.a]\nsha256 = "{SHA}"\nkey = "{KEY}"', "one of them"),
        ('[keys.a]\nkey = "short"', "24 to 512"),
        (f'[keys.a]\nkey = "{KEY}\\u00e9"', "visible ASCII"),
        ('[keys.a]\nsha256 = "abc"', "64 hexadecimal"),
        (f'[keys.a]\nsha256 = "{SHA}"\nscope = ["admin"]', "'scope' is unknown"),
        (f'[keys.a]\nsha256 = "{SHA}"\nscopes = ["root"]', "scopes must be"),
        (f'[keys.a]\nsha256 = "{SHA}"\nscopes = []', "scopes must be"),
        (f'[keys.a]\nsha256 = "{SHA}"\nexpires = "soon"', "with its zone"),
        (f'[keys.a]\nsha256 = "{SHA}"\nexpires = 2027-01-01T00:00:00', "with its zone"),
        (f'[keys.a]\nsha256 = "{SHA}"\n[keys.b]\nkey = "{KEY}"', "the same key"),
        ("[keys]\na = 1", "must be a table"),
        ("[tenants.a]\nmax_request = 1", "'max_request' is unknown"),
        ("[tenants.a]\nmax_requests = 0", "above 0"),
        ("[tenants.a]\nweight = 0", "from 1 to 1000"),
        ("[defaults]\nweight = 0.5", "from 1 to 1000"),
        ("[tenants.a]\nmax_requests = true", "above 0"),
        ("[tenants.a]\nburst_tokens = 5", "needs tokens_per_minute"),
        ("[certificates.a]", "needs a subject"),
        ('[certificates.a]\nsubject = "x"\n[certificates.b]\nsubject = "x"', "the same subject"),
        ("[users.a]", "'users' is unknown"),
        ("not toml", "not TOML"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_without_its_keys(
    entry: str, words: str, write_keys: Callable[[str], Path]
) -> None:
    with pytest.raises(AccessFileError) as caught:
        load_access_list(write_keys(entry))
    assert words in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_file_that_others_can_read_is_refused(write_keys: Callable[[str], Path]) -> None:
    path = write_keys("")
    for mode in (0o640, 0o604, 0o620, 0o601):
        path.chmod(mode)
        with pytest.raises(AccessFileError, match="chmod 600"):
            load_access_list(path)
    path.chmod(0o400)
    assert len(load_access_list(path).ring) == 0


def test_an_absent_file_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(AccessFileError, match="No such file"):
        load_access_list(tmp_path / "absent.toml")


def test_an_empty_file_lets_nobody_in() -> None:
    assert len(parse_access_list({}).ring) == 0


def test_a_file_that_is_nested_too_deeply_is_one_that_cannot_be_used(tmp_path: Path) -> None:
    """Also when it is read again: what else is raised there is a defect."""
    file = tmp_path / "api-keys.toml"
    file.write_text("keys = " + 5000 * "[")
    file.chmod(0o600)
    with pytest.raises(AccessFileError, match="--api-keys-file is not TOML"):
        load_access_list(file)


def test_a_pipe_and_a_folder_are_no_files_of_keys_and_nobody_waits_for_them(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe, 0o600)
    for path, words in ((pipe, "Not a regular file"), (tmp_path, "Is a directory")):
        with pytest.raises(AccessFileError, match=f"--api-keys-file cannot be read: .*{words}"):
            load_access_list(path)
