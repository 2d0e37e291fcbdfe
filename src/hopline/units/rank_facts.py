"""What a rank was given, as facts that all ranks compare before they train together.

    data       the checksums of a dataset folder, or sizes and some rows of arrays in memory
    seeds      splits, or the node ids of a loader
    settings   of the method and of training, and the random seed
    model      names, shapes and types of its weights, its settings and its code

The values of the weights are not compared: all ranks begin with those of rank 0. Things that change no result
(`NOT_COMPARED`) may differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hopline.contract import Method
from hopline.core.examples import Examples
from hopline.core.sampler import NodeIds
from hopline.data.dataset import Dataset
from hopline.data.fingerprint import ids_fact
from hopline.data.nodes import select_nodes
from hopline.distributed.agreement import Fact, check_same
from hopline.distributed.world import World
from hopline.nn.structure import structure_of
from hopline.nn.whole_module import unwrap
from hopline.util.config import to_dict

NOT_COMPARED = ("device", "show", "checkpoint_s", "method.workers", "method.look_ahead")
"""Settings that may differ between ranks. Of `checkpoint_s`, that of rank 0 counts."""


def check_ranks(
    world: World,
    call: str,
    data: Dataset,
    seeds: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    model: nn.Module | None,
) -> None:
    """Refuse ranks that were given different things. Collective, and free for a single process.

    It comes before all other collective calls: sizes of their messages depend on these things.

    call: What the ranks have called, such as "hl.Trainer". seeds: Node ids by name, such as "the split 'train'".
    settings: By name. A mapping inside has names with a dot, such as "method.batch_size". model: The user's own.

    Raises:
        ValueError: On every rank, if one was given something else than rank 0. The message says what.
    """
    if world.size == 1:
        return
    facts = {"the call": Fact(call), **settings_facts(settings), **data.facts()}
    facts |= {"task of the dataset": Fact(data.task), "num_classes": Fact(str(data.num_classes))}
    facts |= {name: ids_fact(ids) for name, ids in seeds.items()}
    check_same(world, facts | ({} if model is None else _model_facts(model)))


def check_loader_ranks(
    world: World | None,
    method: Method,
    data: Dataset,
    ids: NodeIds | Examples | str,
    *,
    seed: int,
    model: nn.Module | None,
    **settings: Any,
) -> None:
    """`check_ranks` for a loader of the user's own loop. The arguments are those of `method.loader`.

    ids: as `select_nodes` takes them. world: None for a single process. settings: further
    ones, by name.
    """
    if not isinstance(world, World) or world.size == 1:  # the loader refuses what is no World
        return
    name = type(method).__name__
    nodes = ids.nodes if isinstance(ids, Examples) else select_nodes(data, ids)
    seeds = {f"the split {ids!r}" if isinstance(ids, str) else "the seeds": nodes}
    settings |= {"method": settings_or_repr(method), "seed": seed}
    check_ranks(world, f"hl.{name}.loader", data, seeds, settings, None if model is None else unwrap(model))


def settings_or_repr(obj: Any) -> dict[str, Any]:
    """The settings of a method or of gradients.

    For a class of the user's own that is no dataclass: its `repr`.
    """
    try:
        return to_dict(obj)
    except (TypeError, ValueError):
        # Python's default `repr` contains an address, which differs in every process. A resumed run would
        # seem to be another run.
        has_default_repr = type(obj).__repr__ is object.__repr__
        return {"repr": f"{type(obj).__qualname__}()" if has_default_repr else repr(obj)}


def settings_facts(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Fact]:
    """A fact per setting, without those that may differ."""
    facts: dict[str, Fact] = {}
    for key, value in settings.items():
        name = prefix + key
        if name in NOT_COMPARED:
            continue
        if isinstance(value, Mapping):
            facts |= settings_facts(value, f"{name}.")
        elif name == "method.folder":  # a path may be another one on every host
            facts[name] = Fact("none" if value is None else "given")
        elif name == "seed":
            facts[name] = Fact(repr(value), advice="give every rank one seed, by which they divide the nodes")
        else:
            # Addresses of objects differ in every process.
            facts[name] = Fact(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))
    return facts


def _model_facts(model: nn.Module) -> dict[str, Fact]:
    """Shape and type of each parameter and buffer, and a fingerprint of the modules, their settings and code."""
    facts: dict[str, Fact] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_lazy = isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)
        shape = "not initialised" if is_lazy else str(list(tensor.shape))
        frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        facts[f"{name!r} of the model"] = Fact(f"{shape} {str(tensor.dtype).removeprefix('torch.')}{frozen}")
    return facts | {"the settings or the code of the model": Fact("", checksum=structure_of(model))}
