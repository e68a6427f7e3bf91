"""An Octavo service as a backend of NVIDIA Dynamo: `python -m octavo_dynamo`. docs/dynamo.md says how."""
