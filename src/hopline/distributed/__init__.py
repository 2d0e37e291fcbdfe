"""Processes that train together: ranks, their collective calls, and memory that they share.

Read `world` first: a `World` is one rank's view of all ranks, with the collective calls that hopline uses.

    world            the ranks, and sums, broadcasts and barriers over them
    agreement        refuses ranks that were given different things
    gradients        how gradients of the ranks are combined
    launch           starts ranks, or joins those that torchrun or Slurm has started
    existing_group   joins the ranks of a process group that somebody else has made
    environment      reads the variables of torchrun, Slurm and others
    membership       process groups and heartbeat of a rank, from joining to leaving
    heartbeat        finds a rank that died
    all_to_all       fetches rows from the ranks that own them
    shared_memory    arrays that all processes of a host map

All ranks must make their collective calls in the same order. The folder imports from `core` and the
packages below it.

State of the process: `shared_memory` keeps arrays whose handles were sent.
"""
