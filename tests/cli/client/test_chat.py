"""The first line of `octavo chat`."""

from octavo.cli.client.chat import _model_line
from octavo.cli.settings.groups import ClientSettings
from octavo.v1 import model_pb2


def test_the_embedded_model_is_called_what_it_is() -> None:
    models = [
        model_pb2.ModelInfo(name="folio-chat", dtype="float32", max_model_len=2048),
        model_pb2.ModelInfo(name="Qwen2.5-7B-Instruct", dtype="bfloat16", max_model_len=32768),
    ]
    assert _model_line(models, ClientSettings()) == "folio-chat, a small demo model (float32, 2,048 tokens)"
    chosen = ClientSettings(model_name="Qwen2.5-7B-Instruct")
    assert _model_line(models, chosen) == "Qwen2.5-7B-Instruct (bfloat16, 32,768 tokens)"
