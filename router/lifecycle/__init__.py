"""The life of a turn: fetch, decide, commit, stream, learn, settle. What was acquired is always settled.

turn      one turn through its life
opening   the beginning of a stream, held back for a moment
heartbeat comments in a stream that is silent for long
placing   where it goes: fetch, decide, commit
settling  what it holds, and how that is given back
fleet     the replicas of one model: membership, what probes saw, the snapshot a decision reads
fleets    which fleet serves a model
leases    renewing what is held
remembered, returning   what this router has bound, and how a store learns of it that was away or has forgotten
passage   requests that are no turns
recent    the last decisions, term by term, and what then came true
"""
