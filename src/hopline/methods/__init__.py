"""Ways to train, one folder each; a method is settings that `bind` to work.

`contract.py` says what a method owes the trainer. `partitioned/` is what Historical and FullBatch share. A fourth
method is a folder here: `settings.py` (plain data, without torch), `work.py` (units of an epoch), `memory_plan.py`,
and its line in `tests/equivalence`. `RunConfig.method` in `run/settings.py` names those that `method=` takes.
`plan_within` asks a method for a plan that fits a budget, and names another method where none does.
"""
