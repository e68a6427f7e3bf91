"""The services of octavo.v1: they check requests, submit them, and write the answers."""
