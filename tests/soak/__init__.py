"""The soak: two routers, Redis, six simulated replicas and faults, for as long as one likes. `python -m tests.soak`."""
