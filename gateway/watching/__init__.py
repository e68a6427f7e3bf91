"""What the service is doing, for whoever watches: figures of a window, this gateway's part, and whole snapshots."""
