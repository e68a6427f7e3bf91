"""`vllm.Inference` and `vllm.Control`: vLLM's own gRPC interface, as `vllm serve --grpc-port` has it."""

SERVICES = ("vllm.Inference", "vllm.Control")
