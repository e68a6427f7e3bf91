"""From settings to who may call a gateway. Reads no file but to check it."""

from octavo.cli.errors import usage
from octavo.cli.settings.access import AccessSettings
from octavo.gateway.auth.reloader import Keeper
from octavo.gateway.auth.scopes import Scope
from octavo.gateway.config import AccessConfig, TlsConfig

NO_SCOPE = "none"


def access_config(settings: AccessSettings) -> AccessConfig:
    """Raises CliError for settings that need each other, and for a scope that does not exist."""
    return AccessConfig(
        tls=_tls_config(settings),
        api_keys_file=settings.api_keys_file,
        public_scopes=_scopes(settings.public_scopes),
        prefix_salt_secret=settings.prefix_salt_secret,
    )


def check_access(settings: AccessSettings) -> None:
    """Load the files once, so that what is wrong with them is told before anything starts. Raises CliError,
    AccessFileError."""
    Keeper(access_config(settings)).load()


def _tls_config(settings: AccessSettings) -> TlsConfig | None:
    cert, key, authority = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert is None and key is None and authority is None:
        return None
    if cert is None or key is None:
        given = "--tls-cert-file" if cert else "--tls-key-file" if key else "--tls-client-ca-file"
        raise usage(
            "TLS needs a certificate and its key", f"only {given} is given", "give --tls-cert-file and --tls-key-file"
        )
    return TlsConfig(cert_file=cert, key_file=key, client_ca_file=authority)


def _scopes(words: tuple[str, ...]) -> tuple[str, ...]:
    if words == (NO_SCOPE,):
        return ()
    for word in words:
        if word not in list(Scope):
            raise usage("bad value for --public-scopes", f"there is no scope {word!r}", f"scopes: {', '.join(Scope)}")
    return words
