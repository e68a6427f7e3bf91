"""`openengine.v1`, with which frameworks such as NVIDIA Dynamo drive inference engines.

Defines what the contract leaves open: the revision that is served, and which callers are refused because of theirs.
"""

INFERENCE = "openengine.v1.Inference"
CONTROL = "openengine.v1.Control"
SERVICES = (INFERENCE, CONTROL)

REVISION = 1
"""Revision of the schema. The contract has no field for a client's revision, but it reserves metadata keys that begin
with `openengine-`, and fields of later revisions are unknown fields: both are refused by name."""
RELEASE = "openengine.v1-r1"
"""Name of the schema's release; the reference has no tag for this revision."""
