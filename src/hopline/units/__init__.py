"""Units of work that several methods use. A unit is work that ends in gradients, such as one batch.

    job               makes the job of a run, or of a copy of its model
    batch_unit        runs the training step on one batch, in the run's precision
    own_threads       threads of hopline's own for models of fused convs
    rank_facts        refuses ranks that were given different data, settings or models
    loss_at_outputs   computes a user's own loss over all seeds at once where the model ran in micro-batches
    measured_unit     measures a step that cannot be split

The folder imports from `contract` and the packages below it.
"""
