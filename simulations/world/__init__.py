"""A whole fleet in virtual time: the router's own lifecycle, placement and store in memory over replica models.

    scenario       who is there, what they do, what goes wrong: one frozen value from a seed
    replicas       a replica: model, timer, responses
    network        a router's `Upstream` and `Prober` over them, which may be cut
    storage        the shared store and each router's link to it, which may fail
    conversations  turns as facts and work
    routers        a router: the real `Turns`, `FleetRuntime` and `Leases`, which may die
    clients        sessions, retries, clients that vanish
    operator       makes a schedule of faults happen
    play           one run from beginning to quiet

Everything follows from the scenario: every subject draws from a random stream of its own, named by the seed and the
subject. Nothing here judges; `simulations.checkers` does, and knows nothing of what is here.
"""

from simulations.world.play import World, play
from simulations.world.scenario import Scenario, scenario_of

__all__ = ["Scenario", "World", "play", "scenario_of"]
