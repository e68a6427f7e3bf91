"""What a gateway shows of itself: counters, their exposition for Prometheus, structured logs."""
