"""`openengine.v1`, by which frameworks such as NVIDIA Dynamo drive inference engines.

What the contract leaves open is settled here once: its revision, and which callers are refused for theirs.
"""

INFERENCE = "openengine.v1.Inference"
CONTROL = "openengine.v1.Control"
SERVICES = (INFERENCE, CONTROL)

REVISION = 1
"""Of the schema. The contract has no field in which a client tells its own, but it reserves metadata that begin with
`openengine-`, and fields of later revisions are unknown ones: both are refused by name."""
RELEASE = "openengine.v1-r1"
"""Names the schema in words; the reference has no tag of its own for this revision."""
