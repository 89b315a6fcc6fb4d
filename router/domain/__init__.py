"""Frozen values of the router: what a replica, a fleet, a branch, a turn, a decision and an outcome are.

Nothing here does I/O, reads a clock or imports a client library. Units stand last in every name.
"""
