"""`roost demo`: a router before simulated replicas, told as a story in a terminal.

`cast` says who plays (pure), `story` when what happens and what the caption says of it (pure), `tally` does the sums
(pure), `screen` draws them. `stage` brings up store, replicas and router, `lookout` reads what they tell of themselves,
`show` plays. `rehearsal` plays the same cast in virtual time with the router's own code, for `versus`, which compares
policies in a process of its own.
"""
