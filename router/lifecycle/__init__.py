"""The life of a turn: fetch, decide, commit, stream, learn, settle. What was acquired is always settled.

turn        one turn through its life
turnstile   tenants' limits, before anything is placed
waiting     new sessions that wait for room
placing     where a turn goes: fetch, decide, commit
opening     the beginning of a stream, held back for a moment
heartbeat   comments in a stream that is silent for long
settling    what it holds, and how that is given back
leases      renewing what is held
remembered, returning   what this router has bound, and how a store learns of it that was away or has forgotten
fleet       the replicas of one model: membership, and the snapshot a decision reads
fleets      which fleet serves a model
lives       what a look at a replica changes in its shared record
watch       what this router sees of a fleet's replicas
health      of one replica: a machine that is told what was seen
lost        turns that wait at a replica, to be told when it is lost
passage     requests that are no turns
recent      the last decisions, term by term, and what then came true
"""
