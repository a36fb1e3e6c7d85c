"""Parameters of paths and queries, as FastAPI checks and describes them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import AfterValidator

from ..records import EVENT_KINDS
from ..wire.conversions import check_id
from ..wire.models import CANDIDATES_MAX, ID_MAX, ID_PATTERN, NAME_MAX


def _id(what: str) -> Any:
    schema: dict[str, Any] = {"minLength": 1, "maxLength": ID_MAX, "pattern": ID_PATTERN}
    return Path(description=what, json_schema_extra=schema)


def _checked(name: str) -> AfterValidator:
    return AfterValidator(lambda text: check_id(text, name))


RequestId = Annotated[str, _checked("request_id"), _id("The id that it was scheduled with.")]
InstanceId = Annotated[str, _checked("an instance's id"), _id("The instance's id.")]
Waiter = Annotated[
    str, _checked("a waiter's name"), _id("The name that requests were scheduled with.")
]
NodeName = Annotated[str, _checked("a node's name"), _id("The node's name, if it has no slash.")]
EventKind = Annotated[
    str, Path(description="What happened.", json_schema_extra={"enum": list(EVENT_KINDS)})
]
Tenant = Annotated[
    str, Query(max_length=NAME_MAX, description="The tenant that it was scheduled with, if any.")
]
Candidates = Annotated[
    int, Query(ge=0, le=CANDIDATES_MAX, description="Candidates to show of each.")
]
