"""From settings to a run: the work of each command of `hopline`.

| module | purpose |
|---|---|
| `settings`, `model_settings` | Settings of each command and of models by name. They import no torch. |
| `train` | Turns names into objects, and trains. Read it first. |
| `saved` | Opens a finished run, and predicts in the form of its training data. |
| `infer` | Predicts and tests on the command line, and writes files. |
| `commands` | Converts, partitions and exports. |
| `compare_methods` | Plans and times all methods within a budget. |
| `models` | Builds models by name. |
| `doctor` | Checks a machine. |

The folder imports from `training` and the packages below it. `cli.py` calls it.
"""
