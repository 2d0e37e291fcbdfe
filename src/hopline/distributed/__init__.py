"""Processes that train together: ranks, their messages, and memory that they share.

Read `world` first: one rank's view of all, with the few exchanges there are. `gradients` combines gradients, `launch`
starts ranks, `existing_group` joins those of a process group that somebody else has made, `environment` reads the
variables of torchrun, Slurm and others, `heartbeat` finds a rank that died, `all_to_all` asks the owners of rows,
`shared_memory` maps one copy per host. The order of exchanges must be the same on all ranks. It stands on `core` and
below.

State of the process: `shared_memory` owns handles that were sent.
"""
