"""A gateway: gRPC in front, workers behind."""

from octavo.gateway.observability import grpc_environment  # noqa: F401  (sets it: before grpc)
