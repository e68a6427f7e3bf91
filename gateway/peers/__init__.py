"""The other gateways of a service: what has to reach the requests of all of them."""
