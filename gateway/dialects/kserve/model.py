"""The tensors of a text model, as Triton's vLLM backend names them, and their descriptions for callers."""

from octavo.gateway.version import VERSION
from octavo.kserve import inference_pb2 as oip

SERVER_NAME = "octavo"
MODEL_VERSION = "1"  # models here have no versions, but callers expect one
EXTENSIONS = ("model_configuration",)

TEXT_INPUT, STREAM, SAMPLING, EXCLUDE_INPUT = "text_input", "stream", "sampling_parameters", "exclude_input_in_output"
INPUTS: dict[str, str] = {
    TEXT_INPUT: "BYTES",
    STREAM: "BOOL",
    SAMPLING: "BYTES",  # a JSON object
    EXCLUDE_INPUT: "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
}

TEXT_OUTPUT = "text_output"
OUTPUTS: dict[str, str] = {
    TEXT_OUTPUT: "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",  # JSON
}

_DATA_TYPES = {
    "BYTES": oip.TYPE_STRING,
    "BOOL": oip.TYPE_BOOL,
    "UINT32": oip.TYPE_UINT32,
    "FP32": oip.TYPE_FP32,
}


def server_metadata() -> oip.ServerMetadataResponse:
    """The server's name, version and extensions."""
    return oip.ServerMetadataResponse(name=SERVER_NAME, version=VERSION, extensions=EXTENSIONS)


def model_metadata(name: str) -> oip.ModelMetadataResponse:
    """The model's tensors, as requests name them."""
    tensor = oip.ModelMetadataResponse.TensorMetadata
    return oip.ModelMetadataResponse(
        name=name,
        versions=[MODEL_VERSION],
        platform=SERVER_NAME,
        inputs=[tensor(name=each, datatype=datatype, shape=[1]) for each, datatype in INPUTS.items()],
        outputs=[tensor(name=each, datatype=datatype, shape=[-1]) for each, datatype in OUTPUTS.items()],
    )


def model_config(name: str) -> oip.ModelConfigResponse:
    """The same in Triton's terms."""
    config = oip.ModelConfig(
        name=name,
        platform=SERVER_NAME,
        backend=SERVER_NAME,
        max_batch_size=0,
        input=[
            oip.ModelInput(name=each, data_type=_DATA_TYPES[datatype], dims=[1], optional=each != TEXT_INPUT)
            for each, datatype in INPUTS.items()
        ],
        output=[
            oip.ModelOutput(name=each, data_type=_DATA_TYPES[datatype], dims=[-1]) for each, datatype in OUTPUTS.items()
        ],
        model_transaction_policy=oip.ModelTransactionPolicy(decoupled=True),
    )
    return oip.ModelConfigResponse(config=config)
