"""A gateway: gRPC in front, workers behind."""

from octavo.gateway.observability import grpc_logging  # noqa: F401  (sets the environment of grpc: before it)
