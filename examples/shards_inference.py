"""Full-graph inference over shards, with the weights of a plain PyG model that another library has trained.

python examples/shards_inference.py            # torchrun --nproc-per-node 2 examples/shards_inference.py
"""

import torch
from torch_geometric.nn import GraphSAGE

import hopline as hl
from hopline.distributed.launch import LaunchSettings, run


def predict(world: hl.extend.World, name: str, folder: str, weights: str, out: str) -> None:
    if world.rank == 0:
        hl.shards.cut(hl.open(name), folder, world.size)
    world.barrier()
    data = hl.shards.open(folder, world)
    model = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=data.num_classes)
    model.load_state_dict(torch.load(weights, weights_only=True))
    batch_model = hl.nn.as_batch_model(model).eval()
    batches = hl.FullBatch().loader(data, torch.arange(data.num_nodes), model=model, world=world)
    with torch.no_grad():
        for batch in batches:  # one, of this rank's nodes: batch.seeds
            torch.save({"ids": batch.seeds, "scores": batch_model(batch)}, f"{out}-{world.rank}.pt")


def main(
    name: str = "demo", folder: str = "demo-shards", weights: str = "", out: str = "scores", devices: int = 1
) -> None:
    if not weights:  # stands for a training elsewhere
        data, weights = hl.open(name), "weights.pt"
        torch.save(GraphSAGE(data.num_features, 64, num_layers=2, out_channels=data.num_classes).state_dict(), weights)
    run(predict, LaunchSettings(devices=devices), name, folder, weights, out)


if __name__ == "__main__":
    main()  # writes scores-0.pt, scores-1.pt, ...
