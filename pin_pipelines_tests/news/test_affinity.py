"""PostRankingAffinityInputsDocument: its version, its bounds, and what it bears from later writers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError

from pin_pipelines.news.affinity import (
    AffinityInputsRefusedError,
    PostRankingAffinityInputsDocument,
    read_affinity_inputs,
)

CATEGORY, PROJECT = UUID(int=1), UUID(int=2)
DOCUMENT = {
    "ContractVersion": 1,
    "CategoryId": str(CATEGORY),
    "BlockKinds": ["Image", "Text"],
    "ProjectIds": [str(PROJECT)],
    "AuthorType": "Developer",
}
READ = PostRankingAffinityInputsDocument(
    category_id=CATEGORY, block_kinds=("Image", "Text"), project_ids=(PROJECT,), author_type="Developer"
)


def test_a_document_of_version_1_is_read() -> None:
    assert read_affinity_inputs(DOCUMENT) == READ


def test_a_document_is_written_under_the_names_of_the_spec() -> None:
    assert READ.model_dump(mode="json", by_alias=True) == DOCUMENT


def test_fields_that_a_later_writer_added_are_tolerated() -> None:
    assert read_affinity_inputs({**DOCUMENT, "Mood": "sunny", "Tags": [{"Name": "new"}]}) == READ


def test_a_document_does_not_change() -> None:
    with pytest.raises(ValidationError):
        READ.author_type = "Agency"  # type: ignore[misc]


@pytest.mark.parametrize("field", ["CategoryId", "BlockKinds", "ProjectIds", "AuthorType"])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    without = {name: value for name, value in DOCUMENT.items() if name != field}
    with pytest.raises(AffinityInputsRefusedError, match=f"{field} is not allowed: Field required"):
        read_affinity_inputs(without)


@pytest.mark.parametrize(("field", "most"), [("BlockKinds", 32), ("ProjectIds", 20)])
def test_lists_are_read_up_to_their_bounds_and_refused_beyond(field: str, most: int) -> None:
    values = [str(UUID(int=n)) for n in range(most + 1)]
    read = read_affinity_inputs({**DOCUMENT, field: values[:most]})
    assert len(read.block_kinds if field == "BlockKinds" else read.project_ids) == most
    with pytest.raises(AffinityInputsRefusedError, match=f"{field} = .* is not allowed: .*at most {most} items"):
        read_affinity_inputs({**DOCUMENT, field: values})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("CategoryId", "flats"),
        ("CategoryId", None),
        ("BlockKinds", [""]),
        ("BlockKinds", [7]),
        ("BlockKinds", "Text"),
        ("ProjectIds", ["here"]),
        ("ProjectIds", None),
        ("AuthorType", ""),
        ("AuthorType", 3),
    ],
)
def test_a_value_that_is_not_of_its_type_is_refused_with_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(AffinityInputsRefusedError, match=rf"{field}.* is not allowed"):
        read_affinity_inputs({**DOCUMENT, field: value})


@pytest.mark.parametrize("version", [0, 2, -1, "1", None, 1.5, [1]])
def test_a_document_of_another_version_is_refused_with_the_versions_that_are_read(version: Any) -> None:
    with pytest.raises(AffinityInputsRefusedError) as refused:
        read_affinity_inputs({**DOCUMENT, "ContractVersion": version})
    assert str(refused.value) == f"ContractVersion = {version!r} is not allowed; it must be one of: 1"


@pytest.mark.parametrize("document", [None, [], "1", 1, {}])
def test_what_is_no_document_is_refused(document: Any) -> None:
    with pytest.raises(AffinityInputsRefusedError, match="ContractVersion = None is not allowed"):
        read_affinity_inputs(document)


def test_a_document_of_another_version_goes_through_the_migration_reader_that_is_registered_for_it() -> None:
    def read_version_2(document: Mapping[str, Any]) -> PostRankingAffinityInputsDocument:
        return PostRankingAffinityInputsDocument.model_validate({**document["Post"], "ContractVersion": 1})

    of_tomorrow = {"ContractVersion": 2, "Post": DOCUMENT}
    assert read_affinity_inputs(of_tomorrow, {2: read_version_2}) == READ
    assert read_affinity_inputs(DOCUMENT, {2: read_version_2}) == READ
    with pytest.raises(AffinityInputsRefusedError, match="it must be one of: 1, 2"):
        read_affinity_inputs({**DOCUMENT, "ContractVersion": 3}, {2: read_version_2})
