"""GraphSAGE in plain JAX, fed by hopline's sampler and feature store."""

from functools import partial

import jax  # type: ignore
import jax.numpy as jnp  # type: ignore
import torch

import hopline as hl


def forward(weights, x, edges, sizes):
    for weight, (source, target), size in zip(weights, edges, sizes, strict=True):
        total = jax.ops.segment_sum(x[source], target, size)
        count = jax.ops.segment_sum(jnp.ones(len(target)), target, size)
        x = jnp.concatenate([x[:size], total / jnp.maximum(count, 1)[:, None]], 1) @ weight
        x = jax.nn.relu(x) if weight is not weights[-1] else x
    return x


@partial(jax.jit, static_argnames="sizes")
def step(weights, x, edges, sizes, y):
    def loss_of(weights):
        return -jnp.take_along_axis(jax.nn.log_softmax(forward(weights, x, edges, sizes)), y[:, None], 1).mean()

    return [w - g for w, g in zip(weights, jax.grad(loss_of)(weights), strict=True)]


def main(name: str = "demo", epochs: int = 3) -> float:
    data = hl.open(name)
    # JAX compiles for every shape: pad=True makes it one. It keeps ids in 32 bits unless told otherwise.
    sampler = hl.interop.Sampler(data, (10, 5), pad=True, to="jax", index_dtype=torch.int32)
    features = hl.interop.table(data.x, to="jax")
    widths = [(data.num_features, 64), (64, data.num_classes)]
    weights = [jax.random.normal(jax.random.key(i), (2 * a, b)) / a**0.5 for i, (a, b) in enumerate(widths)]

    def batch(seeds):
        n_id, _, adjs = sampler.sample(seeds)
        return features[n_id], [adj.edge_index for adj in adjs], tuple(adj.size[1] for adj in adjs)

    train, test = data.splits["train"], data.splits["test"][:512]
    for seeds in (s for _ in range(epochs) for s in train[torch.randperm(len(train))].split(512)):
        weights = step(weights, *batch(seeds), hl.interop.to(data.labels[seeds].int(), "jax"))
    found = forward(weights, *batch(test)).argmax(1)
    return float((hl.interop.from_any(found) == data.labels[test]).float().mean())


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
