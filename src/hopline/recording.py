"""Who may use a GPU while a CUDA graph is recorded: nobody else in the process."""

import threading

turn = threading.RLock()
"""Held while a graph is recorded, which fails when another thread waits for the device, and during an evaluation beside
training, which does. A run records its graphs in its first steps, before there is anything to evaluate."""
