"""What hands out seeds ends when told, also while it waits for room: a pool cannot be ended before."""

from __future__ import annotations

import math
import threading
from itertools import count

from simulations.fuzz import _until
from simulations.simulate_told import Asked
from tests.integration.replicas import PATIENCE_S


def test_it_stops_handing_out_when_all_is_over_though_it_waits_for_room() -> None:
    room, over = threading.Semaphore(1), threading.Event()
    handed = _until(((Asked(()), seed) for seed in count()), room, over, math.inf)
    assert next(handed)[1] == 0
    ended = threading.Event()

    def rest() -> None:
        assert list(handed) == []
        ended.set()

    waiting = threading.Thread(target=rest, daemon=True)
    waiting.start()
    over.set()
    room.release()
    assert ended.wait(PATIENCE_S)


def test_it_stops_when_the_time_is_up() -> None:
    assert list(_until(((Asked(()), seed) for seed in count()), threading.Semaphore(1), threading.Event(), 0.0)) == []
