"""Models that hopline cannot take apart into layers, and the choice between the two kinds of models.

Every model that hopline runs is one of two classes, both called with a `Batch`:

    GNN      made of layers. Each layer runs on its own block, so it computes only the rows that the next one reads.
    Whole    any module with `forward(x, edge_index)`. It runs on the union of a batch's blocks, so every conv in it
             sees every sampled edge. That costs more, but needs to know nothing about the module.

`as_batch_model` turns a user's model into one of them, called `batch_model` in the code. `is_layered` decides which. A
model inside of a wrapper such as DDP is taken out of it. Two hooks raise an error with advice: one if a model
that was taken out of DDP is trained, the other if a user's own model is called with a `Batch`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from hopline.core.batch import Batch, Block
from hopline.core.row_handles import Readable, as_dtype, as_tensor
from hopline.nn.conv_adapter import EDGE_ARGUMENTS, edge_arguments, edge_arguments_of
from hopline.nn.gnn import GNN
from hopline.nn.layered import Layered
from hopline.nn.plain_call import adjs_of, call_module, takes_adjs
from hopline.nn.probe import without_caches
from hopline.nn.push_and_pull import degrees_of_graph, pulling
from hopline.nn.traced import Traced, check_edge_arguments, check_signature, required_arrays
from hopline.nn.traced_probe import find_program
from hopline.nn.traced_program import NotTraceable
from hopline.util.host import refuse_after_fork


class Whole(nn.Module):
    """Run any module with `forward(x, edge_index, ...)` on batches.

    Every layer of it sees every sampled edge.

    A call with a batch refuses convs with `cached=True`. On a whole graph (`on_block`) they run, but without
    their caches, so no graph is computed with the cache of another one.

    Args:
        module: A module whose forward takes x [num_nodes, num_features] and edge_index [2, num_edges]
            int64, which may be called adj_t. It may also take edge_weight, edge_attr or edge_type.

    Raises:
        ValueError: `forward` needs more than features and edges. Raised by a call: a conv has cached=True,
            or the output is not one tensor with a row per node.

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
        check_signature(module)

    def keeps_handle(self, table: Readable) -> bool:
        """Whether a batch should hold a handle to input rows of this table, and not the rows.

        Never: the module takes a tensor.
        """
        return False

    def check_blocks(self, num_features: int, edge: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a conv has cached=True.

        `whole_module_probe` looks for all else that is wrong. The arguments are for `GNN.check_blocks` alone.
        """
        self._refuse_caches()

    def _refuse_caches(self) -> None:
        """Raise ValueError if a conv has cached=True: it would use the edges of the first batch for all."""
        for name, part in self.module.named_modules():
            if getattr(part, "cached", False):
                where = f" ({name} of {type(self.module).__name__})" if name else ""
                raise ValueError(
                    f"{type(part).__name__}(cached=True) keeps the edges of the first batch for all others{where}: "
                    "build it with cached=False to train or predict in batches"
                )

    def forward(self, batch: Batch) -> Tensor:
        """Outputs for the batch's examples: [num_examples, ...]."""
        self._refuse_caches()
        block = batch.blocks[-1]
        if block.layer_hooks is None:
            rows = self._rows(batch)
        else:
            # A batch of `Historical`, whose blocks are all the same: the halo's rows come from `push_and_pull`.
            with pulling(self.module, block.layer_hooks, block):
                union = replace(batch, blocks=(block,)).union()
                rows = self.on_block(as_tensor(batch.input_rows), union)[: block.num_dst]
        return rows if batch.output_idx is None else rows[batch.output_idx]

    def _rows(self, batch: Batch) -> Tensor:
        """[num_seeds, ...]: outputs for the batch's seeds."""
        x = as_tensor(batch.input_rows)
        if takes_adjs(self.module):
            return self.module(as_dtype(x, next(self.module.parameters(), x).dtype), adjs_of(batch.blocks))
        return self.on_block(x, batch.union())[: batch.num_seeds]

    def on_block(self, x: Tensor, block: Block) -> Tensor:
        """[num_src, ...]: outputs for all nodes of a square block, whose sources are its destinations.

        x: [num_src, num_features] rows of the block's nodes.
        """
        name = type(self.module).__name__
        check_edge_arguments(self.module, block.edge)
        dtype = next(self.module.parameters(), x).dtype
        arguments = edge_arguments(self.module, block.edge, dtype)
        with without_caches(self.module), degrees_of_graph(self.module, block.edge_index, arguments):
            out = call_module(self.module, as_dtype(x, dtype), block.edge_index, arguments)
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


def depth_of(model: nn.Module) -> int:
    """The number of hops that a model reaches: its layers, or the PyG convs of a module without layers."""
    if isinstance(model, Layered):
        return model.num_layers
    module = model.module if isinstance(model, Whole) else model
    num_convs = sum(isinstance(part, MessagePassing) for part in module.modules())
    if not num_convs:
        raise ValueError(
            f"the depth of {type(module).__name__} cannot be told, since no PyG conv is a part of it: give one fan-out "
            "per hop that it reaches, such as fanouts=(15, 10)"
        )
    return num_convs


def edge_arrays_read(model: Layered | Whole, edge: Mapping[str, Tensor]) -> list[str]:
    """Names of the graph's edge arrays that a conv of the model takes. edge: all arrays, of which no row is read.

    A subclass counts as reading all of them, since its own layers may take any from a block.
    """
    if isinstance(model, Layered):
        return model.edge_arrays_read(edge)
    if type(model) is not Whole:
        return list(edge)
    names = {EDGE_ARGUMENTS[argument] for argument in edge_arguments_of(model.module, edge)}
    return [name for name in edge if name in names]


def as_batch_model(model: nn.Module) -> Layered | Whole:
    """Return a model that can be called with a batch, and shares its parameters with the given one.

    A GNN is returned as it is. A PyG model becomes a GNN, which runs layer by layer. Any other module with
    `forward(x, edge_index)` becomes a Whole. So does a subclass of a PyG model with a `forward` of its own,
    since its layers do not tell what it computes. A model inside of DDP or Fabric is taken out of its
    wrapper: to train over ranks, wrap what this returns.

    Args:
        model: A `GNN`, a PyG model, or any module with forward(x, edge_index).

    Returns:
        A `GNN`, or a `Whole` for a module that is not made of layers.

    Raises:
        ValueError: A GNN overrides `forward` or has hooks, or a module's `forward` needs more than features
            and edges.

    Example:
        >>> from torch_geometric.nn import GraphSAGE
        >>> model = GraphSAGE(2, 8, num_layers=2, out_channels=3)
        >>> batch_model = hl.nn.as_batch_model(model)
        >>> type(batch_model).__name__, next(batch_model.parameters()) is next(model.parameters())
        ('GNN', True)
    """
    refuse_after_fork(torch.get_num_threads())  # every model comes by here, before it is tried out
    inner = unwrap(model)
    if inner is not model:
        batch_model = as_batch_model(inner)
        if batch_model is not inner and num_wrapped_ranks(model) > 1:
            # A new object, which DDP does not know: training it would not sum gradients over ranks.
            batch_model.register_forward_pre_hook(_refuse_gradients)
        return batch_model
    has_layers = is_layered(model)  # also refuses a GNN whose layers do not tell what it computes
    if isinstance(model, Layered | Whole):
        return model
    if not has_layers:
        batch_model: Layered | Whole = Whole(model)
    elif _is_list_of_layers(model):
        batch_model = GNN.from_pyg(model)  # type: ignore[arg-type]
    else:
        batch_model = Traced(model)
    batch_model.training = model.training  # of the new object alone: its layers are the model's own
    return batch_model


def is_layered(model: nn.Module) -> bool:
    """Whether a model is run layer by layer: a GNN, a PyG model, or a module whose layers can be found.

    model: without a wrapper such as DDP, see `unwrap`.

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
    if isinstance(model, Layered | Whole):
        return isinstance(model, Layered)
    return _is_list_of_layers(model) or reason_against_layers(model) is None


def _is_list_of_layers(model: nn.Module) -> bool:
    """Whether a model is one of PyG's whose `forward` only runs its layers."""
    if not isinstance(model, BasicGNN):
        return False
    overrides_forward = type(model).forward is not BasicGNN.forward or "forward" in vars(model)
    # Run layer by layer, neither the model itself nor its dropout module is called, so their hooks would
    # not run.
    return not (overrides_forward or has_hooks(model) or has_hooks(model.dropout))


def reason_against_layers(module: nn.Module) -> str | None:
    """Why the layers of a module's `forward` cannot be found: a clause with the module as "it". None if they can."""
    try:
        check_signature(module)
        for training in (False, True):
            find_program(module, required_arrays(module), training)
    except (NotTraceable, ValueError) as error:
        return str(error)
    return None


def why_whole(model: Whole) -> str:
    """(why its layers cannot be found), for a message; "" if they could be, but the user gave a `Whole`."""
    reason = reason_against_layers(model.module)
    return "" if reason is None else f" ({reason})"


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, other than those that hopline itself has registered."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    forward_hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(hook not in (_refuse_gradients, _refuse_batch) for hook in forward_hooks)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, without the wrappers of DDP, Lightning Fabric's `setup` and `torch.compile`.

    Raises a ValueError for what is no module.
    """
    if not isinstance(model, nn.Module):
        example = f"{model.__name__}(...)" if isinstance(model, type) else "hl.nn.GNN([SAGEConv(...), ...])"
        raise ValueError(f"the model must be a torch.nn.Module such as {example}, not {model!r:.80}")
    while True:
        if isinstance(model, (DistributedDataParallel, *_fabric_wrappers())):
            model = model.module  # type: ignore[assignment]
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _fabric_wrappers() -> list[type[nn.Module]]:
    """Classes of the wrapper that Lightning Fabric's `setup` returns; none if Fabric is not imported.

    Looked up among imported modules, so that hopline does not import Fabric. While Fabric is not imported, it
    cannot have wrapped a model.
    """
    modules = (sys.modules.get(name) for name in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"))
    return [module._FabricModule for module in modules if module is not None]


def num_wrapped_ranks(model: nn.Module) -> int:
    """The number of ranks on which DDP trains a model, compiled or not; 1 if it is not wrapped by DDP."""
    while hasattr(model, "_orig_mod"):  # the wrapper of `torch.compile`
        model = model._orig_mod  # type: ignore[assignment]
    if not isinstance(model, DistributedDataParallel):
        return 1
    return torch.distributed.get_world_size(model.process_group)


def _refuse_gradients(batch_model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """A pre-forward hook: raise RuntimeError if a model that was taken out of DDP is trained.

    Its gradients would not be summed over ranks, so every rank would train by itself.
    """
    if batch_model.training and torch.is_grad_enabled():
        raise RuntimeError(
            "this model was taken out of DistributedDataParallel, so its gradients are not summed over ranks: train "
            "DistributedDataParallel(hl.nn.as_batch_model(model)) instead"
        )


def refuse_batches(model: nn.Module) -> None:
    """Make a user's model raise an error with advice if it is called with a batch, which it cannot read.

    model: the model that a loader was made for. A GNN or Whole reads batches, and is left alone.
    """
    if not isinstance(model, Layered | Whole) and _refuse_batch not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_batch)


def _refuse_batch(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """A pre-forward hook: raise TypeError if the first argument is a `Batch`."""
    if arguments and isinstance(arguments[0], Batch):
        name = type(model).__name__
        raise TypeError(
            f"{name} takes (x, edge_index), and a hopline Batch has the edges of each layer: call "
            f"hl.nn.as_batch_model(model)(batch), or take PyG's batches from hl.NeighborLoader"
        )
