"""The parts of the client; its public names are in `octavo` itself."""
