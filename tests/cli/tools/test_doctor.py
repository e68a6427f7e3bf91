"""What `octavo doctor` finds where a model is to be served."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools import doctor_model
from octavo.cli.tools.doctor_checks import Finding, Verdict
from octavo.cli.tools.doctor_model import check_models
from tests.support.model.checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("nothing_set")


def found(settings: ServeSettings) -> dict[str, Finding]:
    return {each.name: each for each in check_models(settings)}


def test_it_looks_at_what_serving_a_model_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    good = found(ServeSettings())
    assert {"device", "models", "checkpoint", "weights", "kernel cache", "compiler"} <= good.keys()
    assert not [each for each in good.values() if each.verdict is Verdict.BAD]
    bad = found(ServeSettings(model=("nothing-like-it",), device="tpu"))
    assert {name for name, each in bad.items() if each.verdict is Verdict.BAD} == {"device", "checkpoint"}


def test_weights_for_a_gpu_need_no_main_memory_and_no_kernels_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_model, "serves_on_gpu", lambda settings: settings.device != "cpu")
    on_gpu, on_cpu = found(ServeSettings(device="auto")), found(ServeSettings(device="cpu"))
    assert on_gpu["weights"].detail.endswith("into the GPU's memory")
    assert on_cpu["weights"].detail.endswith("of memory available")
    assert ("compiler" in on_gpu, "compiler" in on_cpu) == (False, True)


def test_it_exits_with_one_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["doctor", "--model", str(tmp_path), "--port", "0"]) == 1
    assert "there is no config.json in it" in capsys.readouterr().out


def test_it_says_what_a_worker_would_refuse(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    settings = ServeSettings(model=(str(folder),))
    assert found(settings)["checkpoint"].verdict is Verdict.GOOD
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, wanted in (
        (whole[:-1], "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\n", "`git lfs pull`"),
        (None, "neither model.safetensors nor"),
    ):
        weights.unlink(missing_ok=True)
        if content is not None:
            weights.write_bytes(content)
        finding = found(settings)["checkpoint"]
        assert (finding.verdict, wanted in finding.detail) == (Verdict.BAD, True)
    assert found(ServeSettings(model=(str(folder),), load_format="random"))["checkpoint"].verdict is Verdict.GOOD
    write_tiny_checkpoint(folder, rope_scaling={"type": "linear", "factor": 2.0})
    finding = found(settings)["checkpoint"]
    assert finding.verdict is Verdict.BAD
    assert "config.json: rope_scaling.type" in finding.detail


@pytest.mark.parametrize(
    ("settings", "changes", "told"),
    [
        ({"deterministic": True}, {"head_dim": 6}, "head sizes (64, 128, 6) must be multiples of 32"),
        ({"deterministic": True}, {"torch_dtype": "float16", "head_dim": 32}, "not torch.float16"),
        ({"quantization": "int8"}, {}, "this one computes in float32: --dtype bfloat16"),
        ({"quantization": "int8", "dtype": "bfloat16"}, {"intermediate_size": 7}, "a matrix has 7"),
    ],
)
def test_it_says_what_a_cpu_has_no_products_for(
    settings: dict[str, Any], changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", **changes)
    assert "products" not in found(ServeSettings(model=(str(folder),), device="cpu"))
    finding = found(ServeSettings(model=(str(folder),), device="cpu", **settings))["products"]
    assert (finding.verdict, told in finding.detail) == (Verdict.BAD, True)


def test_it_warns_of_what_callers_would_be_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    settings = ServeSettings(model=(str(folder),))
    assert not {"tokenizer", "template", "note"} & found(settings).keys()
    config = folder / "tokenizer_config.json"
    config.write_text('{"eos_token": "<|im_end|>"}')
    assert "this model has no chat template" in found(settings)["template"].detail
    config.write_text('{"chat_template": "T", "additional_special_tokens": ["<|x|>"]}')
    assert "tokenizer.json has not ('<|x|>')" in found(settings)["note"].detail
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    warning = found(settings)["tokenizer"]
    assert (warning.verdict, "only the ByteLevel decoder" in warning.detail) == (Verdict.WARNING, True)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for m in messages %}x", "the model's chat template is broken, line 1: Unexpected end of template"),
        ("a\n{{ messages | nothing }}", "the model's chat template is broken, line 2: No filter named 'nothing'."),
        ("{{ messages[0].name.first }}", "'dict object' has no attribute 'name'"),
        ("{{ raise_exception('only in pairs') }}", "only in pairs"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "and was stopped"),
        ("{# nothing #}", "writes nothing for a chat"),
        ("x{% if tools %}{{ raise_exception('no tools') }}{% endif %}", "no tools"),
    ],
)
def test_it_says_which_chats_would_be_refused(template: str, told: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    settings = ServeSettings(model=(str(folder),), template_cpu_s=1)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "template" not in found(settings)
    (folder / "chat_template.jinja").write_text(template)
    finding = found(settings)["template"]
    assert (finding.verdict, told in finding.detail) == (Verdict.WARNING, True), finding.detail
    chats = "chats with tools" if "tools" in template else "chats"
    assert finding.advice == f"completions work, {chats} do not; a chat_template.jinja in the folder would be taken"


def test_a_checkpoint_of_the_hubs_that_is_half_here_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("octavo.cli.tools.doctor_model.check_model", lambda *_: folder)
    info = type("Info", (), {"siblings": []})
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: info)
    assert found(ServeSettings(model=("org/half",)))["hub"].verdict is Verdict.GOOD


def test_it_asks_the_hub_and_looks_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sibling = type("Sibling", (), {"rfilename": "model.safetensors", "size": 1 << 60})
    info = type("Info", (), {"siblings": [sibling]})
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: info)
    asked = found(ServeSettings(model=("org/large",)))
    assert (asked["hub"].verdict, asked["disk"].verdict) == (Verdict.GOOD, Verdict.BAD)
    assert "HF_HOME" in asked["disk"].advice

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    asked = found(ServeSettings(model=("org/large",)))
    assert asked["hub"].verdict is Verdict.BAD
    assert "nobody answers" in asked["hub"].detail
    assert "again" not in asked["hub"].advice


def test_it_says_where_kernels_cannot_be_kept_or_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.tools.doctor_model.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    assert found(ServeSettings())["kernel cache"].verdict is Verdict.BAD
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found(ServeSettings())["compiler"].verdict is Verdict.WARNING
