"""Shared state of all routers: `memory` for one process, `redis` for many, `embedded` to bring one along.

`memory` is the reference and holds the contract; `tests/contracts` runs one suite over all of them.
"""
