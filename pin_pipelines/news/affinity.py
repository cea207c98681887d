"""PostRankingAffinityInputsDocument: what a post is about, as it was when its signals were last recomputed.

The document is a column of the signals (``affinity_inputs``), so that recommendations need not join a post's blocks and
links. Fields that a later writer adds within the same ContractVersion are passed over; a document of another version
goes through the migration reader for it, and is refused if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_pascal

CONTRACT_VERSION: Final = 1
MAX_BLOCK_KINDS = 32
MAX_PROJECT_IDS = 20

# A value of one of the news service's enums, stored as text; values may be added.
_EnumText = Annotated[str, Field(min_length=1)]


class AffinityInputsRefusedError(ValueError):
    """The document cannot be read; the message names the field, its value and what is allowed."""


class PostRankingAffinityInputsDocument(BaseModel):
    """The document in its version 1. In JSON the names are the spec's: ContractVersion, CategoryId, …

    Attributes:
        category_id: the post's category.
        block_kinds: the kinds of block that it is made of, each once.
        project_ids: projects that it refers to.
        author_type: PostAuthorType.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_pascal, populate_by_name=True)

    contract_version: Literal[1] = CONTRACT_VERSION
    category_id: UUID
    block_kinds: Annotated[tuple[_EnumText, ...], Field(max_length=MAX_BLOCK_KINDS)]
    project_ids: Annotated[tuple[UUID, ...], Field(max_length=MAX_PROJECT_IDS)]
    author_type: _EnumText


# By ContractVersion: makes this version's document of a document of another.
MigrationReader = Callable[[Mapping[str, Any]], PostRankingAffinityInputsDocument]
MIGRATION_READERS: Mapping[int, MigrationReader] = {}


def read_affinity_inputs(
    document: Any, migration_readers: Mapping[int, MigrationReader] = MIGRATION_READERS
) -> PostRankingAffinityInputsDocument:
    """Read a document as it is stored.

    Args:
        document: the value of ``affinity_inputs``, parsed.
        migration_readers: for documents of other versions.

    Raises:
        AffinityInputsRefusedError: of a version that nobody here reads, or not as its version says.
    """
    version = document.get("ContractVersion") if isinstance(document, Mapping) else None
    if isinstance(version, int) and version in migration_readers:
        return migration_readers[version](document)
    if version != CONTRACT_VERSION:
        readable = ", ".join(map(str, sorted({CONTRACT_VERSION, *migration_readers})))
        raise AffinityInputsRefusedError(f"ContractVersion = {version!r} is not allowed; it must be one of: {readable}")
    try:
        return PostRankingAffinityInputsDocument.model_validate(document)
    except ValidationError as error:
        raise AffinityInputsRefusedError("; ".join(map(_explain, error.errors(include_url=False)))) from None


def _explain(details: Mapping[str, Any]) -> str:
    path = ".".join(map(str, details["loc"]))
    given = "" if details["type"] == "missing" else f" = {details['input']!r}"
    return f"{path}{given} is not allowed: {details['msg']}"
