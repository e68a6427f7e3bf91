"""tritonclient against GRPCInferenceService at KSERVE_TARGET; run by test_triton.py."""

import json
import os
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL = "folio-chat"
PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client() -> Any:
    with triton.InferenceServerClient(os.environ["KSERVE_TARGET"]) as connected:
        yield connected


def text(name: str, value: str) -> Any:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def flag(name: str, value: bool) -> Any:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value], dtype=bool))
    return tensor


def inputs(prompt: str = PROMPT, sampling: dict[str, Any] = GREEDY, **flags: bool) -> list[Any]:
    tensors = [text("text_input", prompt), text("sampling_parameters", json.dumps(sampling))]
    return tensors + [flag(name, value) for name, value in flags.items()]


def first(result: Any, name: str = "text_output") -> str:
    return str(result.as_numpy(name)[0].decode())


def streamed(client: Any, requests: list[list[Any]], **options: Any) -> list[tuple[Any, Any]]:
    """(result, error) of everything that comes back."""
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: heard.put((result, error)))
    for number, tensors in enumerate(requests):
        client.async_stream_infer(MODEL, tensors, request_id=str(number), **options)
    client.stop_stream()
    return list(heard.queue)


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def test_server_and_model_are_live_and_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("another")


def test_metadata_and_configuration(client: Any) -> None:
    assert client.get_server_metadata().name == "octavo"
    metadata = client.get_model_metadata(MODEL, as_json=True)
    assert {"text_input", "stream", "sampling_parameters", "exclude_input_in_output"} <= {
        tensor["name"] for tensor in metadata["inputs"]
    }
    assert metadata["outputs"][0]["name"] == "text_output"
    config = client.get_model_config(MODEL).config
    assert config.name == MODEL
    assert config.model_transaction_policy.decoupled


def test_infer_gives_prompt_and_text(client: Any) -> None:
    result = client.infer(MODEL, inputs(), request_id="mine")
    assert result.get_response().id == "mine"
    assert first(result).startswith(PROMPT)
    alone = client.infer(MODEL, inputs(exclude_input_in_output=True))
    assert PROMPT + first(alone) == first(result)


def test_parameters_of_the_request_do_what_the_tensor_does(client: Any) -> None:
    result = client.infer(MODEL, [text("text_input", PROMPT)], parameters=GREEDY)
    assert first(result) == first(client.infer(MODEL, inputs()))


def test_further_outputs(client: Any) -> None:
    asked = inputs(return_finish_reason=True, return_num_output_tokens=True, return_num_input_tokens=True)
    result = client.infer(MODEL, [*asked, flag("return_cumulative_logprob", True), flag("return_logprobs", True)])
    assert first(result, "finish_reason") == "length"
    assert result.as_numpy("num_output_tokens").tolist() == [12]
    assert result.as_numpy("num_input_tokens")[0] > 0
    logprobs = json.loads(first(result, "logprobs"))
    total = sum(next(iter(position.values()))["logprob"] for position in logprobs)
    assert result.as_numpy("cumulative_logprob")[0] == pytest.approx(total, rel=1e-4)
    only = client.infer(MODEL, inputs(), outputs=[triton.InferRequestedOutput("num_output_tokens")])
    assert [output.name for output in only.get_response().outputs] == ["num_output_tokens"]


def test_a_stream_gives_the_same_text_in_pieces(client: Any) -> None:
    long = GREEDY | {"max_tokens": 200}
    heard = streamed(client, [inputs(sampling=long, stream=True)])
    assert [error for _, error in heard if error] == []
    results = [result for result, _ in heard]
    whole = client.infer(MODEL, inputs(sampling=long, exclude_input_in_output=True))
    assert "".join(map(first, results)) == first(whole)
    assert [is_final(result) for result in results] == [False] * (len(results) - 1) + [True]
    assert len(results) > 3


def test_many_requests_on_one_stream(client: Any) -> None:
    heard = streamed(client, [inputs(stream=number % 2 == 0) for number in range(8)])
    texts = dict.fromkeys(map(str, range(8)), "")
    for result, error in heard:
        assert error is None
        texts[result.get_response().id] += first(result)
    whole = first(client.infer(MODEL, inputs()))
    assert {text.removeprefix(PROMPT) for text in texts.values()} == {whole.removeprefix(PROMPT)}


def test_stop_strings_and_an_empty_final_response(client: Any) -> None:
    whole = first(client.infer(MODEL, inputs(exclude_input_in_output=True)))
    stop = whole[len(whole) // 2 :][:3]
    asked = inputs(sampling=GREEDY | {"stop": [stop]}, stream=True)
    heard = streamed(client, [asked], enable_empty_final_response=True)
    texts = [first(result) for result, _ in heard if result.get_response().outputs]
    assert "".join(texts) == whole[: whole.index(stop)]
    assert is_final(heard[-1][0])


def test_errors_name_the_field(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"sampling_parameters\.temperature") as caught:
        client.infer(MODEL, inputs(sampling={"temperature": -1}))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match=r"inputs\.image") as caught:
        client.infer(MODEL, [*inputs(), text("image", "x")])
    with pytest.raises(InferenceServerException) as caught:
        client.infer("another", inputs())
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    (bad, good) = streamed(client, [inputs(sampling={"best_of": 3}), inputs()])
    assert "sampling_parameters.best_of" in str((bad if bad[1] else good)[1])
    assert first((good if bad[1] else bad)[0]).startswith(PROMPT)
