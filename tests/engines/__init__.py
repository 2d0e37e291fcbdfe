"""Engines that start processes and make their process group: Ray Train, Lightning Fabric, Accelerate, torchrun.

They run by `make test-engines`, in an environment of their own.
"""
