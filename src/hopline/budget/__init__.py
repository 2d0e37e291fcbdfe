"""Memory budgets: the memory of a run is predicted, planned, limited, and compared with measurements.

Each method makes its own plan in its folder. Read, in this order:

    plan            `Budget`, `Outline` and `Plan`: the records of a plan, and how it is printed
    memory_plan     resident bytes of a run by place, and what a budget leaves for steps
    predictor       the predicted peak of a step before it runs
    probe           steps measured before a run
    guard           runs the steps within the plan's limit
    ledger          predicted and measured bytes, for the report
    micro_batches   splits a batch into groups of seeds with the same gradients, or cuts edges from it

A step may take more than was predicted, within its limit; one above the limit is counted and reported.

`Guard.run` and `Guard.step` stay two loops: micro-batches of a sampled batch are independent and tried one
by one, while those of a historical batch need each other's rows.

The folder imports `contract`, `units` and layers below them. `plan` belongs to the contract.
"""
