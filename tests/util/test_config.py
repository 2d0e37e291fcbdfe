"""Settings to and from dictionaries, `key=value` overrides, and sizes."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from hopline.util import config as spec


@dataclass(frozen=True, kw_only=True)
class Sampled:
    fanouts: tuple[int, ...] = (15, 10, 5)
    """Neighbours drawn per hop."""
    batch_size: int = 1024
    """Seeds per batch."""


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    KNOWN_AS: ClassVar = {"wholegraph": {"num_shards": 1}}
    num_shards: int = 8
    """Shards, one resident at a time."""
    batch_size: int = 7
    """Not used."""

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ValueError(f"num_shards={self.num_shards}: write at least 1.")


@dataclass(frozen=True, kw_only=True)
class Model:
    name: Literal["gcn", "sage", "gat"] = "sage"
    """Which convolution."""
    hidden: int = 256
    """Width of the
    hidden layers."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    device: int | str = 0
    """Bytes on the device."""


@dataclass(frozen=True, kw_only=True)
class Base:
    seed: int = 0
    """Where randomness starts."""


@dataclass(frozen=True, kw_only=True)
class Run(Base):
    data: str
    """Which graph."""
    method: Sampled | FullBatch = field(default_factory=Sampled)
    """How it trains."""
    model: Model = field(default_factory=Model)
    """What it trains."""
    limits: Limits | None = None
    """Memory allowed."""
    lr: float = 0.003
    clip: float | None = None
    amp: bool = False
    out: Path = Path("runs")
    shape: tuple[int, int] = (1, 1)
    rates: tuple[float, ...] = ()
    tags: tuple[str, ...] = ()
    lag: int | Literal["auto"] = "auto"
    either: bool | int | str = 0
    epochs: int = 10


RUN = Run(data="demo")


def override_run(*assignments: str) -> Run:
    return spec.override(RUN, assignments)


def test_round_trip_through_json():
    run = Run(
        data="cora",
        method=FullBatch(num_shards=3),
        model=Model(name="gcn", hidden=8),
        limits=Limits(device="2GiB"),
        clip=1.0,
        out=Path("a/b"),
        rates=(0.5, 1.0),
        tags=("x", "y"),
        lag=2,
    )
    data = json.loads(json.dumps(spec.to_dict(run)))
    assert data["method"] == {"kind": "full_batch", "num_shards": 3, "batch_size": 7}
    assert data["model"] == {"name": "gcn", "hidden": 8}
    assert (data["out"], data["tags"]) == ("a/b", ["x", "y"])
    assert spec.from_dict(Run, data) == run
    assert spec.from_dict(Run, json.loads(json.dumps(spec.to_dict(RUN)))) == RUN


def test_from_dict_turns_an_integer_into_the_float_it_stands_for():
    lr = spec.from_dict(Run, {"data": "d", "lr": 1}).lr
    assert type(lr) is float
    assert lr == 1.0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"data": "d", "epoch": 3}, "Did you mean 'epochs'?"),
        ({"data": "d", "model": {"hiden": 3}}, "'model.hiden'. Did you mean 'hidden'?"),
        ({}, "needs data"),
        ({"data": "d", "epochs": "3"}, "epochs=3 is not valid"),
        ({"data": "d", "epochs": True}, "epochs=True is not valid"),
        ({"data": "d", "shape": [1, 2, 3]}, "expected 2 integers"),
        ({"data": "d", "method": {"num_shards": 2}}, "add 'kind'"),
        ({"data": "d", "method": {"kind": "sampledd"}}, "Did you mean 'sampled'?"),
        ({"data": "d", "method": {"kind": "full_batch", "num_shards": 0}}, "at least 1"),
        ({"data": "d", "model": {"name": "gcnn"}}, "Did you mean 'gcn'?"),
    ],
)
def test_from_dict_refuses(data: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=r".+") as error:
        spec.from_dict(Run, data)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("epochs=1_000", "epochs", 1000),
        ("epochs=1e5", "epochs", 100_000),
        ("epochs = 7 ", "epochs", 7),
        ("lr=1e-3", "lr", 0.001),
        ("lr=2", "lr", 2.0),
        ("amp=Yes", "amp", True),
        ("amp=off", "amp", False),
        ("data=a=b", "data", "a=b"),
        ("data=none", "data", "none"),
        ("out=x/y", "out", Path("x/y")),
        ("shape=(3, 4)", "shape", (3, 4)),
        ("rates=0.5", "rates", (0.5,)),
        ("rates=[1,2]", "rates", (1.0, 2.0)),
        ("rates=", "rates", ()),
        ("tags=a, b,", "tags", ("a", "b")),
        ("tags=('a',)", "tags", ("a",)),
        ("clip=None", "clip", None),
        ("clip=0.5", "clip", 0.5),
        ("lag=auto", "lag", "auto"),
        ("lag=3", "lag", 3),
        ("either=1", "either", 1),
        ("either=true", "either", True),
        ("either=maybe", "either", "maybe"),
        ("method=full_batch", "method", FullBatch()),
        ("model=gcn", "model", Model(name="gcn")),
        ("model.hidden=32", "model", Model(hidden=32)),
        ("method.fanouts=10,10", "method", Sampled(fanouts=(10, 10))),
        ("limits.device=2GiB", "limits", Limits(device="2GiB")),
        ("seed=4", "seed", 4),
    ],
)
def test_override_reads_values_by_annotation(assignment: str, name: str, value: object):
    ours = getattr(override_run(assignment), name)
    assert ours == value
    assert type(ours) is type(value)


def test_override_leaves_the_rest_and_the_original_alone():
    assert override_run("epochs=3") == Run(data="demo", epochs=3)
    assert RUN.epochs == 10
    assert override_run() == RUN


def test_later_assignments_win_and_a_kind_comes_before_its_fields():
    assert override_run("epochs=1", "epochs=2").epochs == 2
    assert override_run("method.num_shards=3", "method=full_batch").method == FullBatch(num_shards=3)
    assert override_run("model.name=gat", "model=gcn").model.name == "gcn"
    assert override_run("model=gcn", "model.name=gat", "model.hidden=1").model == Model(name="gat", hidden=1)


def test_picking_a_kind_carries_nothing_over():
    small = override_run("method.batch_size=64")
    assert spec.override(small, ["method=full_batch"]).method == FullBatch(batch_size=7)
    assert spec.override(small, ["method=sampled"]).method == Sampled()


def test_a_class_is_picked_by_another_name_with_the_settings_of_that_name():
    assert override_run("method=Whole-graph").method == FullBatch(num_shards=1)
    assert override_run("method=whole_graph", "method.batch_size=3").method == FullBatch(num_shards=1, batch_size=3)
    assert override_run("method.num_shards=4", "method=whole_graph").method == FullBatch(num_shards=4)


def test_none_removes_an_optional_dataclass():
    limited = override_run("limits.device=5")
    assert limited.limits == Limits(device=5)
    assert spec.override(limited, ["limits=none"]).limits is None


def test_assignments_of_one_level_are_checked_together():
    @dataclass(frozen=True, kw_only=True)
    class Pair:
        low: int = 0
        high: int = 1

        def __post_init__(self) -> None:
            if self.low >= self.high:
                raise ValueError("low must be below high")

    assert spec.override(Pair(), ["low=5", "high=6"]) == Pair(low=5, high=6)
    with pytest.raises(ValueError, match="below"):
        spec.override(Pair(), ["low=5"])


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("epochs", ["Cannot read 'epochs'", "key=value"]),
        ("=3", ["Cannot read '=3'"]),
        ("epoch=3", ["Unknown key 'epoch'", "Did you mean 'epochs'?", "Valid keys here: seed, data"]),
        ("hidden=3", ["Did you mean 'model.hidden'?"]),
        ("model.hiden=3", ["Unknown key 'model.hiden'", "'model.hidden'", "here: model.name, model.hidden."]),
        ("method.num_shards=3", ["It is a setting of method=full_batch."]),
        ("epochs.x=3", ["Unknown key 'epochs.x'"]),
        ("epochs=3.5", ["epochs=3.5", "an integer"]),
        ("epochs=none", ["epochs=none", "an integer"]),
        ("epochs=inf", ["epochs=inf"]),
        ("lr=fast", ["lr=fast", "a number"]),
        ("lr=nan", ["lr=nan"]),
        ("amp=maybe", ["amp=maybe", "true or false"]),
        ("shape=1", ["shape=1", "2 integers separated by commas"]),
        ("rates=1,x", ["rates=1,x", "numbers separated by commas"]),
        ("out=", ["out=", "a path"]),
        ("model=gcnn", ["model.name=gcnn", "'gcn' or 'sage'", "Did you mean 'gcn'?"]),
        ("method=fullbatch", ["method=fullbatch", "sampled or full_batch", "Did you mean 'full_batch'?"]),
        ("limits=5", ["limits=5", "limits.device"]),
    ],
)
def test_override_refuses(assignment: str, words: list[str]):
    with pytest.raises(ValueError, match=r".+") as error:
        override_run(assignment)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GiB", 20 * 2**30),
        ("0.1G", 2**30 // 10),
        (".1G", 2**30 // 10),
        ("200M", 200 * 2**20),
        ("3GB", 3 * 10**9),
        ("3gb", 3 * 10**9),
        ("512", 512),
        ("512B", 512),
        (1024, 1024),
        ("1.5 TiB", 3 * 2**39),
        ("4Ki", 4096),
        (0, 0),
    ],
)
def test_parse_size(text: str | int, num_bytes: int):
    assert spec.parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1G", -1, "nan", "inf", "20Gib/s", "GiB", "1e9", "1..5G", "5iB", True])
def test_parse_size_refuses(text: str | int):
    with pytest.raises(ValueError, match="write it as 20GiB"):
        spec.parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536 * 2**20, "1.5 GiB"),
        (2**30 - 1, "1 GiB"),
        (2**50, "1024 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_format_size(num_bytes: int, text: str):
    assert spec.format_size(num_bytes) == text


def test_a_noun_follows_its_number():
    assert [spec.plural(1, noun) for noun in ("micro-batch", "epoch")] == ["micro-batch", "epoch"]
    assert [spec.plural(n, noun) for n in (0, 2) for noun in ("micro-batch", "epoch")] == [
        "micro-batches",
        "epochs",
    ] * 2


def test_nearest_ignores_case_and_says_nothing_when_nothing_is_near():
    assert spec.nearest("FANOUT", ["batch_size", "fanouts"]) == " Did you mean 'fanouts'?"
    assert spec.nearest("zzz", ["batch_size", "fanouts"]) == ""


def test_settings_are_listed_with_group_type_default_and_sentence():
    listed = {(setting.group, setting.key): setting[2:] for setting in spec.settings_of(Run)}
    assert listed["run", "data"] == ("text", None, "Which graph.")
    assert listed["base", "seed"] == ("an integer", "0", "Where randomness starts.")
    assert listed["run", "method"] == ("sampled or full_batch", "sampled", "How it trains.")
    assert listed["method=full_batch", "method.num_shards"] == ("an integer", "8", "Shards, one resident at a time.")
    assert listed["method=sampled", "method.fanouts"][:2] == ("integers separated by commas", "15,10,5")
    assert listed["method=sampled", "method.batch_size"][1] == "1024"
    assert listed["method=full_batch", "method.batch_size"][1] == "7"
    assert listed["model", "model.hidden"] == ("an integer", "256", "Width of the hidden layers.")
    assert listed["model", "model"] == ("'gcn' or 'sage' or 'gat'", "sage", "Which convolution."), (
        "short for model.name"
    )
    assert ("model", "model.name") not in listed
    assert listed["run", "lr"] == ("a number", "0.003", "")
