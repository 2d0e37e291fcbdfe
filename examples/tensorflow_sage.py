"""GraphSAGE in TensorFlow, fed by hopline's sampler and feature store."""

import hopline.interop as interop  # before TensorFlow: it loads Triton, which must come first

# isort: split
import tensorflow as tf  # type: ignore
import torch

import hopline as hl


def forward(layers, x, adjs):
    for layer, (edge_index, _, (_, size)) in zip(layers, adjs, strict=True):
        mean = tf.math.unsorted_segment_mean(tf.gather(x, edge_index[0]), edge_index[1], size)
        x = layer(tf.concat([x[:size], mean], 1))
    return x


def main(name: str = "demo", epochs: int = 3) -> float:
    data = hl.open(name)
    sampler = interop.Sampler(data, (10, 5), to="tensorflow")
    features = interop.table(data.x, to="tensorflow")
    labels = interop.table(data.labels, to="tensorflow")
    layers = [tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(data.num_classes)]
    optimizer = tf.keras.optimizers.Adam(0.01)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train, test = data.splits["train"], data.splits["test"][:2000]
    for seeds in (s for _ in range(epochs) for s in train[torch.randperm(len(train))].split(512)):
        n_id, _, adjs = sampler.sample(seeds)
        with tf.GradientTape() as tape:
            loss = loss_of(labels[seeds], forward(layers, features[n_id], adjs))
        weights = [w for layer in layers for w in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    n_id, _, adjs = sampler.sample(test)
    found = tf.argmax(forward(layers, features[n_id], adjs), 1)
    return float(tf.reduce_mean(tf.cast(found == labels[test], tf.float32)))


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
