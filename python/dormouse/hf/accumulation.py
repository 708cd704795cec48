"""Products and embeddings that add to the gradient of a weight in place.

Autograd computes a gradient as large as the weight, and then adds it to ``.grad``: for each
microbatch of a step five passes over the memory of the weight. A matrix product that adds to
``.grad`` takes two, and an embedding needs the rows of its tokens alone. Below FP32 a product also
rounds once instead of twice.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from ..activations.layers import is_compiled_by_itself
from . import substitutes

# Where torch defines the forwards that are replaced.
_FILES = {
    torch.nn.Linear: inspect.getfile(torch.nn.Identity),
    torch.nn.Embedding: inspect.getfile(torch.nn.EmbeddingBag),
}


class Accumulation:
    """Whether the backward that runs may add to ``.grad``.

    A loss function may run a backward of its own, ``torch.autograd.grad`` by a weight for example,
    which must not. So a step opens it around its own backwards (:meth:`opened`). Inside them other
    backwards may run, of a layer that is computed again or of a function with a graph of its own:
    only those that end at the weight add.
    """

    def __init__(self, device: torch.device, *, is_private: bool = False):
        """``is_private``: nothing but the step has the graph."""
        self._device, self._is_private, self._is_open = device, is_private, False
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Context of a backward of the step's own."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def adds(self, node: torch.autograd.graph.Node) -> bool:
        """Returns whether the backward that runs adds what reaches ``node``, the end of a graph at
        a weight, to its ``.grad``."""
        if self._is_private:
            return True
        if not self._is_open:
            return False
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError:
            # It returns what reaches it.
            return False

    def takes(self, rows: torch.Tensor, weight: torch.Tensor) -> bool:
        """Returns whether a product that runs now may add to the gradient of ``weight``.

        Transforms of ``torch.func`` and forward-mode differentiation take no function of ours. On a
        GPU the backward of a product runs on the stream of its forward, and autograd makes the
        addition wait for it. Here nothing waits, so all of them run on one stream.
        """
        if not torch.is_grad_enabled() or not weight.requires_grad or not _is_plain(weight):
            return False
        if type(rows) is not torch.Tensor or rows.dim() < 2 or rows.is_nested:
            return False
        if torch.is_autocast_enabled(weight.device.type) or _is_transformed():
            return False
        if self._stream is None:
            return weight.device.type == self._device.type
        is_there = weight.device == self._stream.device
        return is_there and torch.cuda.current_stream(weight.device) == self._stream


def modules_of(model: torch.nn.Module) -> list[torch.nn.Linear | torch.nn.Embedding]:
    """Returns the linear and embedding modules whose forward is torch's own; not those in compiled
    modules, nor embeddings on a GPU, which would wait there for the number of different tokens."""
    found = []
    modules = [model]
    while modules:
        module = modules.pop()
        if is_compiled_by_itself(module):
            # A changed forward below it would compile it again.
            continue
        is_known = type(module) is torch.nn.Linear or _is_plain_embedding(module)
        if is_known and _is_torchs(module):
            found.append(module)
        modules += module.children()
    return list(dict.fromkeys(found))


def _is_plain_embedding(module: torch.nn.Module) -> bool:
    """Returns whether the gradient of a row depends on its own token alone."""
    if type(module) is not torch.nn.Embedding or module.weight.device.type != "cpu":
        return False
    return has_rows_apart(module) and not module.sparse


def has_rows_apart(embedding: torch.nn.Embedding) -> bool:
    """Returns whether no option of an embedding lets a row, or its gradient, depend on others."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq


def _is_torchs(module: torch.nn.Linear | torch.nn.Embedding) -> bool:
    """Returns whether torch's own forward runs, and no hook sees the gradients of its operation or
    those that reach its weight."""
    if "forward" in vars(module) or not _is_class_torchs(type(module)):
        return False
    if module._backward_hooks and not module._is_full_backward_hook:
        return False
    return not (module.weight.requires_grad and has_hooks_at_end(module.weight))


def _is_class_torchs(kind: type[torch.nn.Module]) -> bool:
    """Returns whether ``kind.forward`` is defined in torch's own file. A replacement is defined
    elsewhere."""
    code = getattr(kind.forward, "__code__", None)
    return code is not None and code.co_filename == _FILES[kind]


def has_hooks_at_end(weight: torch.nn.Parameter) -> bool:
    """Returns whether the node that adds to a weight's gradient has hooks of Python code: those of
    DistributedDataParallel are not. A parameter does not say; but hooks of a node are in one table,
    which the handle of another hook has."""
    node = get_gradient_edge(weight).node
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *gradients: None)
        count = len(handle.hooks_dict_ref())
        handle.remove()
        if count > 1:
            return True
    return False


def accumulating(
    modules: Sequence[torch.nn.Linear | torch.nn.Embedding], accumulation: Accumulation
) -> substitutes.ForwardSubstitutes:
    """Returns forwards of these modules whose backward adds the gradients of their weights to
    ``.grad`` in place, where ``accumulation`` takes them. Code that torch compiles has the modules'
    own."""
    of_kind = {torch.nn.Linear: _forward_of_linear, torch.nn.Embedding: _forward_of_embedding}
    functions = {each: of_kind[type(each)](each, accumulation) for each in modules}
    return substitutes.ForwardSubstitutes(functions, compiles_own=True)


# Arguments are named as torch's: a model may pass them by name.
def _forward_of_linear(linear: torch.nn.Linear, accumulation: Accumulation):
    def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        if accumulation.takes(input, linear.weight):
            return AccumulatingLinear.apply(input, linear.weight, linear.bias, accumulation)
        return torch.nn.functional.linear(input, linear.weight, linear.bias)

    return forward


def _forward_of_embedding(embedding: torch.nn.Embedding, accumulation: Accumulation):
    def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        own = embedding.weight, embedding.padding_idx
        if accumulation.takes(input, embedding.weight):
            return AccumulatingEmbedding.apply(input, *own, accumulation)
        return torch.nn.functional.embedding(input, *own)

    return forward


class AccumulatingLinear(torch.autograd.Function):
    """``torch.nn.functional.linear`` with a leaf as weight."""

    @staticmethod
    def forward(ctx, rows, weight, bias, accumulation: Accumulation):
        ctx.save_for_backward(rows, weight)
        # What is saved may come back as another tensor, without the leaf's gradient.
        ctx.leaf, ctx.accumulation = weight, accumulation
        out = torch.nn.functional.linear(rows, weight, bias)
        # torch 2.11 returns a view of the product of a biased layer, and autograd refuses in-place
        # operations on a view that a custom function returned.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        of_rows = grad @ weight if ctx.needs_input_grad[0] else None
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        grad, rows = grad.flatten(0, -2), rows.flatten(0, -2)
        if not (ctx.accumulation.adds(ctx.next_functions[1][0]) and _is_writable(ctx.leaf)):
            return of_rows, grad.T @ rows, of_bias, None
        ctx.leaf.grad.addmm_(grad.T, rows)
        return of_rows, None, of_bias, None


class AccumulatingEmbedding(torch.autograd.Function):
    """``torch.nn.functional.embedding`` with a leaf as weight."""

    @staticmethod
    def forward(ctx, tokens, weight, padding_idx: int | None, accumulation: Accumulation):
        ctx.save_for_backward(tokens)
        ctx.leaf, ctx.padding_idx, ctx.accumulation = weight, padding_idx, accumulation
        return torch.nn.functional.embedding(tokens, weight, padding_idx)

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        if ctx.accumulation.adds(ctx.next_functions[1][0]) and _is_writable(ctx.leaf):
            add_embedded(ctx.leaf.grad, tokens, grad, ctx.padding_idx)
            return None, None, None, None
        return None, _dense(grad, tokens, len(ctx.leaf), ctx.padding_idx), None, None


def add_embedded(
    sums: torch.Tensor, tokens: torch.Tensor, gradients: torch.Tensor, padding_idx: int | None
) -> None:
    """Adds the gradients of embedded tokens, ``[..., hidden_size]``, to those of the embedding. Rows
    of a token are added up first, as torch does it: in a fixed order, and rounded once."""
    rows, inverse = tokens.unique(return_inverse=True)
    own = _dense(gradients, inverse, len(rows), None)
    if padding_idx is not None:
        own[rows == padding_idx] = 0
    sums.index_add_(0, rows, own.to(sums.dtype))


def _dense(
    gradients: torch.Tensor, tokens: torch.Tensor, rows: int, padding_idx: int | None
) -> torch.Tensor:
    padding = -1 if padding_idx is None else padding_idx
    return torch.ops.aten.embedding_dense_backward(gradients, tokens, rows, padding, False)


def _is_plain(weight: torch.Tensor) -> bool:
    """Returns whether a weight is an ordinary leaf. It has no hooks of its own
    (:func:`.support.check_hooks`)."""
    is_leaf = type(weight) is torch.nn.Parameter and weight.is_leaf
    return is_leaf and weight.is_floating_point()


def _is_transformed() -> bool:
    """Returns whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _is_writable(weight: torch.nn.Parameter) -> bool:
    """Returns whether there is a gradient of a weight that a product can write to."""
    grad = weight.grad
    # The backward of a gradient with a graph is recorded.
    if torch.is_grad_enabled() or not weight.requires_grad:
        return False
    if type(grad) is not torch.Tensor or grad.requires_grad or grad.layout is not torch.strided:
        return False
    return grad.dtype is weight.dtype and grad.is_contiguous()
