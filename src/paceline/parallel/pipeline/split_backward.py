"""Backward of one micro-batch in two halves: gradients of the inputs first, and those of the weights later.

It uses no hooks. The first half asks autograd for the gradients of the inputs, and for those at the
operations that use weights; the second half starts at these operations and reaches only the weights. The
gradient of a weight that several operations use is computed in the first half, since a path from one of them
may lead through another. An operation that produces an output but depends on no input waits for the second
half, with the gradient of that output: in the first half, the hooks of the output would run a second time.

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
    """Plan the two halves of one backward.

    Args:
        outputs: outputs that get a gradient.
        inputs: received tensors, leaves of autograd.
        weights: trained weights, leaves of autograd.
    """
    graph = _AutogradGraph(outputs)
    return (UnsplitBackward if graph.is_reentrant else partial(SplitBackward, graph))(
        outputs, inputs, weights
    )


class UnsplitBackward:
    """Backward that runs in the first half as a whole.

    A reentrant checkpoint runs a backward of its own, which autograd allows only inside a whole backward.
    """

    is_fully_deferred, has_called_hooks = False, True

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        self._outputs, self._inputs, self._weights = outputs, inputs, weights
        self._weight_grads: dict[Tensor, Tensor] = {}

    def input_gradients(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the whole backward; the gradients of weights are kept aside."""
        before = [(weight, weight.grad) for weight in self._weights]
        for weight in self._weights:
            # Autograd adds to `.grad`, so the sum so far is put aside and restored afterwards.
            weight.grad = None
        try:
            torch.autograd.backward(self._outputs, grads)
            self._weight_grads = {weight: weight.grad for weight in self._weights if weight.grad is not None}
        finally:
            for weight, g in before:
                weight.grad = g
        return [x.grad for x in self._inputs]

    def weight_gradients(self) -> GradientByWeight:
        """Return the gradients of weights from the first half."""
        return self._weight_grads


class SplitBackward:
    """Backward in two halves; see `split_backward`."""

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
            # From a single entry, the second half reaches the weight without repeating the first half.
            if len(entries) == 1:
                self._later.setdefault(entries.pop(), []).append(weight)
            elif entries:
                self._at_once.append(weight)
        self._defer_output_nodes(graph, leads_to_inputs)
        self._edges = {node: graph.edges(node) for node in self._later}
        self._at: dict[GradientEdge, Tensor | None] = {}
        self._weight_grads: dict[Tensor, Tensor] = {}
        self.is_fully_deferred = not (inputs or self._at_once)

    def _defer_output_nodes(self, graph: _AutogradGraph, leads_to_inputs: set[Node]) -> None:
        """Defer what made an output and leads to no input, unless a gradient comes from elsewhere, too."""
        output_nodes = [node for node in self._later if node not in leads_to_inputs]
        self._waiting = {node for node in output_nodes if not graph.above([node])}
        for node in output_nodes:
            if node not in self._waiting:
                self._at_once += self._later.pop(node)

    def input_gradients(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the first half and return the gradients of the inputs; None if an input has no gradient.

        Args:
            grads: of the outputs.
        """
        edges = [
            edge for node, results in self._edges.items() if node not in self._waiting for edge in results
        ]
        wanted: Any = [*self._inputs, *self._at_once, *edges]
        if not wanted:
            self._at = self._output_gradients(grads)
            return []
        # The graph is kept for the second half.
        results = torch.autograd.grad(self._outputs, wanted, grads, retain_graph=True, allow_unused=True)
        num_inputs, num_both = len(self._inputs), len(self._inputs) + len(self._at_once)
        at_once = zip(self._at_once, results[num_inputs:num_both], strict=True)
        self._weight_grads = {weight: g for weight, g in at_once if g is not None}
        self._at = self._output_gradients(grads) | dict(zip(edges, results[num_both:], strict=True))
        return list(results[:num_inputs])

    def _output_gradients(self, grads: Sequence[Tensor]) -> dict[GradientEdge, Tensor | None]:
        """Return the gradients at the operations that wait for the second half."""
        at = dict.fromkeys(edge for node in self._waiting for edge in self._edges[node])
        for output, g in zip(self._outputs, grads, strict=True):
            output_edge = get_gradient_edge(output)
            # Without the ownership token, which edges made from node and number do not have.
            edge = GradientEdge(output_edge.node, output_edge.output_nr)
            if edge in at:
                # A chunk may return one tensor twice, and its gradients are added.
                earlier = at[edge]
                at[edge] = g if earlier is None else earlier + g
        return at

    def weight_gradients(self) -> GradientByWeight:
        """Run the second half and return the gradients of all weights."""
        grads_by_weight = dict(self._weight_grads)
        for node, weights in self._later.items():
            pairs = [(edge, g) for edge in self._edges[node] if (g := self._at[edge]) is not None]
            if pairs:
                at, grads = [edge for edge, _ in pairs], [g for _, g in pairs]
                # The graph is kept: nodes below several operations are needed once for each of them.
                node_grads = torch.autograd.grad(at, weights, grads, retain_graph=True, allow_unused=True)
                grads_by_weight |= {
                    weight: g for weight, g in zip(weights, node_grads, strict=True) if g is not None
                }
        return grads_by_weight


class _AutogradGraph:
    """Graph that autograd has recorded between some outputs and the leaves."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        roots = [get_gradient_edge(x) for x in outputs]
        self._roots = {edge.node for edge in roots}
        self._numbers: dict[Node, set[int]] = {}
        self._above: dict[Node, set[Node]] = {}
        for edge in roots:
            self._numbers.setdefault(edge.node, set()).add(edge.output_nr)
        self.is_reentrant = False
        # Iterative: graphs are deeper than Python's recursion limit.
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
        """Return all nodes from which one of these is reached."""
        ancestors: set[Node] = set()
        waiting = [*nodes]
        while waiting:
            new = self._above.get(waiting.pop(), set()) - ancestors
            ancestors |= new
            waiting += new
        return ancestors

    def entries(self, leaf: Node, leads_to_inputs: set[Node]) -> set[Node]:
        """Return the operations that use a weight, on paths to the inputs or among those of outputs."""
        entry_nodes: set[Node] = set()
        waiting, seen = [leaf], {leaf}
        while waiting:
            for node in self._above.get(waiting.pop(), set()) - seen:
                seen.add(node)
                (entry_nodes.add if node in leads_to_inputs or node in self._roots else waiting.append)(node)
        return entry_nodes

    def edges(self, node: Node) -> list[GradientEdge]:
        """Return the edges by which gradients come into an operation."""
        return [GradientEdge(node, number) for number in sorted(self._numbers[node])]
