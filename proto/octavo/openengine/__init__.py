"""Stubs of openengine.v1, by which frameworks such as NVIDIA Dynamo drive engines."""
