"""Connects the commands to a service as its settings say: address, TLS, API key."""

import grpc

from octavo import AsyncClient, Client
from octavo.cli.errors import usage
from octavo.cli.settings.addresses import join_address
from octavo.cli.settings.groups import CallSettings
from octavo.client.options import call_metadata, tls_credentials

Metadata = tuple[tuple[str, str], ...] | None


def connect(settings: CallSettings) -> Client:
    """The client, which has not called anything yet. Raises CliError for files that cannot be read."""
    metadata_of(settings)
    return Client(
        join_address(settings.host, settings.port),
        credentials=credentials_of(settings),
        api_key=settings.api_key or None,
        options=channel_options_of(settings),
    )


def connect_async(settings: CallSettings) -> AsyncClient:
    """`connect` for asyncio, each with its own connection, so that several are spread over the gateways of a
    service."""
    metadata_of(settings)
    return AsyncClient(
        join_address(settings.host, settings.port),
        credentials=credentials_of(settings),
        api_key=settings.api_key or None,
        options=[*channel_options_of(settings), ("grpc.use_local_subchannel_pool", 1)],
    )


def credentials_of(settings: CallSettings) -> grpc.ChannelCredentials | None:
    """None for plain text. Raises CliError."""
    files = (settings.tls_ca_file, settings.client_cert_file, settings.client_key_file)
    if settings.tls == "off" or (settings.tls == "auto" and not any(files)):
        return None
    try:
        return tls_credentials(
            ca_file=settings.tls_ca_file, cert_file=settings.client_cert_file, key_file=settings.client_key_file
        )
    except OSError as error:
        raise usage("a TLS file cannot be read", f"{error.filename}: {error.strerror}", "give its path") from None
    except ValueError as error:
        raise usage("half a certificate", str(error), "give --client-cert-file and --client-key-file") from None


def metadata_of(settings: CallSettings) -> Metadata:
    """The metadata of every call. Raises CliError."""
    try:
        return call_metadata(settings.api_key)
    except ValueError as error:
        raise usage("bad value for --api-key", str(error), "copy it whole, without blanks around it") from None


def channel_options_of(settings: CallSettings) -> list[tuple[str, str | int]]:
    """Options besides the client's own."""
    return [("grpc.ssl_target_name_override", settings.tls_server_name)] if settings.tls_server_name else []
