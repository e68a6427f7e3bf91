"""How the embedded model talks: forty prompts, each with what an answer to it may be, and rules for every answer."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FOLIO = Path(__file__).parents[2] / "model" / "embedded" / "folio-chat"
TONE = json.loads((Path(__file__).parent / "tone.json").read_text())
SEEDS = (1, 2, 3)
MAX_NEW_TOKENS = 400

pytestmark = pytest.mark.skipif(not (FOLIO / "model.safetensors").exists(), reason="folio-chat is not in this checkout")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLIO)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLIO, dtype=torch.float32).eval()


def faults(kind: str, answer: str, *, has_ended: bool) -> list[str]:
    """What is wrong with an answer, whatever the model; nothing where it is good."""
    words = re.findall(r"\w+", answer.lower())
    found = {
        "it says something else": not re.search(TONE["kinds"].get(kind, kind), answer),
        "a quote is left open": bool(answer.count('"') % 2),
        "a quote stands alone": bool(re.search(r'(^|\s)"(\s|$)', answer)),
        "it does not end": not has_ended or not answer.rstrip('"').endswith((".", "!", "?")),
        "it begins in the middle": not answer[:1].isupper() and not answer.startswith('"'),
        "it repeats itself": bool(words)
        and max(Counter(zip(*(words[i:] for i in range(6)), strict=False)).values(), default=0) > 2,
        "it has a broken character": "\ufffd" in answer,
    }
    return [fault for fault, is_so in found.items() if is_so]


@torch.inference_mode()
def answer_of(model: Any, tokenizer: Any, prompt: str, **sampling: Any) -> tuple[str, bool]:
    """The answer to one turn, and whether it has ended by itself."""
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **sampling)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True), int(out[-1]) in model.generation_config.eos_token_id


def test_there_are_forty_prompts_no_two_alike() -> None:
    assert len({prompt for prompt, _ in TONE["prompts"]}) == len(TONE["prompts"]) == 40


@pytest.mark.parametrize(("prompt", "kind"), TONE["prompts"])
def test_the_greedy_answer_is_in_tone(model: Any, tokenizer: Any, prompt: str, kind: str) -> None:
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    answer, has_ended = answer_of(model, tokenizer, prompt, **greedy)
    assert faults(kind, answer, has_ended=has_ended) == [], answer


@pytest.mark.parametrize(("prompt", "kind"), TONE["prompts"])
def test_sampled_answers_are_in_tone(model: Any, tokenizer: Any, prompt: str, kind: str) -> None:
    """By the checkpoint's own settings (generation_config.json)."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        answer, has_ended = answer_of(model, tokenizer, prompt)
        assert faults(kind, answer, has_ended=has_ended) == [], answer


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (" accident! It was quite night, allowed to make Viper.", "it begins in the middle"),
        ('I am so sorry." Would you like to talk?', "a quote is left open"),
        ('I am so sorry. " " Would you like to talk?', "a quote stands alone"),
        ("I am so sorry that you", "it does not end"),
        ("I am so sorry. " + "It is a very sad day. " * 3, "it repeats itself"),
        ("Two plus two is four.", "it says something else"),
    ],
)
def test_the_rules_find_what_is_wrong(answer: str, fault: str) -> None:
    assert fault in faults("sorry", answer.strip("\n"), has_ended=True)


def test_the_rules_let_a_good_answer_through() -> None:
    good = 'I am so sorry about your cat. "All things pass", the owl said. Would you like to talk about it?'
    assert faults("sorry", good, has_ended=True) == []
