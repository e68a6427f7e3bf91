"""The services of octavo.v1: thin shells that check, ask the desk, and put answers on the wire."""
