"""Stubs of vLLM's own gRPC interface (`vllm serve --grpc-port`), which trainers and Dynamo's sidecar speak."""
