"""`inference.GRPCInferenceService`: the Open Inference Protocol (KServe v2), as Triton's text models use it."""

SERVICE = "inference.GRPCInferenceService"
