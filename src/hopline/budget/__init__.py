"""Memory budgets: the memory of a run is predicted, planned, limited, and compared with measurements.

`Budget`, `Outline` and `Plan` are records of `contract`, and each method makes its own plan in its folder.
Read, in this order:

    memory_plan     resident bytes of a run by place, and what a budget leaves for steps
    predictor       the predicted peak of a step before it runs
    probe           steps measured before a run
    guard           runs the steps within the plan's limit
    ledger          predicted and measured bytes, for the report
    micro_batches   splits a batch into groups of seeds with the same gradients, or cuts edges from it

A step that exceeds its predicted peak is a bug.

`Guard.run` and `Guard.step` stay two loops: micro-batches of a sampled batch are independent and tried one
by one, while those of a historical batch need each other's rows.

The folder imports `contract`, `units` and layers below them.
"""
