"""`octavo verify --address`: a service that runs against transformers on its checkpoint, over gRPC.

Prompts of known tokens are sent alone and together; their log-probabilities, the greedy tokens and theirs come back.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.markup import escape

from octavo import Client, TextStream
from octavo.cli.client.connect import connect
from octavo.cli.errors import usage
from octavo.cli.settings.groups import ClientSettings
from octavo.cli.tools.verify import Served, check_context, print_rows, print_verdict
from octavo.client.requests import GenerateFields
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.config import load_config
from octavo.model.dtypes import parse_dtype
from octavo.model.verify.prompts import make_prompts
from octavo.model.verify.reference import Reference
from octavo.model.verify.served import LONG_TEXT, NUM_TOP, ServedPass, ServedSequence, TokenScore, judge
from octavo.v1 import inference_pb2, model_pb2

CALL_TIMEOUT_S = 600.0
TOGETHER = 8


def verify_service(settings: ClientSettings, served: Served, *, num_prompts: int, max_new_tokens: int) -> int:
    """Compare and print. Returns 0 if every row is within its limit, else 1. Raises CliError, OctavoError."""
    console, start_s = Console(), time.monotonic()
    folder = resolve_checkpoint(served.model, revision=served.revision)
    config = load_config(folder)
    with connect(settings) as client:
        info = only_model(client.models(), settings.model_name)
        if info.architecture == "Oracle" or parse_model_dtype(info) is None:
            raise usage("not a model", f"{info.name} computes in {info.dtype!r}", "start the service with a checkpoint")
        if info.vocab_size > config.vocab_size:
            raise usage(
                "another checkpoint",
                f"{info.name} has {info.vocab_size} ids, {served.model} only {config.vocab_size}",
                "name the checkpoint that the service serves",
            )
        longest = info.max_model_len
        check_context(info.name, longest)
        prompts = [
            [token % info.vocab_size for token in prompt[: max(longest // 2, 1)]]
            for prompt in make_prompts(folder, config, num_prompts)
        ]
        with console.status(f"asking {escape(client.target)}"):
            sequences = ask(client, info, prompts, max_new_tokens=max_new_tokens)
    dtype = parse_model_dtype(info)
    assert dtype is not None
    one = ServedPass(label=f"{info.name}, {info.dtype}", dtype=dtype, sequences=sequences, rounded=served.rounded)
    with console.status("running transformers on the same tokens"):
        rows = judge(Reference(folder), [one], vocab_size=info.vocab_size)
    print_rows(console, rows)
    alone, together = ([each for each in sequences if each.mode == mode] for mode in ("alone", "together"))
    equal = sum(left.token_ids == right.token_ids for left, right in zip(alone, together, strict=True))
    console.print(f"[dim]{equal} of {len(alone)} outputs are the same alone and together[/]")
    code = print_verdict(console, sum(not row.is_ok for row in rows), len(rows), time.monotonic() - start_s)
    if code:
        console.print(
            "[dim]a service with --quantization or --kv-cache-dtype is compared with the same flags; one of another "
            "checkpoint is beyond every limit[/]"
        )
    return code


def parse_model_dtype(info: model_pb2.ModelInfo):  # type: ignore[no-untyped-def]  # torch is imported by then
    """torch's dtype; None if the model names none that is known."""
    try:
        return parse_dtype(info.dtype)
    except ValueError:
        return None


def only_model(models: Sequence[model_pb2.ModelInfo], name: str) -> model_pb2.ModelInfo:
    """The model of this name, or the only one. Raises CliError."""
    found = [each for each in models if name in ("", each.name)]
    if len(found) != 1:
        names = ", ".join(each.name for each in models) or "none"
        raise usage("which model?", f"the service serves {names}", "choose one with --model-name")
    return found[0]


def ask(
    client: Client, info: model_pb2.ModelInfo, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> list[ServedSequence]:
    """Send a long prompt, and every prompt alone and then all together."""
    num_top = min(NUM_TOP, info.limits.max_logprobs or NUM_TOP)
    num_new = max(min(max_new_tokens, info.max_model_len - max(map(len, prompts))), 1)
    text = [token for prompt in prompts for token in prompt]
    text = (text * (1 + LONG_TEXT // max(len(text), 1)))[: min(LONG_TEXT, info.max_model_len - 1)]

    def one(check: str, mode: str, ids: Sequence[int], num_tokens: int) -> ServedSequence:
        fields = GenerateFields(
            model=info.name,
            token_ids=ids,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            output="token_ids",
            logprobs=num_top,
            prompt_logprobs=num_top,
        )
        with client.stream(timeout_s=CALL_TIMEOUT_S, **fields) as stream:
            for _ in stream.deltas():
                pass
            return _sequence(check, mode, ids, stream)

    served = [one("a long prompt", "whole", text, 1)]
    served += [one("a request", "alone", prompt, num_new) for prompt in prompts]
    with ThreadPoolExecutor(TOGETHER) as pool:
        served += pool.map(lambda prompt: one("a request", "together", prompt, num_new), prompts)
    return served


def _sequence(check: str, mode: str, ids: Sequence[int], stream: TextStream) -> ServedSequence:
    scores = [_score(each, after) for after, each in enumerate(stream.prompt_logprobs)]
    outputs = stream.outputs[0].logprobs
    scores += [_score(each, len(ids) - 1 + index, sampled=True) for index, each in enumerate(outputs)]
    token_ids = [*ids, *(each.chosen.token_id for each in outputs)]
    return ServedSequence(check=check, mode=mode, token_ids=token_ids, scores=scores)


def _score(logprobs: inference_pb2.TokenLogprobs, after: int, *, sampled: bool = False) -> TokenScore:
    return TokenScore(
        after=after,
        token_ids=tuple(each.token_id for each in logprobs.top),
        logprobs=tuple(each.logprob for each in logprobs.top),
        chosen_logprob=logprobs.chosen.logprob,
        sampled=logprobs.chosen.token_id if sampled else None,
    )
