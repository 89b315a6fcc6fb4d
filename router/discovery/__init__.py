"""Discovery: the router reads plain replicas itself, without an agent on their side.

`probe` asks over HTTP and never raises; `engine_json` and `engine_metrics` turn bytes into values; `incarnation`
tells one life of an engine from the next; `assemble` puts a round's answers and the round before it together as an
`Observation`. Only `probe` does I/O.
"""

from router.discovery.observation import Engine, Failure, Observation, measured_prefill_rate
from router.discovery.probe import Probe, open_session

__all__ = ["Engine", "Failure", "Observation", "Probe", "measured_prefill_rate", "open_session"]
