"""Memory that is promised: predicted, planned, kept to, and compared with what was measured.

`Budget`, `Outline` and `Plan` are records of `contract`, and each method makes its own plan in its folder. Read
`memory_plan` (what a run keeps where, and what a budget leaves), `predictor` (peak bytes of a step before it runs),
`probe` (steps measured before a run), `guard` (steps that keep to the plan), `ledger` (promised and measured) and
`micro_batches` (a batch in groups of seeds with the same gradients). A promise that does not hold is a bug.

The queues of `Guard.run` and `Guard.step` stay two: pieces of a sampled batch are independent and tried one by one,
those of a historical batch need each other's rows. It stands on `contract`, `units` and below.
"""
