"""Access settings: who may call a gateway, and how clients authenticate."""

from pathlib import Path
from typing import Literal

from octavo.cli.settings.setting import Names, Settings, setting

PANEL = "Access"


class AccessSettings(Settings):
    """Who may call; shared by `octavo gateway` and `octavo serve`."""

    tls_cert_file: Path | None = setting(
        None, "Certificate chain of the gateway (PEM); with it every listener speaks TLS", panel=PANEL
    )
    tls_key_file: Path | None = setting(None, "Key of that certificate (PEM, closed to others)", panel=PANEL)
    tls_client_ca_file: Path | None = setting(
        None, "Authorities of clients (PEM); with it every client needs a certificate of theirs", panel=PANEL
    )
    api_keys_file: Path | None = setting(
        None, "File of API keys, tenants and limits (0600; octavo keys new-api adds to it)", panel=PANEL
    )
    public_scopes: Names = setting(
        ("health",), "What needs no key: generate, models, health, reflection, admin; none for nothing", panel=PANEL
    )
    prefix_salt_secret: str = setting(
        "",
        "Secret that separates tenants' cached prefixes, the same on every gateway of a service; set it through the "
        "environment; unset: drawn at the start",
        panel=PANEL,
        secrecy="secret",
    )
    status_socket: Path | None = setting(
        None, "Where the supervisor asks for health and models", panel=PANEL, visibility="hidden"
    )

    front_socket: Path | None = setting(
        None, "Where the front for HTTP passes calls on", panel=PANEL, visibility="hidden"
    )

    supervisor_socket: Path | None = setting(
        None, "Where the supervisor is told how many workers there shall be", panel=PANEL, visibility="hidden"
    )

    @property
    def authenticates_callers(self) -> bool:
        """Whether calls without TLS or without an API key may be refused."""
        return self.tls_cert_file is not None or self.api_keys_file is not None


class CredentialSettings(Settings):
    """How the commands that call a service authenticate."""

    api_key: str = setting(
        "", "API key; set it through the environment, a command line can be read by others", panel=PANEL,
        secrecy="secret",
    )  # fmt: skip
    tls: Literal["auto", "on", "off"] = setting(
        "auto", "Speak TLS; auto: where --tls-ca-file or --client-cert-file is given", panel=PANEL
    )
    tls_ca_file: Path | None = setting(
        None, "Authority of the service's certificate (PEM); unset: the public ones", panel=PANEL
    )
    tls_server_name: str = setting("", "Name in the service's certificate; unset: --host", panel=PANEL)
    client_cert_file: Path | None = setting(None, "Certificate of this client (PEM)", panel=PANEL)
    client_key_file: Path | None = setting(None, "Key of that certificate (PEM)", panel=PANEL)
