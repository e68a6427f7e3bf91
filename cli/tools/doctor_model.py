"""The checks of `octavo doctor` for the models of --model: checkpoint, device, disk, memory, compiler, kernels, hub."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.explain import explain
from octavo.cli.serve.preflight import check_device, check_model, check_names, serves_on_gpu
from octavo.cli.settings.groups import ServeSettings, WorkerSettings
from octavo.cli.settings.model_names import check_revision, split_model
from octavo.cli.settings.worker_config import pick_device
from octavo.cli.tools.doctor_checks import GIB, Finding, Verdict, available_bytes

if TYPE_CHECKING:
    from octavo.gateway.text.chat_template import ChatInput
    from octavo.gateway.text.model_text import ModelText

KERNEL_CACHE_BYTES = 64 << 20


def check_models(settings: ServeSettings) -> list[Finding]:
    """Everything needed to serve them."""
    found = [_told("device", lambda: check_device(settings.device), f"--device {settings.device} can be had")]
    good = f"{len(settings.model)} with names of their own"
    found.append(_told("models", lambda: check_names(settings.model), good))
    if settings.revision is not None:
        found.append(
            _told("revision", lambda: check_revision(settings.model, settings.revision), str(settings.revision))
        )
    for model in settings.model:
        found += _check_checkpoint(model, settings)
    return [*found, _check_kernel_cache(), *_check_kernels(settings)]


def _told(name: str, look: Callable[[], object], good: str) -> Finding:
    """Good, or what the check raised as `octavo serve` would tell it."""
    try:
        look()
    except Exception as error:
        told = explain(error)
        return Finding(name=name, verdict=Verdict.BAD, detail=f"{told.what}: {told.numbers}", advice=told.change)
    return Finding(name=name, verdict=Verdict.GOOD, detail=good)


def _check_checkpoint(model: str, settings: ServeSettings) -> list[Finding]:
    _, checkpoint = split_model(model)
    try:
        folder = check_model(model, settings)
        if folder is not None and settings.runner == "torch":
            _check_files(folder, settings)
    except Exception as error:
        told = explain(error)
        if type(error).__name__ == "CheckpointError" and _is_hubs(checkpoint):
            return _check_download(checkpoint, settings.revision)  # it may be half there, and is completed then
        detail = f"{checkpoint}: {told.what}: {told.numbers}"
        name = "hub" if type(error).__name__ == "HubUnreachable" else "checkpoint"
        return [Finding(name=name, verdict=Verdict.BAD, detail=detail, advice=told.change)]
    if folder is None:
        return _check_download(checkpoint, settings.revision)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    good = Finding(name="checkpoint", verdict=Verdict.GOOD, detail=f"{folder}, {_gib(num_bytes)} of weights")
    found = [good, *_check_text(folder, settings), *_check_cut(folder, checkpoint, settings.tensor_parallel_size)]
    if settings.runner == "torch" and all(each.verdict is not Verdict.BAD for each in found):
        found += _check_products(folder, checkpoint, settings)
    return [*found, _check_room(num_bytes, settings)]


def _check_text(folder: Path, settings: ServeSettings) -> list[Finding]:
    """Nothing where gateways can read and write the model's text, and chats have a template."""
    from octavo.gateway.text.chat_template import ChatInput
    from octavo.gateway.text.errors import TextError
    from octavo.gateway.text.model_text import ModelText
    from octavo.worker.loading.model_card import describe

    described = describe(folder)
    try:
        text = ModelText(described.files, num_ids=described.vocab_size)
    except TextError as error:
        advice = "callers can send token ids only, and get token ids"
        return [Finding(name="tokenizer", verdict=Verdict.WARNING, detail=f"{folder}: {error}", advice=advice)]
    notes = [Finding(name="note", verdict=Verdict.WARNING, detail=f"{folder}: {note}") for note in described.notes]
    for kind, chat in (("", _CHAT), (" with tools", _CHAT | {"tools": [_TOOL]})):
        try:
            _write_chat(text, ChatInput(**chat), settings)
        except TextError as error:
            advice = f"completions work, chats{kind} do not; a chat_template.jinja in the folder would be taken"
            detail = f"{folder}: {error}"
            return [*notes, Finding(name="template", verdict=Verdict.WARNING, detail=detail, advice=advice)]
    return notes


_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "How are you?"}]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def _write_chat(text: "ModelText", chat: "ChatInput", settings: ServeSettings) -> None:
    """As gateways do it, with their limits. Raises TextError."""
    from octavo.gateway.config import ProcessLimits
    from octavo.gateway.text.errors import TemplateError
    from octavo.gateway.text.model_text import Bounds, finish
    from octavo.gateway.text.process_pool import RenderPool

    async def rendered() -> str:
        pool = RenderPool(ProcessLimits(cpu_s=settings.template_cpu_s))
        try:
            given = json.dumps(asdict(chat)).encode()
            return await pool.render(text.template_of(chat), given, max_bytes=settings.max_prompt_bytes)
        finally:
            await pool.close()

    bounds = Bounds(max_bytes=settings.max_prompt_bytes)
    if not len(finish(text.rendered_encoding(asyncio.run(rendered()), "", bounds)).ids_T):
        raise TemplateError("the chat template writes nothing for a chat")


def _check_files(folder: Path, settings: ServeSettings) -> None:
    """What a worker checks before it reads any weight. Raises CheckpointError."""
    from octavo.model.checkpoint.loading import check_checkpoint
    from octavo.model.config import load_config

    if settings.load_format == "random":
        load_config(folder)
    else:
        check_checkpoint(folder)


def _check_products(folder: Path, checkpoint: str, settings: ServeSettings) -> list[Finding]:
    """Empty if a CPU supports the products asked for, which a worker only finds out once it has the weights; always
    empty on a GPU."""
    try:
        if pick_device(settings.device) == "cpu":
            multiply_on_a_cpu(folder, settings)
    except Exception as error:
        told = explain(error)
        detail = f"{checkpoint}: {told.what}: {told.numbers}"
        return [Finding(name="products", verdict=Verdict.BAD, detail=detail, advice=told.change)]
    return []


def multiply_on_a_cpu(folder: Path, settings: ServeSettings | WorkerSettings) -> None:
    """Raises InvarianceUnavailable, FormatUnavailable."""
    import torch

    from octavo.model.config import load_config
    from octavo.model.dtypes import parse_dtype
    from octavo.model.invariant import check_kernels
    from octavo.model.layers.linear import WeightFormat, packed
    from octavo.model.parallel import config_of_rank
    from octavo.worker.loading.weight_format import weight_format

    whole = load_config(folder)
    config = config_of_rank(whole, settings.tensor_parallel_size)
    dtype = whole.computed_in(parse_dtype(None if settings.dtype == "auto" else settings.dtype))
    if settings.deterministic:
        check_kernels(config, dtype, num_ranks=settings.tensor_parallel_size)
    wanted = weight_format(None if settings.quantization == "none" else settings.quantization)
    if wanted is WeightFormat.BF16:
        return
    widths = (config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size)
    for num_inputs in widths:
        packed(torch.zeros(1, num_inputs, dtype=dtype), None, wanted)


def _is_hubs(checkpoint: str) -> bool:
    """Whether it is a repository id rather than a folder."""
    from octavo.model.checkpoint.source import HUB_ID

    return HUB_ID.fullmatch(checkpoint) is not None and not Path(checkpoint).is_dir()


def _check_cut(folder: Path, checkpoint: str, size: int) -> list[Finding]:
    """Empty if a worker has one rank."""
    if size == 1:
        return []
    from octavo.worker.loading.group import IndivisibleModel, check_cut

    try:
        check_cut(folder, size, checkpoint)
    except IndivisibleModel as error:
        return [Finding(name="cut", verdict=Verdict.BAD, detail=str(error), advice=error.change)]
    return [Finding(name="cut", verdict=Verdict.GOOD, detail=f"{folder.name} can be cut into {size} ranks")]


def _check_download(checkpoint: str, revision: str | None) -> list[Finding]:
    """The hub answers, and its cache has room for what must be downloaded."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        info = HfApi().model_info(checkpoint, revision=revision, files_metadata=True, timeout=10.0)
    except Exception as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        advice = "give a folder with --model, or mend the network (HF_ENDPOINT names another hub)"
        detail = f"{checkpoint} is not complete on this machine, and the hub does not answer: {reason[0]}"
        return [Finding(name="hub", verdict=Verdict.BAD, detail=detail, advice=advice)]
    num_bytes = sum(each.size or 0 for each in info.siblings or () if each.rfilename.endswith(".safetensors"))
    hub = Finding(name="hub", verdict=Verdict.GOOD, detail=f"has {checkpoint}, {_gib(num_bytes)} of weights")
    return [hub, _check_disk("disk", Path(HF_HUB_CACHE), num_bytes, "set HF_HOME to a folder on a larger disk")]


def _check_disk(name: str, folder: Path, num_bytes: int, advice: str) -> Finding:
    """Whether that many bytes can be written there; the folder need not exist yet."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Finding(name=name, verdict=Verdict.BAD, detail=f"{there} cannot be written to", advice=advice)
    is_good = free >= num_bytes
    return Finding(
        name=name,
        verdict=Verdict.GOOD if is_good else Verdict.BAD,
        detail=f"{folder}: {_gib(free)} free, {_gib(num_bytes)} wanted",
        advice="" if is_good else advice,
    )


def _check_room(num_bytes: int, settings: ServeSettings) -> Finding:
    """Main memory for the weights of each worker, unless they are on a GPU."""
    available, wanted = available_bytes(), num_bytes * settings.workers
    if serves_on_gpu(settings):
        return Finding(name="weights", verdict=Verdict.GOOD, detail=f"{_gib(num_bytes)}, into the GPU's memory")
    is_good, workers = wanted <= available, f"{settings.workers} worker{'s' * (settings.workers != 1)}"
    return Finding(
        name="weights",
        verdict=Verdict.GOOD if is_good else Verdict.BAD,
        detail=f"{_gib(wanted)} for {workers}, {_gib(available)} of memory available",
        advice="" if is_good else "close other programs, give fewer --workers, or take a smaller model",
    )


def _check_kernel_cache() -> Finding:
    """The folder for compiled kernels."""
    from octavo.model.cache_folder import CacheUnusable, cache_folder

    advice = "set XDG_CACHE_HOME to a folder that can be written to"
    try:
        folder = cache_folder("native").parent
    except CacheUnusable:
        detail = "this user has no home folder, so that nothing is compiled"
        return Finding(name="kernel cache", verdict=Verdict.WARNING, detail=detail, advice=advice)
    return _check_disk("kernel cache", folder, KERNEL_CACHE_BYTES, advice)


def _check_kernels(settings: ServeSettings) -> list[Finding]:
    """A compiler and the kernels that it makes for a CPU; empty for a GPU. Without them torch serves, more slowly: a
    warning."""
    if serves_on_gpu(settings):
        return []
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        advice = "install a C compiler (apt install gcc): without one a CPU serves several times slower"
        return [Finding(name="compiler", verdict=Verdict.WARNING, detail="there is no cc", advice=advice)]
    found = [Finding(name="compiler", verdict=Verdict.GOOD, detail=compiler)]
    from octavo.model.cpu.native import is_switched_off, native_library, why_missing

    if native_library() is None:
        if is_switched_off():
            detail, advice = why_missing() or "off", "unset OCTAVO_NATIVE"
            return [*found, Finding(name="kernels", verdict=Verdict.WARNING, detail=detail, advice=advice)]
        advice = f"`{compiler} --version` tells whether it runs; without kernels a CPU serves several times slower"
        return [*found, Finding(name="kernels", verdict=Verdict.WARNING, detail="could not be compiled", advice=advice)]
    return [*found, Finding(name="kernels", verdict=Verdict.GOOD, detail="compiled, and loaded")]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
