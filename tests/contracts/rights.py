"""The least that a Redis user needs to be a router's."""

from __future__ import annotations

RIGHTS = (
    "~roost:* +evalsha +eval +get +set +type +time +mget +hget +hmget +hset +hdel +hgetall +hlen +hexists +del "
    "+pttl +pexpire +zadd +zcard +zrem +zremrangebyscore +zscore +zrangebyscore"
)
"""One server, with the key prefix `roost`. `+select` for another database than 0."""

SENTINEL_RIGHTS = "+role"
"""Also for the data servers of a Sentinel group."""

CLUSTER_RIGHTS = "+cluster|slots +cluster|info"
"""Also for the nodes of a cluster. ASKING is allowed to everyone."""

ON_SENTINELS_RIGHTS = "+sentinel|get-master-addr-by-name +sentinel|master"
"""On the Sentinels themselves."""
