"""The settings: groups, fields, units, defaults and the reason for each default.

A `Settings` is always consistent: what a field allows stands in its type, what fields must be to each other in
`router.settings.rules`. Building one never reads the environment; `router.settings.load` does what reading there is.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from router.domain import replica as domain
from router.settings.rules import ContradictionError, contradictions, follow_url
from router.settings.values import (
    Count,
    FieldPath,
    FleetName,
    HeaderName,
    KeyPrefix,
    Port,
    Positive,
    RedisUrl,
    ReplicaUrl,
    Seconds,
    Secret,
    Share,
    Text,
)

__all__ = [
    "Admin",
    "Auth",
    "Ejection",
    "Fleet",
    "Group",
    "Identity",
    "Limits",
    "Listen",
    "Log",
    "Placement",
    "Policy",
    "Profile",
    "Repair",
    "Settings",
    "Store",
    "StoreKind",
    "Streams",
    "Timeouts",
]

Policy = Literal["roost", "round_robin", "least_inflight", "rendezvous", "bounded_load", "session_sticky"]
Repair = Literal["anthropic_thinking_display"]
StoreKind = Literal["embedded", "redis", "memory"]

_PRIOR = domain.Profile()


class Group(BaseModel):
    """A mapping of settings that knows its keys and cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class Listen(Group):
    """Where clients come in."""

    host: Text = Field(
        "127.0.0.1",
        description="Address to listen on. Loopback, so that nobody opens a fleet to a network without saying so; "
        "0.0.0.0 in a container.",
    )
    port: Port = Field(
        8080, description="TCP port; 0 lets the system choose. 8080 needs no privilege and is what people try first."
    )


class Admin(Group):
    """Where operators and Prometheus come in: a listener of its own, so that clients cannot reach it by a path.

    With tokens, reading needs either (GET, /metrics), changing the write token; /livez and /readyz need none. A file
    has a token a line: two lines while one replaces the other.
    """

    host: Text = Field(
        "127.0.0.1",
        description="Address of the admin API and /metrics. Loopback, so that it asks for no token unless one is set.",
    )
    port: Port = Field(9090, description="TCP port; 0 lets the system choose. 9090 is Prometheus' habit.")
    read_token_file: Text | None = Field(None, description="File with tokens that may read. None: see `unprotected`.")
    write_token_file: Text | None = Field(None, description="File with tokens that may change what the fleets are.")
    read_token: Secret | None = Field(
        None, repr=False, description="A token that may read, in place of a file: for the environment of a container."
    )
    write_token: Secret | None = Field(None, repr=False, description="A token that may change, in place of a file.")
    unprotected: bool = Field(
        False,
        description="Whether an address that is not loopback may do without tokens. false: whoever reaches the admin "
        "API can send every tenant's prompts to a replica of his own.",
    )


class Auth(Group):
    """Who may come in, and with which key Roost comes to replicas."""

    keys_file: Text | None = Field(
        None,
        description="YAML file of tenants and the hashes of their API keys (`roost keys new`), read again when it "
        "changes. None: anybody may come, and whoever has the same key is the same tenant.",
    )
    engine_paths: Literal["refuse", "pass"] = Field(
        "refuse",
        description="What becomes of paths that act on an engine as a whole, or that Roost does not know, where a keys "
        "file is in force: flush_cache, abort_request, update_weights and the like. refuse: only tenants with "
        "engine_control may ask them; pass: everyone may.",
    )
    replica_key_file: Text | None = Field(
        None, description="File with the key that replicas ask for (SGLang's --api-key). None: they ask for none."
    )
    replica_key: Secret | None = Field(
        None, repr=False, description="The replicas' key itself, in place of a file: for the environment."
    )
    client_credentials: Literal["drop", "pass"] = Field(
        "drop",
        description="Whether a client's own key, and its cookies, reach replicas. drop: a replica that is broken into "
        "then learns no key; pass where replicas know the clients' keys.",
    )


class Store(Group):
    """Where leases, bindings and boundaries live."""

    kind: StoreKind = Field(
        "embedded",
        description="embedded: a private Valkey that dies with the router; redis: shared by several routers, at "
        "`url`; memory: one process only. Embedded, since it needs nothing installed and serves several workers. A "
        "`url` alone implies redis.",
    )
    url: RedisUrl | None = Field(
        None,
        repr=False,
        description="URL of the shared Redis or Valkey: one server, a master behind Sentinels, or a cluster. None: "
        "there is no address that would be right everywhere.",
    )
    username: Text | None = Field(
        None, description="User of the shared store. None: the one in the URL, or the server's default user."
    )
    password_file: Text | None = Field(
        None,
        description="File with the password of the shared store, read at every connection, so that a mounted secret "
        "may be rotated. None: the one in the URL, or none.",
    )
    sentinel_password_file: Text | None = Field(
        None,
        description="The same for the Sentinels, whose user is `sentinel_username` in the URL. None: the one in the "
        "URL, or none, as Sentinels have by default.",
    )
    prefix: KeyPrefix = Field(
        "roost", description="First part of every key. A name, so that one Redis can serve several installations."
    )
    lease_ttl_s: Seconds = Field(
        10.0,
        description="Seconds after which the lease of a router that died expires. 10: three renewals may fail "
        "before a living router loses its count, and a dead one haunts the fleet no longer than a turn lasts.",
    )
    lease_renew_s: Seconds = Field(3.0, description="Seconds between renewals of running leases. A third of the TTL.")
    timeout_s: Seconds = Field(
        0.05,
        description="Seconds one store call may take before the router goes on from its own memory. 50 ms is a "
        "hundred times a healthy round trip and still hidden in a turn's time to first token.",
    )
    branch_ttl_s: Seconds = Field(
        21_600.0,
        description="Seconds an idle branch is remembered. 6 h: the p99 of the pause before a human's next turn is "
        "15,050 s in recorded coding sessions, and 6 h is beyond it.",
    )
    boundaries_kept: Count = Field(
        7,
        description="Prompt ends remembered per branch (count), by which a later turn finds it. 7: a harness that "
        "rewinds or retries goes back a few turns, older ends thin out, and a session takes about 2 KB of Redis.",
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_url(cls, given: Any) -> Any:
        return follow_url(given)


class Profile(Group):
    """Prior figures of a fleet's replicas, used until enough has been observed."""

    prefill_rate: Positive = Field(
        _PRIOR.prefill_rate,
        description="Uncached prompt tokens per second. The middle of the 8k to 40k one may expect of a large MoE "
        "on 4 B200.",
    )
    host_load_rate: Positive = Field(
        _PRIOR.host_load_rate,
        description="Tokens per second loaded back from host memory. 100k tokens of BF16 MLA rows at 50 GB/s.",
    )
    step_time_s: Seconds = Field(
        _PRIOR.step_time_s,
        description="Seconds per decode step with one turn running. 50 steps a second, a common figure.",
    )
    step_slope: Share = Field(
        _PRIOR.step_slope,
        description="Relative growth of the step time per further running turn. 2 %: decode batches well.",
    )
    accept_length: Positive = Field(
        _PRIOR.accept_length,
        description="Tokens accepted per decode step. 1: no speculation unless the operator says so.",
    )
    tokens_per_byte: Positive = Field(
        _PRIOR.tokens_per_byte,
        description="Prompt tokens per byte of prompt text. 4 bytes a token, learned within a few turns.",
    )
    device_tokens: Count = Field(
        _PRIOR.device_tokens,
        description="KV room on device, in tokens, where the replica does not say. 4 B200 beside a 1T model.",
    )
    host_tokens: int = Field(
        _PRIOR.host_tokens,
        ge=0,
        description="KV room in host memory (HiCache), in tokens. 0: it is off unless configured.",
    )
    max_running: Count = Field(
        _PRIOR.max_running,
        description="Turns a replica runs at once, where it does not say. 64 is usual for long contexts.",
    )

    def prior(self) -> domain.Profile:
        """The same figures as the value that placement reads."""
        return domain.Profile(**self.model_dump())


class Fleet(Group):
    """The replicas of one model."""

    name: FleetName = Field(
        description="Name of the fleet in keys, metrics and the admin API. No default: it must be told apart."
    )
    models: tuple[Text, ...] = Field(
        (),
        description="Model names served; '*' accepts any. Empty: whatever the replicas say they serve, which is "
        "what one wants unless clients use aliases.",
    )
    replicas: tuple[ReplicaUrl, ...] = Field(
        (),
        description="Root URLs of the replicas known from the start. Empty: they come by report or by the admin API.",
    )
    policy: Policy = Field(
        "roost",
        description="How a replica is chosen. roost: the cost of each choice in seconds; the others are for "
        "comparison.",
    )
    profile: Profile = Field(Profile(), description="Prior figures of these replicas.")
    repairs: tuple[Repair, ...] = Field(
        (),
        description="Named repairs of what SGLang refuses from a harness. None: requests pass byte by byte unless "
        "asked otherwise.",
    )
    admission: Share = Field(
        1.2,
        description="Share of the fleet's KV room, device and host, that live branches may ask for before new sessions "
        "wait; 0 turns it off. 1.2: what sessions share is counted for each of them, and agents that have ended count "
        "for a while, so that the cliff lies beyond 1.",
    )
    probe_interval_s: Seconds = Field(
        1.0,
        description="Seconds between looks at a replica that sends no report. 1: a lost replica is noticed within "
        "seconds, and the engine's endpoints asked are cheap.",
    )
    replica_key_file: Text | None = Field(
        None, description="File with the key that these replicas ask for. None: that of `auth`, if there is one."
    )
    replica_key: Secret | None = Field(None, repr=False, description="These replicas' key, in place of a file.")
    client_credentials: Literal["drop", "pass"] | None = Field(
        None, description="Whether a client's own key reaches these replicas. None: as `auth` says."
    )


class Identity(Group):
    """How a session is recognised."""

    session_headers: tuple[HeaderName, ...] = Field(
        (
            "modal-session-id",
            "x-roost-session",
            "x-claude-code-session-id",
            "x-session-id",
            "x-session-affinity",
            "session-id",
            "session_id",
            "goose-session-id",
            "x-smg-routing-key",
        ),
        description="Headers that name the session, first present wins, case ignored. What an operator sets comes "
        "first, then what the known harnesses send.",
    )
    session_fields: tuple[FieldPath, ...] = Field(
        ("prompt_cache_key", "metadata.user_id", "session_id", "user"),
        description="Body fields that name the session when no header does, first present wins. From the most to "
        "the least specific.",
    )


class Placement(Group):
    """Weights of the decision."""

    kappa: Share = Field(
        0.5, description="Weight (no unit) of the delay a prefill causes to turns running there. 0.5 did best."
    )
    mu: Share = Field(
        1.0, description="Weight (no unit) of moving a branch from its home: hysteresis. 1 with learned eviction price."
    )
    beta_s: Share = Field(
        1.0,
        description="Seconds charged per live branch of a replica's crowd, new branches only. 1 spreads them evenly.",
    )
    crowd_half_life_s: Seconds = Field(
        300.0,
        description="Seconds in which an idle branch's share in the crowd halves. 300: most agent pauses are shorter.",
    )
    live_half_life_s: Seconds = Field(
        120.0,
        description="Seconds in which an idle branch's share in the live tokens halves, which admission goes by. 120: "
        "the KV of agents that ended or wait for a human soon counts as free; did best in simulated overload.",
    )
    expected_output_tokens: Count = Field(
        440, description="Output tokens expected of a turn. 440: mean of recorded coding-agent turns."
    )
    ramp_s: Share = Field(
        10.0,
        description="Seconds over which a newcomer is ramped up to a full share. 10: its first turns then have "
        "finished.",
    )
    decisions_kept: Count = Field(
        200, description="Decisions shown by the admin API (count). 200: a few minutes of a small fleet."
    )
    attempts: Count = Field(
        16,
        description="Times a turn is decided anew because the fleet changed meanwhile (count); the last ignores "
        "how busy the chosen replica has become. 16: dozens of turns that race for one branch through several routers "
        "settle within it.",
    )


class Limits(Group):
    """What is refused, and how often is tried."""

    body_max_bytes: Count = Field(
        128 * 1024 * 1024, description="Largest request body in bytes. 128 MiB: long contexts with images fit."
    )
    bodies_max_bytes: Count = Field(
        1024 * 1024 * 1024,
        description="Bytes of request bodies that one worker holds at once. 1 GiB: eight of the largest or thousands "
        "of usual ones. Further requests wait, unread, and are told 503 with Retry-After in the end.",
    )
    body_rate_min: Share = Field(
        1024.0,
        description="Bytes per second that a request body must bring, over each `timeouts.body_idle_s`; else 408. "
        "1024: slower than any line that an agent works over, and a body cannot be held open for days.",
    )
    connections_max: Count = Field(
        8192,
        description="Client connections that one worker keeps open; further ones are told 503. 8192: far more than a "
        "worker can serve turns to, and idle ones cost some kB each. The limit of open files must be twice that.",
    )
    header_max_bytes: Count = Field(
        32 * 1024,
        description="Largest request head in bytes. 32 KiB: harnesses send up to some kB, Codex more with each "
        "workspace.",
    )
    retries: int = Field(
        2,
        ge=0,
        description="Further replicas tried when one fails before its first byte (count). 2: then it is not the "
        "replica.",
    )
    queue_max: int = Field(
        256,
        ge=0,
        description="New sessions that wait for room in one fleet, per process (count); one more is told to come "
        "back. 256: each holds its request, some hundred kB, and more could not get in before they have waited long.",
    )
    bare_abort_agents: tuple[Text, ...] = Field(
        ("QwenCode/", "claude-cli/"),
        description="User-Agent prefixes, case ignored, of clients whose broken stream is cut without an error event. "
        "These two retry a mere break as they should, but told why, one ends its run and the other stops streaming.",
    )


class Ejection(Group):
    """When a replica that answers probes is taken out for failing its turns, and when its turns are given up."""

    failures: Count = Field(
        3,
        description="Turns in a row that must fail at a replica to take it out (count). 3: one may be its client's "
        "doing and two a coincidence. A large number turns it off.",
    )
    base_s: Seconds = Field(
        5.0,
        description="Seconds it is out the first time, doubled at each repeat. 5: a hiccup is over, and little is lost "
        "where there was none.",
    )
    max_s: Seconds = Field(
        60.0,
        description="Seconds it is out at most, and after which one repeat is forgotten. 60: one failed turn a minute "
        "is a small price for noticing that it is well again.",
    )
    silent_s: Seconds = Field(
        10.0,
        description="Seconds without a byte of any turn after which a replica that answers no probe is dead. Where "
        "no probe has been answered for as long either, turns that wait there are given up, to be placed elsewhere "
        "if the client has seen nothing. 10: a long prefill holds back an engine's other streams for some seconds.",
    )


class Timeouts(Group):
    """How long is waited for what."""

    connect_s: Seconds = Field(
        2.0, description="Seconds to connect to a replica. 2: within a cluster that is a dead host."
    )
    first_byte_s: Seconds = Field(
        600.0, description="Seconds to a replica's response head. 600: what the OpenAI and Anthropic clients wait."
    )
    idle_s: Seconds = Field(
        600.0,
        description="Seconds a replica's stream may be silent. 600: harnesses give up themselves after 240 to 300 s.",
    )
    keepalive_s: Seconds = Field(
        4.0,
        description="Seconds an idle connection to a replica is kept. 4: below the 5 s after which SGLang closes it.",
    )
    client_head_s: Seconds = Field(
        20.0,
        description="Seconds from the first byte of a client's connection to the end of its request's head; else 408. "
        "20: heads are sent in one piece, so only a broken or hostile client takes longer.",
    )
    body_idle_s: Seconds = Field(
        30.0,
        description="Seconds a request body may be silent; else 408. 30: agents send what they have in memory.",
    )
    body_wait_s: Seconds = Field(
        10.0,
        description="Seconds a request waits for room under `limits.bodies_max_bytes` before it is told 503. 10: room "
        "is free again when a turn's answer begins, and what lasts longer is overload.",
    )
    refusal_s: Share = Field(
        0.25,
        description="Seconds that the head of a stream waits for output or for a refusal inside it, where another "
        "replica could take the turn; 0 turns it off. 0.25: SGLang says within milliseconds that its queue is full, "
        "but says so after a 200.",
    )
    queue_s: Share = Field(
        30.0,
        description="Seconds a new session waits for room before it is told to come back. 30: Qwen Code gives up "
        "without a head after 120 s, of which most must be left for the replica.",
    )
    shutdown_grace_s: Share = Field(
        30.0, description="Seconds running turns get to finish at shutdown. 30: Kubernetes' default grace period."
    )
    ready_lag_s: Share = Field(
        2.0,
        description="Seconds at shutdown of saying not ready and yet accepting. 2: load balancers look about once "
        "a second.",
    )


class Streams(Group):
    """What is done to streams besides passing them on."""

    keepalive_s: Share = Field(
        0.0,
        description="Seconds of silence after which an event stream gets a comment line, which clients ignore, so that "
        "neither they nor proxies take it for dead; 0: streams pass byte by byte. Below what gives up first, often 60.",
    )


class Log(Group):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe line written. info: one line a turn, without prompts or raw ids."
    )
    format: Literal["json", "text"] = Field(
        "json", description="Form of a line. json: made for machines, one object a line."
    )


class Settings(BaseSettings):
    """Everything the router can be told."""

    model_config = SettingsConfigDict(
        env_prefix="ROOST_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    listen: Listen = Field(Listen(), description="Where clients come in.")
    admin: Admin = Field(Admin(), description="Where operators and Prometheus come in.")
    auth: Auth = Field(Auth(), description="Who may come in, and with which key Roost comes to replicas.")
    workers: Count = Field(
        1, description="Processes that share the port (count). 1: one process serves a fleet of dozens of replicas."
    )
    store: Store = Field(Store(), description="Where leases, bindings and boundaries live.")
    fleets: tuple[Fleet, ...] = Field(
        (Fleet(name="default"),),
        description="The fleets. One without replicas by default, which the admin API can fill.",
    )
    identity: Identity = Field(Identity(), description="How a session is recognised.")
    placement: Placement = Field(Placement(), description="Weights of the decision.")
    limits: Limits = Field(Limits(), description="What is refused, and how often is tried.")
    timeouts: Timeouts = Field(Timeouts(), description="How long is waited for what.")
    ejection: Ejection = Field(Ejection(), description="How much of a failing replica is put up with.")
    streams: Streams = Field(Streams(), description="What is done to streams besides passing them on.")
    log: Log = Field(Log(), description="What is written to standard error.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 (pydantic-settings' signature)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (pydantic-settings' signature)
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (pydantic-settings' signature)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (pydantic-settings' signature)
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but the arguments: `load` reads the other sources, and a test's settings depend on no environment."""
        return (init_settings,)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        problems = contradictions(self)
        if problems:
            raise ContradictionError(problems)
        return self
