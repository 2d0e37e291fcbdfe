"""The trainer: the training loop, and all that surrounds it.

Read `trainer` first. Its module docstring shows the loop, which is `fit`, `_train_epochs`, `_train_epoch`
and `step`.

    trainer             the loop, for all methods
    inputs              checks of the arguments that a user gives to a Trainer, and of what must not change
    settings            TrainSettings and Schedule: plain data
    binding             data placed and the method bound to them, within a budget by a plan
    metric              the metric of a run: who computes it, and which values are best
    open_run            what comes before the first step: weights, schedule, callbacks, what is said
    run_folder          the folder of a run: lock, records, and the run that it replaces
    run_state           how far a run has come: what a checkpoint continues
    run_facts           facts about a run, for the report, config.json and checkpoints
    run_times           seconds and counters of each epoch, and peak memory
    optimizer           the optimizer, and its step as a CUDA graph
    lr_schedule         the learning rate over the epochs
    rank_steps          the same number of steps on every rank
    callbacks           the five hooks, and early stopping
    best_weights        the callback that keeps the best weights
    report_callbacks    callbacks for progress, the pipeline, the memory of a budget and stale embeddings
    evaluation          the metrics of a split
    validation          the evaluator: when an epoch is evaluated, and what its result does
    async_evaluation    the evaluator that works while training continues
    checkpoint          the state of a run in a file, and resuming from it

The files of a run folder are a contract: a format of another number is refused by name. The package imports
from `methods` and the folders below it.
"""
