"""The runs of GNNAutoScale (GAS), from its tables of hyper-parameters for small and for large graphs.

`hopline train gas-MODEL-DATASET` names a row. How a row becomes settings:

- GAS evaluates after every epoch, which fills its history tables. Here `refresh_every=1` fills them by an
  exact pass before every epoch.
- Some runs of GAS end an epoch early. They have `max_batches`.

Two things differ from GAS. PNA is PyG's conv, which aggregates messages of source and destination, where
GAS has a lighter one. In `pna-jk`, dropout is applied before the rows of the layers are concatenated, not
after.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from hopline.methods.historical.settings import Historical
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import RunConfig
from hopline.training.settings import Schedule
from hopline.util.config import nearest

PREFIX = "gas-"
DATA: dict[str, dict[str, Any]] = {
    "cora": {"data": "cora", "features": "normalized"},
    "citeseer": {"data": "citeseer", "features": "normalized"},
    "pubmed": {"data": "pubmed", "features": "normalized"},
    "reddit": {"data": "reddit2", "features": "standardized"},
    "yelp": {"data": "yelp", "features": "standardized"},
    "arxiv": {"data": "ogbn-arxiv", "symmetrize": True},
    "products": {"data": "ogbn-products"},
}
"""Settings of a run by its dataset. A name that is not listed is the dataset of that name, unchanged."""
SPECS: dict[str, dict[str, Any]] = {
    "gat": {"act": "elu"},
    "pna-jk": {"name": "pna", "jk": "cat", "linear": True},
}
"""Settings of `ModelSpec` that all runs of a model share. A model that is not listed has its name alone."""
CONVS: dict[str, dict[str, Any]] = {
    "pna": {"aggregators": ["mean"], "scalers": ["identity", "amplification"]},
    "pna-jk": {"scalers": ["identity", "amplification"]},
}
"""Keyword arguments of PyG's conv that all runs of a model share."""
MODEL_KEYS = {field.name for field in fields(ModelSpec)}
METHOD_KEYS = {field.name for field in fields(Historical)}
RUN_KEYS = {field.name for field in fields(RunConfig)}


@dataclass(frozen=True)
class Row:
    """One run: a row of GAS's tables."""

    model: str
    """The model in the name of the run: a key of `SPECS`, or a name of `ModelSpec`."""
    data: str
    """The dataset in the name of the run: a key of `DATA`, or a dataset's name."""
    layers: int
    hidden: int
    dropout: float
    lr: float
    decay: tuple[float, float | None]
    """(`weight_decay`, `weight_decay_rest`) of the run."""
    parts: tuple[int, int]
    """(`num_parts`, `parts_per_batch`) of the method."""
    clip: float | None
    """`clip_norm` of the run."""
    epochs: int
    more: dict[str, Any]
    """Other settings by name, of the model, the method or the run. Any other name is a keyword of PyG's
    conv."""

    @property
    def name(self) -> str:
        """The name that users type."""
        return f"{PREFIX}{self.model}-{self.data}"

    def config(self) -> RunConfig:
        """The settings of the run."""
        spec = {"name": self.model, "layers": self.layers, "hidden": self.hidden, "dropout": self.dropout}
        spec |= SPECS.get(self.model, {})
        spec |= {key: value for key, value in self.more.items() if key in MODEL_KEYS}
        conv = dict(CONVS.get(self.model, {}))
        conv |= {key: value for key, value in self.more.items() if key not in MODEL_KEYS | METHOD_KEYS | RUN_KEYS}
        if self.model == "gat":  # attention weights have the dropout of the rows
            conv["dropout"] = self.dropout

        num_parts, parts_per_batch = self.parts
        method = Historical(
            num_parts=num_parts,
            parts_per_batch=parts_per_batch,
            refresh_every=1,
            **{key: value for key, value in self.more.items() if key in METHOD_KEYS},
        )
        weight_decay, weight_decay_rest = self.decay
        return RunConfig(
            **DATA.get(self.data, {"data": self.data}),
            **{key: value for key, value in self.more.items() if key in RUN_KEYS},
            model=ModelSpec(**spec, conv=conv),
            method=method,
            epochs=self.epochs,
            lr=self.lr,
            weight_decay=weight_decay,
            weight_decay_rest=weight_decay_rest,
            clip_norm=self.clip,
        )


def _small(*columns: Any, **more: Any) -> Row:
    """A row of the table for small graphs, where input features have the dropout of the hidden layers."""
    row = Row(*columns, more=more)
    return replace(row, more=more | {"input_dropout": row.dropout})


def _large(model: str, data: str, layers: int, hidden: int, dropout: float, lr: float, *rest: Any, **more: Any) -> Row:
    """A row of the table for large graphs, without weight decay.

    GCNII has separate weights for the propagated rows and the initial ones, unless `more` says otherwise.
    """
    if model == "gcnii":
        more.setdefault("shared_weights", False)
    no_decay = (0.0, None)
    return Row(model, data, layers, hidden, dropout, lr, no_decay, *rest, more=more)


# fmt: off
SMALL = (  # layers, hidden, dropout, lr, (decay, decay of the rest), (parts, parts per batch), clip, epochs
    _small("gcn", "cora", 2, 16, 0.5, 0.01, (5e-4, 0.0), (40, 10), 1.0, 200),
    _small("gcn", "citeseer", 2, 16, 0.5, 0.01, (5e-4, 0.0), (24, 8), None, 200),
    _small("gcn", "pubmed", 2, 16, 0.5, 0.01, (5e-4, 0.0), (8, 4), 1.0, 200),
    _small("gcn", "coauthor-cs", 2, 64, 0.5, 0.01, (1e-3, 0.0), (2, 1), 1.0, 200),
    _small("gcn", "coauthor-physics", 2, 64, 0.5, 0.01, (1e-3, 0.0), (4, 2), None, 200),
    _small("gcn", "amazon-computers", 2, 64, 0.5, 0.01, (1e-3, 0.0), (32, 16), 1.0, 200),
    _small("gcn", "amazon-photo", 2, 64, 0.5, 0.01, (1e-3, 0.0), (32, 16), None, 200),
    _small("gcn", "wikics", 2, 33, 0.25, 0.02, (5e-4, 0.0), (32, 16), 1.0, 200),
    # All convs of GAT have the first weight decay, though GAS's table names one for the rest.
    _small("gat", "cora", 2, 64, 0.6, 0.005, (5e-4, None), (40, 10), 1.0, 400, heads=8),
    _small("gat", "citeseer", 2, 64, 0.6, 0.005, (5e-4, None), (24, 8), None, 400, heads=8),
    _small("gat", "pubmed", 2, 64, 0.6, 0.01, (1e-3, None), (4, 1), None, 400, heads=8, out_heads=8),
    _small("gat", "coauthor-cs", 2, 64, 0.6, 0.005, (0.01, None), (8, 2), None, 400, heads=8),
    _small("gat", "coauthor-physics", 2, 64, 0.6, 0.005, (0.01, None), (4, 1), None, 400, heads=8),
    _small("gat", "wikics", 2, 70, 0.5, 0.007, (5e-4, None), (2, 1), None, 400, heads=5),
    _small("appnp", "cora", 10, 64, 0.5, 0.01, (5e-3, 0.0), (4, 2), None, 600, alpha=0.1),
    _small("appnp", "citeseer", 10, 64, 0.5, 0.01, (5e-3, 0.0), (24, 6), 1.0, 600, alpha=0.1),
    _small("appnp", "pubmed", 10, 64, 0.5, 0.01, (5e-3, 0.0), (4, 2), 1.0, 600, alpha=0.1),
    _small("appnp", "coauthor-cs", 10, 64, 0.5, 0.01, (5e-3, 0.0), (32, 16), None, 600, alpha=0.2),
    _small("appnp", "coauthor-physics", 10, 64, 0.5, 0.01, (5e-3, 0.0), (2, 1), 1.0, 600, alpha=0.2),
    _small("appnp", "amazon-computers", 10, 64, 0.5, 0.01, (5e-3, 0.0), (4, 2), None, 600, alpha=0.2),
    _small("appnp", "amazon-photo", 10, 64, 0.5, 0.01, (5e-3, 0.0), (16, 8), 1.0, 600, alpha=0.2),
    _small("appnp", "wikics", 2, 64, 0.4, 0.02, (5e-4, 0.0), (4, 2), None, 600, alpha=0.11),
    _small("gcnii", "cora", 64, 64, 0.6, 0.01, (0.01, 5e-4), (2, 1), None, 1000, theta=0.5),
    _small("gcnii", "citeseer", 32, 256, 0.7, 0.01, (0.01, 5e-4), (40, 20), 1.0, 1000, theta=0.6),
    _small("gcnii", "pubmed", 16, 256, 0.5, 0.01, (5e-4, 5e-4), (4, 2), None, 1000, theta=0.4),
    _small("gcnii", "coauthor-cs", 16, 64, 0.5, 0.01, (0.01, 5e-4), (16, 8), None, 1000, theta=0.5),
    _small("gcnii", "coauthor-physics", 16, 64, 0.5, 0.01, (0.01, 5e-4), (2, 1), 1.0, 1000, theta=0.5),
    _small("gcnii", "amazon-computers", 16, 64, 0.2, 0.01, (0.01, 5e-4), (32, 16), 1.0, 300, theta=0.5),
    _small("gcnii", "amazon-photo", 16, 64, 0.5, 0.01, (0.01, 5e-4), (4, 2), 1.0, 1000, theta=0.5),
    _small("gcnii", "wikics", 4, 128, 0.5, 0.01, (5e-4, 5e-4), (4, 2), None, 1000, theta=0.5),
)
LARGE = (  # layers, hidden, dropout, lr, (parts, parts per batch), clip, epochs
    _large("gcn", "reddit", 2, 256, 0.5, 0.01, (200, 100), None, 400),
    _large("gcn", "ppi", 2, 1024, 0.0, 0.005, (20, 2), None, 1000, linear=True, norm="batch", residual="before"),
    _large("gcn", "flickr", 2, 256, 0.3, 0.01, (24, 12), None, 400, input_dropout=0.3, norm="batch"),
    _large("gcn", "yelp", 2, 512, 0.0, 0.01, (40, 5), None, 500, residual="before", max_batches=4),
    _large("gcn", "arxiv", 3, 256, 0.5, 0.01, (80, 40), None, 300, norm="batch"),
    _large("gcn", "products", 3, 256, 0.3, 0.005, (7, 1), None, 300, max_batches=4),
    _large("gcnii", "reddit", 4, 256, 0.5, 0.01, (200, 100), None, 400, input_dropout=0.5, norm="batch"),
    _large("gcnii", "ppi", 9, 2048, 0.2, 0.001, (20, 2), 1.0, 2000, input_dropout=0.2, residual="before", alpha=0.5,
           theta=1.0),
    _large("gcnii", "arxiv", 4, 256, 0.3, 0.01, (40, 20), None, 500, norm="batch", alpha=0.2, shared_weights=True),
    _large("gcnii", "flickr", 8, 256, 0.5, 0.01, (24, 12), None, 400, input_dropout=0.5, norm="batch"),
    _large("gcnii", "yelp", 2, 512, 0.0, 0.01, (40, 5), None, 500, alpha=0.2, max_batches=4),
    _large("gcnii", "products", 5, 128, 0.0, 0.001, (150, 1), None, 240, edge_dropout=0.8),
    _large("pna", "ppi", 5, 2048, 0.2, 0.001, (20, 2), 1.0, 300, input_dropout=0.2, norm="batch", residual="before"),
    _large("pna", "arxiv", 3, 256, 0.5, 0.005, (40, 20), None, 500, norm="batch"),
    _large("pna", "flickr", 4, 64, 0.5, 0.005, (24, 12), None, 500, input_dropout=0.5, norm="batch",
           aggregators=["mean", "max"]),
    _large("pna", "yelp", 3, 512, 0.0, 0.005, (40, 5), 1.0, 400, residual="before", max_batches=4),
    _large("pna", "products", 3, 256, 0.3, 0.001, (150, 1), None, 150, edge_dropout=0.8),
    _large("pna-jk", "reddit", 3, 128, 0.5, 0.005, (200, 100), 1.0, 400, input_dropout=0.5, norm="batch",
           residual="before", aggregators=["mean", "max"]),
    # From GAS's examples: the graphs of CLUSTER as one dataset called `cluster`, under HOPLINE_DATA.
    _large("gin", "cluster", 4, 128, 0.0, 0.001, (10000, 256), None, 150, linear=True, residual="after",
           lipschitz=1.0, schedule=Schedule(name="plateau", factor=0.5, every=20, floor=1e-5)),
)
# fmt: on
ROWS = {row.name: row for row in (*SMALL, *LARGE)}


def history(name: str) -> RunConfig:
    """hopline train gas-MODEL-DATASET

    Historical embeddings by GNNAutoScale's own settings for a model (gcn, gat, appnp, gcnii, pna, pna-jk,
    gin) and a dataset (cora ... products). Published on cora: gcn 82.3%, gat 83.3%, appnp 83.2%, gcnii
    85.5%.
    """
    if name in ROWS:
        return ROWS[name].config()
    typed = name.removeprefix(PREFIX)
    alike = [row.name for row in ROWS.values() if typed.startswith(f"{row.model}-") or typed.endswith(f"-{row.data}")]
    raise ValueError(f"there is no run {name!r}: choose one of {', '.join(alike or ROWS)}.{nearest(name, ROWS)}")
