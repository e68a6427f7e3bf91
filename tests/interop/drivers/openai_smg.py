"""What the openai client meets where smg is in front; run by test_smg.py."""

import openai
import pytest

MODEL = "folio-chat"


@pytest.fixture(scope="module")
def client() -> openai.OpenAI:
    return openai.OpenAI(api_key="none", max_retries=0, timeout=60)


def test_a_list_of_texts_becomes_one_vector_of_all_of_them(client: openai.OpenAI) -> None:
    """smg's doing, as docs/interop.md says; test_smg.py shows what it sends. Once this fails, the page can change."""
    listed = client.embeddings.create(model=MODEL, input=["A fox.", "A crow."])
    joined = client.embeddings.create(model=MODEL, input="A fox. A crow.")
    assert [each.embedding for each in listed.data] == [each.embedding for each in joined.data]
    assert listed.usage.prompt_tokens == joined.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="cannot be empty"):
        client.embeddings.create(model=MODEL, input=[[1, 2], [3]])


def test_what_octavo_refuses_is_a_bad_request_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="sampling_params"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], extra_body={"stop_token_ids": [10_000_000]}
        )
