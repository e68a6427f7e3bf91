"""What gateways and workers share: messages, frames, sockets with limits, keys, run directories."""
