"""The trainer: the training loop, and all that surrounds it.

Read `trainer` first. Its module docstring shows the loop, which is `fit`, `_train_epochs`, `_train_epoch`
and `step`.

    trainer             the loop, for all methods
    inputs              checks of the arguments that a user gives to a Trainer
    settings            TrainSettings and Schedule: plain data
    optimizer           the optimizer, and its step as a CUDA graph
    lr_schedule         the learning rate over the epochs
    rank_steps          the same number of steps on every rank
    callbacks           the five hooks, and early stopping
    best_weights        the callback that keeps the best weights
    report_callbacks    callbacks for progress, reports and the memory of a budget
    watch_staleness     the callback that warns of stale historical embeddings
    evaluation          the metrics of a split
    validation          evaluators: when an epoch is evaluated, and results as values
    async_evaluation    the evaluator that works while training continues
    checkpoint          the state of a run in a file, and resuming from it
    run_facts           facts about a run, for the report, config.json and checkpoints

The files of a run folder are a contract: a format of another number is refused by name. The package imports
from `methods` and the folders below it.
"""
