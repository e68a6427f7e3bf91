"""From the client's settings to the fields of a request. Pure."""

from octavo.client_requests import GenerateFields

from cli.settings import ClientSettings

_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")


def request_fields(settings: ClientSettings) -> GenerateFields:
    """Everything but the input; what is unset is left out, so that the model's defaults hold."""
    values = settings.model_dump()
    fields = {name: values[name] for name in _NAMES if values[name] is not None}
    if settings.model_name:
        fields["model"] = settings.model_name
    if settings.stop:
        fields["stop"] = settings.stop
    return GenerateFields(**fields)  # type: ignore[typeddict-item]
