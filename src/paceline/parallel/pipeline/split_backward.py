"""The backward of one micro-batch in two halves: gradients of what came in, and later those of the weights.

No hooks: the first half asks autograd for the gradients of the inputs, and for those at the operations that
weights go into; the second half starts at these operations and reaches the weights alone. A weight that goes
into several operations is done in the first half, since a path from one of them leads through another.
What made an output and leads to no input waits for the second half with the gradient that was given: asked
for in the first, it would have passed the hooks of that output once too often.
Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

GradientByWeight = Mapping[Tensor, Tensor]
_REENTRANT_NODE = "CheckpointFunctionBackward"


def split_backward(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> SplitBackward | UnsplitBackward:
    """One backward.

    Args:
        outputs: what came out and takes a gradient.
        inputs: what came in, leaves of autograd.
        weights: trained, leaves of autograd.
    """
    graph = _AutogradGraph(outputs)
    return (UnsplitBackward if graph.is_reentrant else partial(SplitBackward, graph))(
        outputs, inputs, weights
    )


class UnsplitBackward:
    """A backward that is not cut: a reentrant checkpoint has one of its own, inside a whole one only."""

    is_fully_deferred, has_called_hooks = False, True

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        self._outputs, self._inputs, self._weights = outputs, inputs, weights
        self._found: dict[Tensor, Tensor] = {}

    def input_gradients(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """All of it; the gradients of weights are kept apart."""
        before = [(weight, weight.grad) for weight in self._weights]
        for weight in self._weights:
            weight.grad = None
        try:
            torch.autograd.backward(self._outputs, grads)
            self._found = {weight: weight.grad for weight in self._weights if weight.grad is not None}
        finally:
            for weight, g in before:
                weight.grad = g
        return [x.grad for x in self._inputs]

    def weight_gradients(self) -> GradientByWeight:
        """What has been found."""
        return self._found


class SplitBackward:
    """A backward that is cut; see `split_backward`."""

    has_called_hooks = False

    def __init__(
        self,
        graph: _AutogradGraph,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        self._outputs, self._inputs = outputs, inputs
        leads_to_inputs = graph.above([get_gradient_edge(x).node for x in inputs])
        self._at_once: list[Tensor] = []
        self._later: dict[Node, list[Tensor]] = {}
        for weight in weights:
            entries = graph.entries(get_gradient_edge(weight).node, leads_to_inputs)
            if len(entries) == 1:
                self._later.setdefault(entries.pop(), []).append(weight)
            elif entries:
                self._at_once.append(weight)
        self._leave_to_the_second(graph, leads_to_inputs)
        self._edges = {node: graph.edges(node) for node in self._later}
        self._at: dict[GradientEdge, Tensor | None] = {}
        self._found: dict[Tensor, Tensor] = {}
        self.is_fully_deferred = not (inputs or self._at_once)

    def _leave_to_the_second(self, graph: _AutogradGraph, leads_to_inputs: set[Node]) -> None:
        """What made an output and leads to no input; all of it at once if a gradient comes from elsewhere."""
        apart = [node for node in self._later if node not in leads_to_inputs]
        self._waiting = {node for node in apart if not graph.above([node])}
        for node in apart:
            if node not in self._waiting:
                self._at_once += self._later.pop(node)

    def input_gradients(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The first half; None where an input has no gradient.

        Args:
            grads: of the outputs.
        """
        edges = [edge for node, found in self._edges.items() if node not in self._waiting for edge in found]
        wanted: Any = [*self._inputs, *self._at_once, *edges]
        if not wanted:
            self._at = self._given(grads)
            return []
        found = torch.autograd.grad(self._outputs, wanted, grads, retain_graph=True, allow_unused=True)
        num_inputs, num_both = len(self._inputs), len(self._inputs) + len(self._at_once)
        at_once = zip(self._at_once, found[num_inputs:num_both], strict=True)
        self._found = {weight: g for weight, g in at_once if g is not None}
        self._at = self._given(grads) | dict(zip(edges, found[num_both:], strict=True))
        return list(found[:num_inputs])

    def _given(self, grads: Sequence[Tensor]) -> dict[GradientEdge, Tensor | None]:
        """The gradients at what waits."""
        at = dict.fromkeys(edge for node in self._waiting for edge in self._edges[node])
        for output, g in zip(self._outputs, grads, strict=True):
            made = get_gradient_edge(output)
            edge = GradientEdge(made.node, made.output_nr)
            if edge in at:
                earlier = at[edge]
                at[edge] = g if earlier is None else earlier + g
        return at

    def weight_gradients(self) -> GradientByWeight:
        """The second half."""
        found = dict(self._found)
        for node, weights in self._later.items():
            pairs = [(edge, g) for edge in self._edges[node] if (g := self._at[edge]) is not None]
            if pairs:
                at, grads = [edge for edge, _ in pairs], [g for _, g in pairs]
                own = torch.autograd.grad(at, weights, grads, retain_graph=True, allow_unused=True)
                found |= {weight: g for weight, g in zip(weights, own, strict=True) if g is not None}
        return found


class _AutogradGraph:
    """What autograd has recorded between some outputs and the leaves."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        roots = [get_gradient_edge(x) for x in outputs]
        self._roots = {edge.node for edge in roots}
        self._numbers: dict[Node, set[int]] = {}
        self._above: dict[Node, set[Node]] = {}
        for edge in roots:
            self._numbers.setdefault(edge.node, set()).add(edge.output_nr)
        self.is_reentrant = False
        waiting, seen = [*self._roots], {*self._roots}
        while waiting:
            node = waiting.pop()
            self.is_reentrant |= node.name() == _REENTRANT_NODE
            for below, number in node.next_functions:
                if below is not None:
                    self._numbers.setdefault(below, set()).add(number)
                    self._above.setdefault(below, set()).add(node)
                    if below not in seen:
                        seen.add(below)
                        waiting.append(below)

    def above(self, nodes: Sequence[Node]) -> set[Node]:
        """All from which one of these is reached."""
        found: set[Node] = set()
        waiting = [*nodes]
        while waiting:
            new = self._above.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    def entries(self, leaf: Node, leads_to_inputs: set[Node]) -> set[Node]:
        """Operations on the way to the inputs that a weight goes into; without one, the outputs' own."""
        found: set[Node] = set()
        waiting, seen = [leaf], {leaf}
        while waiting:
            for node in self._above.get(waiting.pop(), set()) - seen:
                seen.add(node)
                (found.add if node in leads_to_inputs or node in self._roots else waiting.append)(node)
        return found

    def edges(self, node: Node) -> list[GradientEdge]:
        """Where gradients come into an operation."""
        return [GradientEdge(node, number) for number in sorted(self._numbers[node])]
