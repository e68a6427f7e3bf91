"""Stubs of the Open Inference Protocol (KServe v2), which gateways and clients of model servers speak."""
