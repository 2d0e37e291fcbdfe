"""Names, id ranges and draw keys of node types and relations."""

from __future__ import annotations

import pytest

from hopline.core.schema import Schema, relation_key, salt_of

CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
SCHEMA = Schema((("paper", 5), ("nobody", 0), ("author", 3)), (CITES, WRITES))


def test_types_are_ranges_of_one_id_space():
    assert SCHEMA.offsets == (0, 5, 5, 8)
    assert [SCHEMA.ids_of(name) for name in ("paper", "nobody", "author")] == [range(5), range(5, 5), range(5, 8)]
    assert [SCHEMA.type_of(node) for node in range(8)] == ["paper"] * 5 + ["author"] * 3
    assert SCHEMA.into("paper") == (0, 1)
    assert SCHEMA.into("author") == ()
    with pytest.raises(IndexError, match="node 8 is outside"):
        SCHEMA.type_of(8)


def test_a_relation_is_keyed_by_its_names_alone():
    assert salt_of(CITES) == salt_of(("paper", "cites", "paper")) == 5960122815783991650
    assert relation_key(7, CITES) == relation_key(7, CITES) != relation_key(8, CITES)
    assert (
        len({relation_key(7, names) for names in (CITES, WRITES, ("paper", "writes", "author"), ("a", "", "b"))}) == 4
    )
    assert salt_of(("a", "bc", "d")) != salt_of(("ab", "c", "d"))


@pytest.mark.parametrize(
    ("node_types", "relations", "message"),
    [
        ((("a", 1), ("a", 2)), (), "once"),
        ((("paper", 1),), (CITES, CITES), "once"),
        ((("paper", -1),), (), "at least 0"),
        ((("paper", 1),), (WRITES,), "author"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(node_types, relations, message):
    with pytest.raises(ValueError, match=message):
        Schema(node_types, relations)
