"""`octavo embed`: texts to vectors, one JSON object a line on stdout."""

import json
import sys
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict

from octavo.cli.client.connect import connect
from octavo.cli.errors import usage
from octavo.cli.settings.groups import ClientSettings
from octavo.client_embeddings import EmbedFields

BATCH = 256  # inputs that one call takes


def embed(settings: ClientSettings, texts: Sequence[str], *, pooling: str, normalize: bool) -> int:
    """Embed all texts, in as many calls as they need."""
    fields = EmbedFields(pooling=pooling, normalize=normalize)
    if settings.model_name:
        fields["model"] = settings.model_name
    with connect(settings) as client:
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            response = client.embed(batch, timeout_s=settings.timeout_s, **fields)
            for text, embedding in zip(batch, response.embeddings, strict=True):
                figures = MessageToDict(embedding, preserving_proto_field_name=True)
                _write({"text": text} | figures)
    return 0


def read_texts(words: Sequence[str]) -> list[str]:
    """The arguments, or the lines of stdin for `-` or none. Raises CliError where there is no text."""
    if list(words) not in ([], ["-"]):
        return list(words)
    texts = [] if sys.stdin.isatty() else [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not texts:
        raise usage("no texts", "neither the command line nor stdin has one", 'octavo embed "a fox" "a dog"')
    return texts


def _write(entry: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(entry, ensure_ascii=False) + "\n")
