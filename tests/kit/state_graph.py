"""A search of every state that a model can reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

StateT = TypeVar("StateT", bound=Hashable)


class ViolationError(AssertionError):
    """The protocol promises something that does not hold here."""


@dataclass
class Graph(Generic[StateT]):
    """The result of a search.

    Args:
        states: every state that can be reached.
        came_from: for each, by its place in ``states``, those that lead to it.
    """

    states: list[StateT]
    came_from: list[list[int]]

    def stranded(self, is_goal: Callable[[StateT], bool]) -> list[StateT]:
        """The states from which no goal can be reached."""
        reaching = {i for i, state in enumerate(self.states) if is_goal(state)}
        unseen = deque(reaching)
        while unseen:
            before = set(self.came_from[unseen.popleft()]) - reaching
            reaching |= before
            unseen.extend(before)
        return [state for i, state in enumerate(self.states) if i not in reaching]


def search(start: StateT, steps: Callable[[StateT], Iterator[StateT]]) -> Graph[StateT]:
    """Every state that can be reached, breadth first."""
    places = {start: 0}
    graph = Graph([start], [[]])
    for here, state in enumerate(graph.states):  # which grows meanwhile
        for after in steps(state):
            place = places.setdefault(after, len(graph.states))
            if place == len(graph.states):
                graph.states.append(after)
                graph.came_from.append([])
            graph.came_from[place].append(here)
    return graph
