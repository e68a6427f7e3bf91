"""What the client consists of; what callers use is in `octavo` itself."""
