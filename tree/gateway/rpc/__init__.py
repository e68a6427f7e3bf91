"""Around every RPC: its scope, the outermost guard, statuses and trailers, health, server options."""
