"""Models that are not made of layers: run on all sampled edges at once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from hopline.core.batch import Batch, Block
from hopline.core.row_handles import Readable, as_dtype, as_tensor
from hopline.nn.conv_adapter import EDGE_ARGUMENTS, edge_arguments
from hopline.nn.gnn import GNN
from hopline.nn.probe import without_caches


class Whole(nn.Module):
    """Any module with `forward(x, edge_index, ...)` on a batch, untrimmed: every layer sees every sampled edge.

    What convs of the module cached of a graph (`cached=True`) is set aside while it runs here and put back afterwards,
    so that no graph is computed with the cache of another one.

    Args:
        module: Whose forward takes x [num_nodes, num_features] and edge_index [2, num_edges] int64, and perhaps
            edge_weight or edge_attr.

    Raises:
        ValueError: `forward` must be given more than features and edges. When it is called: a conv has cached=True, or
            the output has not one row per node.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv = SAGEConv(2, 3)
        ...
        ...     def forward(self, x, edge_index):
        ...         return self.conv(x, edge_index).relu()
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> (batch,) = hl.Sampled(fanouts=(2,)).loader(data, torch.tensor([0, 2]))
        >>> hl.nn.Whole(Net())(batch).shape
        torch.Size([2, 3])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.required_edge_arguments = _required_edge_arguments(module)

    def keeps_handle(self, table: Readable) -> bool:
        return False

    def check_blocks(self, num_features: int, edge: Mapping[str, Tensor]) -> None:
        """Refuse what cannot mean the same on a batch; `whole_probe` tries the rest."""
        self._refuse_caches()

    def _refuse_caches(self) -> None:
        """Refuse convs that would compute every batch with the edges of the first one."""
        for name, part in self.module.named_modules():
            if getattr(part, "cached", False):
                where = f"{name} of {type(self.module).__name__}" if name else "it"
                raise ValueError(
                    f"{type(part).__name__}(cached=True) keeps the edges of the first batch for all others ({where}): "
                    "build it with cached=False to train or predict in batches"
                )

    def forward(self, batch: Batch) -> Tensor:
        """Outputs for the batch's seeds: [num_seeds, ...]."""
        self._refuse_caches()
        return self.on_block(as_tensor(batch.input_rows), batch.union())[: batch.num_seeds]

    def on_block(self, x: Tensor, block: Block) -> Tensor:
        """Outputs for all nodes of a square block."""
        name = type(self.module).__name__
        for argument in self.required_edge_arguments:
            if EDGE_ARGUMENTS[argument] not in block.edge:
                raise ValueError(
                    f"{name}.forward needs {argument}, and the graph has no edge array {EDGE_ARGUMENTS[argument]!r}: "
                    f"give the dataset one, or give the argument a default ({argument}=None)"
                )
        dtype = next(self.module.parameters(), x).dtype
        arguments = edge_arguments(self.module, block.edge, dtype)
        with without_caches(self.module):
            out = self.module(as_dtype(x, dtype), block.edge_index, **arguments)
        if not isinstance(out, Tensor):
            raise ValueError(
                f"{name}.forward returned a {type(out).__name__}: return one tensor with a row per node, if need be "
                f"from a module around it whose forward(x, edge_index) picks it out of what {name} returns"
            )
        if out.dim() == 0 or out.size(0) != x.size(0):
            raise ValueError(
                f"{name}.forward returned {list(out.shape)} for {x.size(0)} nodes: return a row per node, since a "
                "loss is over nodes"
            )
        return out


def _required_edge_arguments(module: nn.Module) -> list[str]:
    """Edge arguments without a default; a module that must be given more than x and edges is refused."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    names, class_name = [p.name for p in parameters], type(module).__name__
    if names[1:2] != ["edge_index"]:
        raise ValueError(
            f"{class_name}.forward takes ({', '.join(names)}): write forward(x, edge_index, ...), "
            "or use hl.nn.GNN([...convs...])"
        )
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters[2:] if p.default is p.empty and p.kind not in optional]
    unknown = [name for name in required if name not in EDGE_ARGUMENTS]
    if unknown:
        raise ValueError(
            f"{class_name}.forward needs {', '.join(unknown)} besides x and edge_index, and is only given "
            f"{', '.join(EDGE_ARGUMENTS)} where the graph has them: give {unknown[0]} a default, if need be in a "
            "module around it with forward(x, edge_index)"
        )
    return required


def depth_of(model: nn.Module) -> int:
    """How many hops a model reaches: its layers, or the convs of a module that is not made of layers."""
    if isinstance(model, GNN):
        return model.num_layers
    module = model.module if isinstance(model, Whole) else model
    num_convs = sum(isinstance(part, MessagePassing) for part in module.modules())
    if not num_convs:
        raise ValueError(
            f"the depth of {type(module).__name__} cannot be told, since no PyG conv is a part of it: give one fan-out "
            "per hop that it reaches, such as fanouts=(15, 10)"
        )
    return num_convs


def as_walkable(model: nn.Module) -> GNN | Whole:
    """Return a model that is called with a batch, as the library runs it, with the parameters of the one that is given.

    A GNN is one already, a PyG model is run layer by layer, and any other module with `forward(x, edge_index)` as a
    whole. So is a subclass of a PyG model with a `forward` of its own, since its layers do not tell what it does.
    A model inside of DDP or Fabric is taken out of its wrapper: to train over ranks, wrap what this returns.

    Args:
        model: A `GNN`, a PyG model, or any module with forward(x, edge_index).

    Returns:
        A `GNN`, or a `Whole` for what is not made of layers.

    Raises:
        ValueError: A GNN overrides `forward` or has hooks, or a module's `forward` needs more than features and edges.

    Example:
        >>> from torch_geometric.nn import GraphSAGE
        >>> model = GraphSAGE(2, 8, num_layers=2, out_channels=3)
        >>> walk = hl.nn.as_walkable(model)
        >>> type(walk).__name__, next(walk.parameters()) is next(model.parameters())
        ('GNN', True)
    """
    inner = unwrap(model)
    if inner is not model:
        walk = as_walkable(inner)
        if walk is not inner and num_wrapped_ranks(model) > 1:
            walk.register_forward_pre_hook(_refuse_gradients)
        return walk
    by_layers = is_layered(model)
    if isinstance(model, GNN | Whole):
        return model
    walk = GNN.from_pyg(model) if by_layers else Whole(model)  # type: ignore[arg-type]
    walk.training = model.training
    return walk


def is_layered(model: nn.Module) -> bool:
    """Whether a model out of its wrapper is run layer by layer: a GNN, or a PyG model that is no more than its layers.

    Raises:
        ValueError: A GNN overrides `forward` or has hooks.
    """
    is_patched = "forward" in vars(model)
    if isinstance(model, GNN) and (type(model).forward is not GNN.forward or is_patched):
        raise ValueError(
            f"{type(model).__name__} overrides forward, which exact inference does not go through: override encode, "
            "layer or decode, or write a torch.nn.Module with forward(x, edge_index)"
        )
    if isinstance(model, GNN) and has_hooks(model):
        raise ValueError(
            f"{type(model).__name__} has hooks, which exact inference does not go through: put them on its convs, "
            "encoder or head"
        )
    if not isinstance(model, BasicGNN):
        return isinstance(model, GNN)
    own_forward = type(model).forward is not BasicGNN.forward or is_patched
    # Layer by layer neither the model itself is called nor its dropout.
    return not (own_forward or has_hooks(model) or has_hooks(model.dropout))


def has_hooks(module: nn.Module) -> bool:
    """Whether a user listens to a module, or changes what goes in or comes out."""
    forward = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    others = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return any(hook not in (_refuse_gradients, _refuse_batch) for hook in forward) or bool(others)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside of DDP, of what Lightning Fabric's `setup` returns, or of `torch.compile`."""
    while True:
        if isinstance(model, (DistributedDataParallel, *_fabric_wrappers())):
            model = model.module  # type: ignore[assignment]
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _fabric_wrappers() -> list[type[nn.Module]]:
    """The class of what Lightning Fabric's `setup` returns. No model is of it before Fabric is imported."""
    modules = (sys.modules.get(name) for name in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"))
    return [module._FabricModule for module in modules if module is not None]


def num_wrapped_ranks(model: nn.Module) -> int:
    """The ranks that DDP trains a model on; 1 for a model that it does not wrap."""
    return torch.distributed.get_world_size(model.process_group) if isinstance(model, DistributedDataParallel) else 1


def _refuse_gradients(walk: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Ranks would each train by themselves: what was taken out of DDP does not sum gradients."""
    if walk.training and torch.is_grad_enabled():
        raise RuntimeError(
            "this model was taken out of DistributedDataParallel, so its gradients are not summed over ranks: train "
            "DistributedDataParallel(hl.nn.as_walkable(model)) instead"
        )


def tell_calls(model: nn.Module) -> None:
    """Make a model that a loader is for say what to write when it is called with a batch, which it cannot read."""
    if not isinstance(model, GNN | Whole) and _refuse_batch not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_batch)


def _refuse_batch(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    if arguments and isinstance(arguments[0], Batch):
        name = type(model).__name__
        raise TypeError(
            f"{name} takes (x, edge_index), and a hopline Batch has the edges of each layer: call "
            f"hl.nn.as_walkable(model)(batch), or take PyG's batches from hl.NeighborLoader"
        )
