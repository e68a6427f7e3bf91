"""Text of one model: tokenizing, chat templates, incremental detokenizing, stop strings. Knows no gRPC, no streams."""
