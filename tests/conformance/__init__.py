"""Rules for routers in front of inference replicas, tried on any router: `python -m tests.conformance --help`."""
