"""Models that are not made of layers: run on all sampled edges at once."""

from __future__ import annotations

import inspect

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from hopline.batch import Batch, Block, Readable, as_tensor
from hopline.nn.convs import edge_arguments
from hopline.nn.gnn import GNN
from hopline.nn.rows import typed


class Whole(nn.Module):
    """Any module with `forward(x, edge_index, ...)` on a batch, untrimmed: every layer sees every sampled edge."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        names = list(inspect.signature(module.forward).parameters)
        if names[1:2] != ["edge_index"]:
            raise ValueError(
                f"{type(module).__name__}.forward takes ({', '.join(names)}): write forward(x, edge_index, ...), "
                "or use hl.nn.GNN([...convs...])"
            )
        self.module = module

    def keeps_handle(self, table: Readable) -> bool:
        return False

    def check_blocks(self) -> None:
        """Nothing to refuse: the module sees what PyG's own loaders would give it."""

    def forward(self, batch: Batch) -> Tensor:
        """Outputs for the batch's seeds: [num_seeds, ...]."""
        return self.on_block(as_tensor(batch.input_rows), batch.union())[: batch.num_seeds]

    def on_block(self, x: Tensor, block: Block) -> Tensor:
        """Outputs for all nodes of a square block."""
        dtype = next(self.module.parameters(), x).dtype
        return self.module(typed(x, dtype), block.edge_index, **edge_arguments(self.module, block.edge, dtype))


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
    """The model as the library runs it: a GNN as it is, a PyG model as layers, any other module as a whole.

    A subclass of a PyG model with a `forward` of its own is run as a whole, since its layers do not tell what it does.
    """
    if isinstance(model, GNN) and type(model).forward is not GNN.forward:
        raise ValueError(
            f"{type(model).__name__} overrides forward, which exact inference does not go through: override encode, "
            "layer or decode, or write a torch.nn.Module with forward(x, edge_index)"
        )
    if isinstance(model, GNN | Whole):
        return model
    own_forward = getattr(type(model), "forward", None) is not BasicGNN.forward
    hooked = bool(model._forward_hooks or model._forward_pre_hooks)
    plain = not own_forward and not hooked
    walk = GNN.from_pyg(model) if isinstance(model, BasicGNN) and plain else Whole(model)
    walk.training = model.training
    return walk
