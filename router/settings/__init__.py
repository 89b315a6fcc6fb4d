"""Every setting of the router in one place, and how it is read.

`load` lays four layers over each other: flags win over the environment (`ROOST_STORE__URL`), the environment over the
YAML file, the file over the defaults in `model`. What is wrong in any of them comes back as plain sentences, all at
once, that name the key, where it was set, what was wrong and what is allowed.
"""

from router.settings.load import Flags, load
from router.settings.model import (
    Admin,
    Auth,
    Fleet,
    Identity,
    Limits,
    Listen,
    Log,
    Placement,
    Policy,
    Profile,
    Repair,
    Settings,
    Store,
    StoreKind,
    Streams,
    Timeouts,
)
from router.settings.problems import ConfigError, Problem
from router.settings.rules import cautions
from router.settings.show import effective
from router.settings.values import SECRETS_TOLD

__all__ = [
    "SECRETS_TOLD",
    "Admin",
    "Auth",
    "ConfigError",
    "Flags",
    "Fleet",
    "Identity",
    "Limits",
    "Listen",
    "Log",
    "Placement",
    "Policy",
    "Problem",
    "Profile",
    "Repair",
    "Settings",
    "Store",
    "StoreKind",
    "Streams",
    "Timeouts",
    "cautions",
    "effective",
    "load",
]
