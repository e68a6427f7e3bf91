"""The gateway's side of the wire: which workers there are, which one gets a request, and where its output goes."""
