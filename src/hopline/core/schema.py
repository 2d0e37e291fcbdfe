"""Node types and relations of a graph: their names, the id range of each type, and what keys a relation's draws.

All nodes share one id space, in which each type is a range:

    node_types  (("paper", 5), ("author", 3))      paper 0 .. 4, author 5 .. 7
    offsets     (0, 5, 8)

The number of a relation is its place in `relations`. Its draws are keyed by its *names* (`relation_key`), so that
adding or leaving out a relation changes no draw of the others.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from hopline.ops import derive_key

RelationName = tuple[str, str, str]
"""(source type, name, destination type), PyG's edge type."""


@lru_cache(maxsize=1 << 16)  # more relations than any schema has; a batch asks for each of them
def salt_of(relation: RelationName) -> int:
    """A number of 63 bits that depends on the relation's names alone, the same in every process and version."""
    text = "\0".join(relation)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def relation_key(key: int, relation: RelationName) -> int:
    """The key by which a relation draws, derived from a batch's key and the relation's names."""
    return derive_key(key, salt_of(relation))


@dataclass(frozen=True)
class Schema:
    """The node types and relations of a graph.

    Raises ValueError for two types or relations of one name, a negative count, and a relation of an unknown type.
    """

    node_types: tuple[tuple[str, int], ...]
    """(name, number of nodes) of each type, in the order of their id ranges."""
    relations: tuple[RelationName, ...]
    """The relations, in the order of their numbers."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.node_types]
        if len({*names}) < len(names) or len({*self.relations}) < len(self.relations):
            raise ValueError(f"a schema names each node type and each relation once: {names}, {list(self.relations)}")
        if any(count < 0 for _, count in self.node_types):
            raise ValueError(f"a node type has at least 0 nodes: {list(self.node_types)}")
        for relation in self.relations:
            unknown = {relation[0], relation[2]} - {*names}
            if unknown:
                raise ValueError(f"relation {relation} names {sorted(unknown)}: the node types are {names}")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first id of each type, and at last the number of nodes."""
        return tuple(accumulate((count for _, count in self.node_types), initial=0))

    def ids_of(self, node_type: str) -> range:
        """The ids of a type's nodes. Raises KeyError for an unknown type."""
        number = self.number_of[node_type]
        return range(self.offsets[number], self.offsets[number + 1])

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The number of each node type, by its name."""
        return {name: number for number, (name, _) in enumerate(self.node_types)}

    def type_of(self, node: int) -> str:
        """The type of a node. Raises IndexError if there is no such node."""
        if not 0 <= node < self.offsets[-1]:
            raise IndexError(f"node {node} is outside 0 .. {self.offsets[-1] - 1}")
        return self.node_types[bisect_right(self.offsets, node) - 1][0]

    def into(self, node_type: str) -> tuple[int, ...]:
        """The numbers of the relations whose destinations are of a type."""
        return tuple(number for number, relation in enumerate(self.relations) if relation[2] == node_type)
