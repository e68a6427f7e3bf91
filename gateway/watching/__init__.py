"""What the service is doing, for those who watch: figures of a window, this gateway's part, and whole snapshots."""
