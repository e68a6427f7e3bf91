#!/bin/sh
# Any language, no stubs: the server tells its contract by reflection. Needs grpcurl.
#   examples/client/grpcurl.sh 127.0.0.1:50051
set -eu
target=${1:-127.0.0.1:50051}
grpcurl -plaintext "$target" list
grpcurl -plaintext "$target" describe octavo.v1.SamplingParams
grpcurl -plaintext -d '{"service": "octavo.v1.InferenceService"}' "$target" grpc.health.v1.Health/Check
grpcurl -plaintext -d '{}' "$target" octavo.v1.ModelService/ListModels
grpcurl -plaintext -d '{"text": "Once upon a time", "stop": {"max_tokens": 8}}' "$target" octavo.v1.InferenceService/Generate
grpcurl -plaintext -d '{"inputs": [{"text": "a fox"}], "pooling": "POOLING_MEAN"}' "$target" octavo.v1.InferenceService/Embed
