"""Memory that is promised: predicted, planned, kept to, and compared with what was measured.

Read `settings`, then `memory_plan` (what a run keeps where, and what a step may take), `predictor` (peak bytes of a
step before it runs), `probe` (the plans of the methods, and steps measured for them), `plan_within` (a plan that
fits, or a refusal with what would), `guard` (steps that keep to the plan) and `micro_batches` (a batch in groups of
seeds with the same gradients). A promise that does not hold is a bug. It stands on `contract`, `units` and below.
"""
