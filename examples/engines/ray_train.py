"""Ray Train: two workers, metrics and checkpoints by ray.train.report, and a run that goes on when a worker is lost."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train  # type: ignore
import torch
from ray.train.torch import TorchTrainer, get_device  # type: ignore
from torch_geometric.nn import SAGEConv

import hopline as hl


class ReportToRay(hl.Callback):
    """Reports every epoch, with the run's folder as it is then: any moment of a run can be resumed."""

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        assert trainer.out is not None
        is_written = (trainer.out / "checkpoint.pt").exists()  # by the first rank
        checkpoint = ray.train.Checkpoint.from_directory(trainer.out) if is_written else None
        ray.train.report({"epoch": epoch.epoch, "loss": epoch.loss}, checkpoint=checkpoint)


def train(config: dict[str, Any]) -> None:
    data = hl.open(config["data"])
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    method = hl.Sampled(fanouts=(10, 10), batch_size=256)  # seeds of one worker
    out = Path(tempfile.mkdtemp())
    if (checkpoint := ray.train.get_checkpoint()) is not None and ray.train.get_context().get_world_rank() == 0:
        checkpoint.to_directory(out)
    options = {"out": out, "resume": True, "device": get_device().type, "show": False, **config["train"]}
    run = hl.Trainer(model, data, method, callbacks=[ReportToRay()], **options).fit()
    last = ray.train.Checkpoint.from_directory(out) if run.rank == 0 else None
    ray.train.report({"test": run.test}, checkpoint=last)


def main(source: str = "demo", storage: str | None = None, loop: Any = train, **settings: Any) -> ray.train.Result:
    scaling = ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    failure = ray.train.FailureConfig(max_failures=1)
    run_config = ray.train.RunConfig(storage_path=storage, failure_config=failure)
    config = {"data": source, "train": {"epochs": 3, "checkpoint_s": 10} | settings}
    return TorchTrainer(loop, train_loop_config=config, scaling_config=scaling, run_config=run_config).fit()


if __name__ == "__main__":
    print(main(*sys.argv[1:3]).metrics)
