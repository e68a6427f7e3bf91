"""Deterministic simulation of the whole service: gateways, workers and their callers in one thread, on a virtual clock.

Real: everything between a parsed gRPC request and a step plan (interceptor, servicer, request tracker, admission,
streams, worker pool, registry, router; worker link, registration, engine, scheduler, block manager, oracle runner).
Simulated: the clock, the transport's bytes, processes, the HTTP/2 side, threads. `sim.world.simulate` runs one
`sim.scenario.Scenario`; the same scenario gives the same trace, byte for byte. Never imports torch.
"""
