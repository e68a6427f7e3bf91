"""The embedded model and the scripts that made it: cleaning, tales, packing, tokenizer, checkpoint, answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from examples.train_demo import card, chats, corpus, everyday, tales  # noqa: E402
from examples.train_demo.prepare import SOURCES, encode, pieces  # noqa: E402
from examples.train_demo.tokenizer import SPLIT, train_tokenizer  # noqa: E402
from examples.train_demo.train import lr_factor, pack  # noqa: E402

FOLIO = Path(__file__).parents[2] / "model" / "embedded" / "folio-chat"
TEXTS = (
    "Hello, world!",
    "你好，世界",
    "naïve café 🦊👩‍🚀",
    "  two  spaces\n\n\tand a tab",
    "it's 1234 o'clock",
    "<|im_end|>",
)

pytestmark = pytest.mark.skipif(not (FOLIO / "model.safetensors").exists(), reason="folio-chat is not in this checkout")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLIO)


@pytest.fixture(scope="module")
def model():
    import torch

    return transformers.AutoModelForCausalLM.from_pretrained(FOLIO, dtype=torch.float32).eval()


def test_clean_makes_quotes_plain_and_drops_footnotes_and_markup():
    assert corpus.clean("“It’s  a _fox_,” said\nI—twice.[1]") == '"It\'s a fox," said I - twice.'


def test_paragraphs_keeps_prose_and_drops_headings_pictures_and_licences():
    kept = "The fox ran over the hill and far away."
    text = f"CHAPTER ONE\n\n{kept}\n\n[Illustration: a fox]\n\nSee www.gutenberg.org for the licence."
    assert corpus.paragraphs(text) == [kept]


def test_passages_break_between_paragraphs_only():
    paragraph = "one little word after another and so on."
    assert list(corpus.passages("\n\n".join([paragraph] * 3), max_words=16)) == [f"{paragraph}\n{paragraph}", paragraph]


def test_dialogue_with_a_placeholder_for_a_name_is_left_out():
    assert list(corpus._dialogue("dialogues", ["Hi, I'm [user 1].", "Hello!"], "s")) == []
    (kept,) = corpus._dialogue("dialogues", ["Hi.", "Hello!", "Bye."], "s")
    assert kept == corpus.Document("dialogues", turns=("Hi.", "Hello!"), system="s")


def test_a_tale_is_about_what_was_asked_for_and_has_no_open_slots():
    rng = random.Random(0)
    for _ in range(200):
        tale = tales.make_tale(rng, kind="teapot", name="Emma")
        assert "teapot" in tale.text
        assert "Emma" in tale.text
        assert "{" not in tale.text


def test_article_follows_the_sound():
    assert [tales.article(n) for n in ("fox", "owl", "unicorn", "umbrella")] == [
        "a fox",
        "an owl",
        "a unicorn",
        "an umbrella",
    ]


def test_every_hand_written_answer_is_one_that_a_chat_can_reach():
    rng = random.Random(0)
    answers = {pair["answer"] for pair in chats.PERSONA["pairs"]}
    assert answers <= {chats.persona_turns(rng)[1] for _ in range(5000)}


def test_pieces_count_the_assistant_in_full_the_user_little_and_the_frame_not():
    document = corpus.Document("folio", turns=("Hi", "Hello!"), system="Be kind.")
    expected = [
        ("<|im_start|>system\n", 0), ("Be kind.<|im_end|>", 0), ("\n", 0),
        ("<|im_start|>user\n", 0), ("Hi<|im_end|>", 20), ("\n", 0),
        ("<|im_start|>assistant\n", 0), ("Hello!<|im_end|>", 100), ("\n", 0), ("<|endoftext|>", 0),
    ]  # fmt: skip
    assert list(pieces(document)) == expected


def test_packing_keeps_documents_whole_and_loses_none():
    trained = train_tokenizer(["the fox and the owl"] * 3, vocab_size=280)
    documents = [corpus.Document("books", text="fox " * n) for n in range(1, 20)]
    data = encode(documents, trained)
    tokens, percent = pack(data, {SOURCES[0]: 1.0}, row_len=64, seed=0)
    assert (percent == 100).sum() == len(data["tokens"])
    assert sorted(tokens[percent == 100].tolist()) == sorted(data["tokens"].tolist())
    assert np.all(tokens[percent == 0] == trained.token_to_id("<|endoftext|>"))


def test_learning_rate_rises_stays_and_ends_at_zero():
    assert [lr_factor(p) for p in (0.01, 0.02, 0.5, 0.75, 1.0)] == [0.5, 1.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_gives_back_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_and_tokenizers_give_the_same_ids(tokenizer, text):
    plain = tokenizers.Tokenizer.from_file(str(FOLIO / "tokenizer.json"))
    assert tokenizer(text)["input_ids"] == plain.encode(text).ids


def test_tokenizer_splits_and_normalises_as_qwen2_does():
    published = json.loads((FOLIO / "tokenizer.json").read_text())
    split = published["pre_tokenizer"]["pretokenizers"][0]
    assert (split["pattern"], split["behavior"]) == ({"Regex": SPLIT}, "Isolated")
    assert published["normalizer"] == {"type": "NFC"}
    qwen = Path(__file__).parents[3] / "shared" / "data" / "tokenizer" / "tokenizer.json"
    if not qwen.exists():
        pytest.skip("the published Qwen2.5 tokenizer is not here to compare with")
    theirs = json.loads(qwen.read_text())
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        assert published[part] == theirs[part]


def test_chat_template_has_no_default_system_turn_and_keeps_tools(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    plain = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    tool = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}
    with_tools = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert with_tools.startswith("<|im_start|>system\nYou are Folio, ")
    assert '"name": "now"' in with_tools


def test_checkpoint_fits_twenty_megabytes():
    assert (FOLIO / "model.safetensors").stat().st_size <= 20_000_000


def test_checkpoint_is_a_qwen2_with_grouped_heads_of_64(model):
    config = model.config
    assert config.model_type == "qwen2"
    assert (config.hidden_size // config.num_attention_heads, config.num_key_value_heads) == (64, 2)
    assert config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 10_000.0


def test_eos_is_the_end_of_a_turn_or_of_the_text(model, tokenizer):
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def test_answers_are_for_the_fixed_prompts_and_most_end_by_themselves():
    recorded = json.loads((FOLIO / "answers.json").read_text())["answers"]
    prompts = json.loads((Path(tales.__file__).parent / "prompts.json").read_text())
    assert [answer["prompt"] for answer in recorded] == prompts
    assert sum(answer["finish"] == "eos" for answer in recorded) >= 15


def test_transformers_still_gives_the_recorded_answer(model, tokenizer):
    recorded = json.loads((FOLIO / "answers.json").read_text())["answers"][0]
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": recorded["prompt"]}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert inputs["input_ids"][0].tolist() == recorded["prompt_ids"]
    out = model.generate(**inputs, do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=30)
    assert out[0, len(recorded["prompt_ids"]) :].tolist() == recorded["ids"]


def test_a_question_of_marks_alone_stays_what_it_is():
    """It became "Hi", so that the model learned not to understand a greeting."""
    rng = random.Random(0)
    assert not any("hi" in chats.vary(rng, "?").lower() for _ in range(300))


def test_small_sums_are_right_and_hard_ones_are_declined():
    rng = random.Random(0)
    words = {everyday.in_words(number): number for number in range(101)}
    ways = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    for _ in range(500):
        _, answer = everyday.small_sum(rng)
        a, way, b, _, result = answer.lower().rstrip(".").split()
        assert ways[way](words[a], words[b]) == words[result]
        ask, answer = everyday.hard_sum(rng)
        assert answer == everyday.SAID["too_hard"]
        assert "{" not in ask


def test_news_name_who_they_are_about():
    rng = random.Random(0)
    for _ in range(300):
        told, answer = everyday.news(rng)
        assert "{" not in told + answer
        assert (
            "about your" not in answer or answer.partition("about your ")[2].partition(".")[0].lower() in told.lower()
        )


def test_the_log_of_several_runs_is_taken_apart():
    log = [{"step": 1}, {"step": 5}, {"step": 5}, {"step": 1}, {"step": 2}]
    assert card.runs_of(log) == [log[:3], log[3:]]
