"""The trainer: the loop, and what stands around it.

Read `trainer` first: `fit` and `step`, one loop without a question about the method. `inputs` checks what a user gives
it. `settings` and `lr_schedule` are
plain data, `optimizer` the update, `callbacks` the five hooks, `best_weights` and `report_callbacks` our own uses of
them, `checkpoint` and `run_lock` what a run needs to go on. `evaluation` measures a split, `validation` and
`async_evaluation` say when a run is validated; they hand results to the trainer as values. The files of a run folder
are a contract. It stands on `methods` and below.

State of the process: `run_lock` owns the locks of run folders that this process holds.
"""
