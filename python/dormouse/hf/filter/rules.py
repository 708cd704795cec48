"""What is known of autograd's operations: how rows pass through the backward of each.

A rule plans one node for compact gradients. It names the layout of each input's gradient, lets the
node's saved tensors lose rows, and returns how the gradients are computed: by the node itself,
which computes with what is saved, unless the node has recorded sizes of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..accumulation import AccumulatingLinear
from ..embedding_rows import Embedded
from .rows import Layout, NotByRowsError, Rows
from .saved import Saved

Gradients = Sequence[torch.Tensor | None]
Sizes = tuple[int, ...]


class Plan(NamedTuple):
    """The backward of a node on compact gradients."""

    inputs: Sequence[Layout | None]
    """Of the gradients of its inputs; None: the gradient is whole."""
    run: Callable[[Gradients], Gradients]
    is_whole: bool = False
    """Whether it runs with all rows."""


class Operation(NamedTuple):
    """A node of the graph, with the sizes of its tensors in the forward."""

    node: torch.autograd.graph.Node
    outputs: Sequence[Sizes]
    inputs: Sequence[Sizes | None]
    """None: needs no gradient."""
    layouts: dict[int, Layout | None]
    """Of the gradients of its outputs, by number; an output without a gradient has none."""
    rows: Rows
    saved: Saved
    began: int
    """The number of the first operation of the layers."""

    @property
    def layout(self) -> Layout:
        """That of the first output, which alone has a gradient."""
        if self.layouts.keys() != {0} or self.layouts[0] is None:
            raise NotByRowsError("gradients of several outputs")
        return self.layouts[0]

    @property
    def output(self) -> Sizes:
        """The sizes of the first output."""
        return self.outputs[0]

    def input_layouts(self, layout: Layout) -> list[Layout | None]:
        """Returns the layouts of inputs that were broadcast to the output."""
        return [
            None if sizes is None else self.rows.summed(layout, self.output, sizes)
            for sizes in self.inputs
        ]

    def call(self, gradients: Gradients) -> Gradients:
        """Runs the node."""
        return call(self.node, gradients)


def call(node, gradients: Gradients) -> Gradients:
    """Runs the backward of a node."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        # Also where a function asked for None: that cannot be read, and zeros say the same.
        gradients = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
            for grad, meta in zip(gradients, node._input_metadata, strict=True)
        ]
        found = node.apply(*gradients)
        return by_edges(node, found if isinstance(found, tuple) else (found,))
    found = node(*gradients)
    return found if isinstance(found, tuple) else (found,)


def by_edges(node, of_arguments: Sequence) -> list:
    """Returns what belongs to the arguments of a :class:`torch.autograd.Function`, by the edges of
    its node: only tensors have one."""
    both = zip(of_arguments, node.needs_input_grad, strict=True)
    found = iter([each for each, is_needed in both if is_needed])
    return [None if target is None else next(found) for target, _ in node.next_functions]


def pointwise(op: Operation) -> Plan:
    """Element by element, operands broadcast; also along dimensions that do not count rows."""
    layout = op.layout
    inputs = op.input_layouts(layout)
    for name, tensor in op.saved.tensors(op.node):
        own = op.rows.aligned(layout, op.output, tensor.shape)
        if own is not None:
            op.saved.gather(op.node, name, own)
    return Plan(inputs, op.call)


def along(op: Operation) -> Plan:
    """Along one dimension that does not count rows: softmax."""
    _dimension(op, op.node._saved_dim, len(op.output))
    return pointwise(op)


def passed(op: Operation) -> Plan:
    """The gradient itself: expanded operands add theirs up."""
    return Plan(op.input_layouts(op.layout), lambda gradients: gradients)


def product(op: Operation) -> Plan:
    """A matrix product whose left operand has the rows: the sum over rows becomes shorter."""
    if op.layout != Layout(0):
        raise NotByRowsError("a product with rows on the right")
    is_sum = op.node.name() == "AddmmBackward0"
    left = "_saved_mat1" if is_sum else "_saved_self"
    if any(name == left for name, _ in op.saved.tensors(op.node)):
        op.saved.gather(op.node, left, Layout(0))
    if not is_sum:
        return Plan([Layout(0), None], op.call)
    added = None
    if op.inputs[0] is not None:
        added = op.rows.summed(op.layout, op.output, op.inputs[0])
    return Plan([added, Layout(0), None], op.call)


def linear(op: Operation) -> Plan:
    """A product with a weight, on a GPU or by torch's own linear operation."""
    name = "_saved_input"
    if any(each == name for each, _ in op.saved.tensors(op.node)):
        op.saved.gather(op.node, name, op.layout)
    return Plan([op.layout, None, None], op.call)


def view(op: Operation) -> Plan:
    layout = op.rows.viewed(op.layout, op.output, op.inputs[0])
    sizes = op.rows.sizes(op.inputs[0], layout)
    return Plan([layout], lambda gradients: [gradients[0].reshape(sizes)])


def transpose(op: Operation) -> Plan:
    node, dims = op.node, len(op.output)
    if node.name() == "TBackward0":
        pair = [0, 1] if dims == 2 else [0, 0]
    else:
        pair = [_wrapped(node._saved_dim0, dims), _wrapped(node._saved_dim1, dims)]
    to = list(range(dims))
    to[pair[0]], to[pair[1]] = pair[1], pair[0]
    return Plan([op.layout.moved(to)], lambda gradients: [gradients[0].transpose(*pair)])


def permute(op: Operation) -> Plan:
    dims = len(op.output)
    # Output dimension d is input dimension order[d].
    order = [_wrapped(d, dims) for d in op.node._saved_dims]
    inverse = [order.index(d) for d in range(dims)]
    return Plan([op.layout.moved(order)], lambda gradients: [gradients[0].permute(inverse)])


def unsqueeze(op: Operation) -> Plan:
    dim = _dimension(op, op.node._saved_dim, len(op.output))
    to = [d - (d > dim) for d in range(len(op.output))]
    return Plan([op.layout.moved(to)], lambda gradients: [gradients[0].squeeze(dim)])


def squeeze(op: Operation) -> Plan:
    dim = _wrapped(op.node._saved_dim, len(op.inputs[0]))
    if op.inputs[0][dim] != 1:
        return Plan([op.layout], lambda gradients: gradients)
    return Plan([op.layout.moved(_around(op, dim))], lambda grads: [grads[0].unsqueeze(dim)])


def select(op: Operation) -> Plan:
    sizes = op.inputs[0]
    dim = _wrapped(op.node._saved_dim, len(sizes))
    layout = op.layout.moved(_around(op, dim))
    if sizes[dim] == 1:
        return Plan([layout], lambda gradients: [gradients[0].unsqueeze(dim)])
    at, compact = op.node._saved_index % sizes[dim], op.rows.sizes(sizes, layout)

    def run(gradients):
        whole = gradients[0].new_zeros(compact)
        whole.select(dim, at).copy_(gradients[0])
        return [whole]

    return Plan([layout], run)


def cut(op: Operation) -> Plan:
    """A slice."""
    sizes, node = op.inputs[0], op.node
    if sizes == op.output:
        return Plan([op.layout], lambda gradients: gradients)
    dim = _dimension(op, node._saved_dim, len(sizes))
    start, end, step = slice(
        _signed(node._saved_start), _signed(node._saved_end), node._saved_step
    ).indices(sizes[dim])
    compact = op.rows.sizes(sizes, op.layout)

    def run(gradients):
        whole = gradients[0].new_zeros(compact)
        index = (slice(None),) * dim + (slice(start, end, step),)
        whole[index] = gradients[0]
        return [whole]

    return Plan([op.layout], run)


def joined(op: Operation) -> Plan:
    """Tensors one after another along a dimension."""
    if op.output in op.inputs:
        # The others are empty, as the cache of a forward without a past.
        whole = op.inputs.index(op.output)
        others = [None] * len(op.inputs)

        def placed(item):
            return [*others[:whole], item, *others[whole + 1 :]]

        return Plan(placed(op.layout), lambda gradients: placed(gradients[0]))
    dims = len(op.output)
    dim = _dimension(op, op.node._saved_dim, dims)
    if None in op.inputs or any(len(sizes) != dims for sizes in op.inputs):
        raise NotByRowsError("a part without a gradient")
    widths = [sizes[dim] for sizes in op.inputs]
    layouts = [op.layout] * len(widths)
    return Plan(layouts, lambda gradients: gradients[0].split(widths, dim))


def parts(op: Operation) -> Plan:
    """Parts of a tensor along a dimension."""
    sizes = op.inputs[0]
    dim = _wrapped(op.node._saved_dim, len(sizes))
    layout, *others = op.layouts.values()
    if layout is None or dim in layout or any(each != layout for each in others):
        raise NotByRowsError("parts that are rows")
    compact = [op.rows.sizes(each, layout) for each in op.outputs]

    def run(gradients):
        like = next(grad for grad in gradients if grad is not None)
        both = zip(gradients, compact, strict=True)
        found = [like.new_zeros(own) if grad is None else grad for grad, own in both]
        return [torch.cat(found, dim)]

    return Plan([layout], run)


def summed(op: Operation) -> Plan:
    """A sum or a mean over dimensions that do not count rows."""
    sizes, node = op.inputs[0], op.node
    dims = sorted(_wrapped(d, len(sizes)) for d in node._saved_dim or ())
    if not dims:
        raise NotByRowsError("a sum over everything")
    count = 1
    for d in dims:
        count *= sizes[d]
    keeps = node._saved_keepdim
    layout = op.layout
    if not keeps:
        left = [d for d in range(len(sizes)) if d not in dims]
        layout = layout.moved(left)
    if any(d in layout for d in dims):
        raise NotByRowsError("a sum over rows")
    compact = op.rows.sizes(sizes, layout)
    is_mean = node.name().startswith("Mean")

    def run(gradients):
        grad = gradients[0]
        for d in () if keeps else dims:
            grad = grad.unsqueeze(d)
        grad = grad.expand(compact)
        return [grad / count if is_mean else grad]

    return Plan([layout], run)


def scattered(op: Operation) -> Plan:
    """Runs the node with zeros in dropped rows, which costs it little."""
    layout, rows, sizes = op.layout, op.rows, op.output

    def run(gradients):
        return op.call([rows.scatter(gradients[0], layout, sizes)])

    return Plan([None] * len(op.inputs), run)


def of_rows(op: Operation) -> Plan:
    """A function that saved rows first and returns as many."""
    op.saved.gather_item(op.node, 0, op.layout)
    arguments = [op.layout, *[None] * (len(op.node.needs_input_grad) - 1)]
    return Plan(by_edges(op.node, arguments), op.call)


def embedding(op: Operation) -> Plan:
    """Rows of a table."""
    op.saved.gather(op.node, "_saved_indices", op.layout)
    return Plan([None], op.call)


def _wrapped(dim: int, dims: int) -> int:
    """Returns a dimension counted from the first. Nodes record negative ones as unsigned."""
    return _signed(dim) % max(dims, 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _dimension(op: Operation, dim: int, dims: int) -> int:
    """Returns a dimension that does not count rows."""
    dim = _wrapped(dim, dims)
    if dim in op.layout:
        raise NotByRowsError("an operation along rows")
    return dim


def _around(op: Operation, dim: int) -> list[int]:
    """Returns where the output's dimensions are in an input that has one more."""
    return [d + (d >= dim) for d in range(len(op.output))]


_POINTWISE = (
    *("Abs", "Add", "Addcdiv", "Addcmul", "Alias", "Clamp", "Clone", "Cos", "Div", "Erf", "Exp"),
    *("Expm1", "Gelu", "Hardswish", "Hardtanh", "LeakyRelu", "Lerp", "Log", "Log1P", "MaskedFill"),
    *("Maximum", "Minimum", "Mish", "Mul", "NativeDropout", "Neg", "Pow", "Reciprocal", "Relu"),
    *("Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "ToCopy"),
    *("Where", "FusedRmsNorm", "NativeLayerNorm"),
)
KNOWN: dict[str | type, Callable[[Operation], Plan]] = {
    **{f"{name}Backward{i}": pointwise for name in _POINTWISE for i in (0, 1, 2)},
    "SoftmaxBackward0": along,
    "LogSoftmaxBackward0": along,
    "ExpandBackward0": passed,
    "MmBackward0": product,
    "AddmmBackward0": product,
    "LinearBackward0": linear,
    "ViewBackward0": view,
    "UnsafeViewBackward0": view,
    "ReshapeAliasBackward0": view,
    "TransposeBackward0": transpose,
    "TBackward0": transpose,
    "PermuteBackward0": permute,
    "UnsqueezeBackward0": unsqueeze,
    "SqueezeBackward1": squeeze,
    "SelectBackward0": select,
    "SliceBackward0": cut,
    "CatBackward0": joined,
    "SplitBackward0": parts,
    "SplitWithSizesBackward0": parts,
    "SumBackward1": summed,
    "MeanBackward1": summed,
    "EmbeddingBackward0": embedding,
    Embedded: scattered,
    AccumulatingLinear: of_rows,
}
"""Rules by :func:`kind_of` nodes."""


def kind_of(node: torch.autograd.graph.Node) -> str | type:
    """Returns the name of a node of torch's own; of a function in Python its class, because two may
    have one name."""
    return getattr(type(node), "_forward_cls", None) or node.name()
