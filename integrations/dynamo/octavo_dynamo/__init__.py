"""An Octavo service as a backend of NVIDIA Dynamo: `python -m octavo_dynamo`. See docs/dynamo.md."""
