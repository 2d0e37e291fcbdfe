"""Training methods, one folder each. A method is settings; its `bind` returns the work that the trainer
runs.

`hopline/contract.py` is the contract between a method and the trainer. `partitioned/` is the common base of
Historical and FullBatch. `plan_within` asks a method for a plan that fits a budget. If none fits, its error
names a method that does.

A fourth method is a folder with `settings.py` (plain data, without torch), `work.py` (the units of an
epoch) and `memory_plan.py`, a name in `listed.py`, and a line in `tests/equivalence`. Folders above ask a
`Method`, and never which one it is.
"""
