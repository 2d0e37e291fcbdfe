"""Memory that is promised: predicted, planned, kept to, and compared with what was measured.

`Budget`, `Outline` and `Plan` are records of `contract`, and each method makes its own plan in its folder. Read
`memory_plan` (what a run keeps where, and what a budget leaves), `predictor` (peak bytes of a step before it runs),
`probe` (steps measured before a run), `guard` (steps that keep to the plan) and `micro_batches` (a batch in groups of
seeds with the same gradients). A promise that does not hold is a bug. It stands on `contract`, `units` and below.
"""
