"""From a config to a run: what the commands do.

`settings` has each command's settings, `train` assembles objects from names and is the only place that does, `infer`
predicts with a finished run, `commands` converts, cuts and exports, `compare_methods` plans and times all methods,
`models` builds models by name, `doctor` says what a machine can do. It stands on `training` and below.
"""
