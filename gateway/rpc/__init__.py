"""Around every RPC: its scope, interceptors, statuses and trailers, health, connections, server options."""
