"""What Roost decides, and why: pure functions from facts, a view of the store and a fleet snapshot to a decision.

    identity   facts of a request: tenant, session, prompt chain
    prefix     the chained hash at every message boundary
    lineage    which branch a turn continues or forks from
    residency  how many tokens of it a replica is believed to hold
    cost       the cost of one choice, in seconds
    filters    who may take the turn at all
    policy     `roost` and the named baselines
    decide     the decision
    learn      what is believed after a turn
    catch_up   what a claim becomes that was made without the store

No module here imports asyncio, time, random or a client library: the same code runs in the router and under virtual
time.
"""
