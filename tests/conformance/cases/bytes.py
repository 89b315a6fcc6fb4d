"""What passes, passes as it is."""

from __future__ import annotations

from tests.conformance.case import case as rule
from tests.conformance.case import check
from tests.conformance.dialects import DIALECTS, Dialect
from tests.conformance.rig import Rig


@rule(
    "A request's body arrives at the replica byte for byte.",
    "https://github.com/sgl-project/sglang/issues/22740",
    each=DIALECTS,
)
async def request_body(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    body, mark = stage.session(dialect).next(stream=False)
    await stage.router.request("POST", dialect.path, body)
    replicas = stage.asked(mark)
    check(replicas, "no replica was asked")
    check(replicas[0].turns[-1].body == body, f"the replica got {replicas[0].turns[-1].body[:200]!r}")
