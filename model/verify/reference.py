"""transformers on the checkpoint that a service serves: plain, or with weights and cache rounded as the service rounds.

Weights are rounded here in a few lines of their own, not by the code that serves. transformers loads models here and
nowhere else in this folder; model/verify/checks.py takes its RoPE.

Legend: T tokens of a sequence · O outputs · I inputs · V vocabulary.
Must not know: what is compared, limits.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from octavo.model.causal_lm import CausalLM
from octavo.model.checkpoint.loading import load_model
from octavo.model.checkpoint.weight_names import HEAD, destinations
from octavo.model.config import FULL, SLIDING, load_config
from octavo.model.errors import CheckpointError
from octavo.model.layers.linear import Linear
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8, FP8_MAX, INPUT_GROUP

Mistake = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def _scaled_attention(model: Any) -> Iterator[None]:
    attentions = [layer.self_attn for layer in model.model.layers]
    right = attentions[0].scaling
    for attention in attentions:
        attention.scaling = 1.02 * right
    yield
    for attention in attentions:
        attention.scaling = right


@contextmanager
def _raised_epsilon(model: Any) -> Iterator[None]:
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    right = norms[0].variance_epsilon
    for norm in norms:
        norm.variance_epsilon = 100 * right
    yield
    for norm in norms:
        norm.variance_epsilon = right


@contextmanager
def _scaled_outputs(model: Any, path: str) -> Iterator[None]:
    matrices = [layer.get_submodule(path) for layer in model.model.layers]
    handles = [each.register_forward_hook(lambda _module, _inputs, output: 1.02 * output) for each in matrices]
    yield
    for handle in handles:
        handle.remove()


MISTAKES: dict[str, Mistake] = {
    "scale of attention × 1.02": _scaled_attention,
    "epsilon of norms × 100": _raised_epsilon,
    "what attention adds × 1.02": partial(_scaled_outputs, path="self_attn.o_proj"),
    "what MLPs add × 1.02": partial(_scaled_outputs, path="mlp.down_proj"),
}
"""What an implementation gets wrong by so little that rounding may hide it, done to transformers' model for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """What a service keeps in fewer bits than its dtype. weights, cache: as the flags name them. on_gpu: by the CUDA
    runner, which multiplies norms into matrices before it rounds them, leaves the head alone, and multiplies with the
    integers of packed checkpoints where others unpack them into the served dtype."""

    weights: str | None = None
    cache: str | None = None
    on_gpu: bool = False


NOT_ROUNDED = Rounded()


class ReferenceInput(Protocol):
    """A sequence, its positions, and how often each of the first num_shared tokens' keys is there."""

    token_ids: list[int]
    num_shared: int
    repeats: tuple[int, ...]

    @property
    def positions(self) -> list[int]: ...


class _Fp8Cache:
    """A cache of transformers that keeps nothing and rounds keys and values as an e4m3 cache would."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_args: Any, **_named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by every layer, with what else a release of transformers has to say."""
        return _to_fp8(keys), _to_fp8(values)


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8).to(x.dtype)


class Reference:
    """One checkpoint by transformers, on the CPU whatever serves; holds one model at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: Any = None

    def load(self, dtype: torch.dtype, *, weights_dtype: torch.dtype, rounded: Rounded) -> Any:
        """A model in eval mode, fresh, computing in dtype with weights that were rounded to weights_dtype. Raises
        CheckpointError."""
        self.forget()
        is_packed = load_config(self._folder).quantization is not None
        if not is_packed and rounded.weights is None and rounded.cache is None:
            self._model = load_transformers(self._folder, weights_dtype)
        else:
            is_kept = is_packed and rounded.on_gpu
            self._model = self._load_rounded(rounded, torch.float32 if is_kept else weights_dtype)
        for parameter in self._model.parameters():  # and no buffers: RoPE's frequencies stay as they are
            parameter.data = parameter.data.to(dtype)
        if rounded.weights == "fp8" and dtype != torch.float32:  # the product for many tokens rounds these too
            for module in self._model.model.layers.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(lambda _module, inputs: (_rounded_tokens(inputs[0]),))
        if rounded.weights == "int8" and not rounded.on_gpu and dtype != torch.float32:  # so do a CPU's, of any tokens
            for module in self._model.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(lambda _module, inputs: (_rounded_inputs(inputs[0]),))
        return self._model

    def forget(self) -> None:
        """Give the memory of the model back."""
        self._model = None
        gc.collect()

    def logits(self, model: Any, fed: ReferenceInput, rounded: Rounded) -> torch.Tensor:
        """Logits [T, V] in float32, after every token."""
        num_tokens, num_shared = len(fed.token_ids), fed.num_shared
        mask_TT = torch.full((num_tokens, num_tokens), float("-inf")).triu(1)
        mask_TT[num_shared:, :num_shared] += torch.tensor(fed.repeats, dtype=torch.float64).log().float()
        with torch.inference_mode():
            return (
                # By their places, for the fourth has another name in transformers 5.24 than before.
                model(
                    torch.tensor([fed.token_ids]),
                    # Layers may be called sliding where their window is as long as the context.
                    dict.fromkeys((FULL, SLIDING), mask_TT[None, None]),
                    torch.tensor([fed.positions]),
                    _Fp8Cache() if rounded.cache == "fp8" else None,
                    use_cache=False,
                )
                .logits[0]
                .float()
            )

    def _load_rounded(self, rounded: Rounded, dtype: torch.dtype) -> Any:
        """In float32, the weights being those of our own loader, rounded."""
        ours = load_model(self._folder, dtype=dtype)
        if rounded.cache == "fp8":
            fold_cache_scales(ours)
        if rounded.weights is not None:
            round_weights(ours, rounded)
        theirs = empty_transformers(self._folder)
        state = {name: view.float() for name, view in destinations(ours).items()}
        state[HEAD] = ours.lm_head.weight.data.float()
        del ours
        theirs.lm_head.weight = nn.Parameter(state[HEAD])  # of its own: it may be rounded and the embedding not
        theirs.load_state_dict(state, strict=True)
        return theirs.eval()


def round_weights(model: CausalLM, rounded: Rounded) -> None:
    """Every matrix by its rows, in place; the result is float32."""
    assert rounded.weights is not None
    norms = {}
    if rounded.on_gpu:
        for layer in model.decoder_layers:
            norms[layer.self_attn.qkv_proj] = layer.input_layernorm.weight.data
            norms[layer.mlp.gate_up_proj] = layer.post_attention_layernorm.weight.data
    for module in model.modules():
        if not isinstance(module, Linear) or (rounded.on_gpu and module is model.lm_head):
            continue
        weight_OI = module.weight.data
        if (norm_I := norms.get(module)) is not None:
            weight_OI = (weight_OI.float() * norm_I.float()).to(weight_OI.dtype)
            norm_I.fill_(1.0)
        module.weight = nn.Parameter(rounded_rows(weight_OI, rounded.weights), requires_grad=False)


def rounded_rows(weight_OI: torch.Tensor, name: str) -> torch.Tensor:
    """float32: each row in units of its largest magnitude, to the nearest integer or e4m3."""
    wide_OI = weight_OI.float()
    is_integer = name.startswith("int8")
    most = 127 if is_integer else FP8_MAX
    scale_O1 = (wide_OI.abs().amax(1, keepdim=True) / most).clamp_min(torch.finfo(torch.float32).tiny)
    steps_OI = wide_OI / scale_O1
    return (steps_OI.round() if is_integer else steps_OI.to(FP8).float()) * scale_O1


def _rounded_tokens(x: torch.Tensor) -> torch.Tensor:
    return rounded_rows(x.flatten(0, -2), "fp8").to(x.dtype).view(x.shape)


def _rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    groups = nn.functional.pad(x.flatten(0, -2), (0, -x.shape[-1] % INPUT_GROUP)).view(-1, INPUT_GROUP)
    return rounded_rows(groups, "int8").view(*x.shape[:-1], -1)[..., : x.shape[-1]].to(x.dtype)


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """The same folder by transformers: safetensors only, no remote code, no network. Raises CheckpointError."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        theirs = getattr(transformers, load_config(folder).family.architecture).from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, local_files_only=True
        )
    except Exception as error:  # its checks of a config raise what they like
        raise CheckpointError(_not_by_transformers(folder, error)) from error
    return theirs.eval()


def _not_by_transformers(folder: Path, error: Exception) -> str:
    return f"{folder}: transformers cannot load it: {type(error).__name__}: {' '.join(str(error).split())}"


def empty_transformers(folder: Path) -> Any:
    """transformers' model of the folder's config in float32, as if its weights were plain; they are not set."""
    import transformers

    theirs = getattr(transformers, load_config(folder).family.architecture)
    try:
        config = theirs.config_class.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(_not_by_transformers(folder, error)) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.tie_word_embeddings = False
    config._attn_implementation = "sdpa"
    return theirs(config).float()
