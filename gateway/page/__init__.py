"""The live page: the service as people see it in a browser. Its calls pass the same guard as those over gRPC, so that
keys, limits and the log are the same."""
