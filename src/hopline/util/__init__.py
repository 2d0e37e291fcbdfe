"""What every other folder may use: settings, files, cores and memory, progress, signals, spans and counters.

Read `config` first: it turns settings into JSON and `key=value` and back, and its messages are what users see.
`own_code` imports what a setting names of the user's own. `lazy` makes the doors of the library import names on first
use. `host` is about cores and freed memory, `trace` about spans and counters that cost nothing unless somebody listens.
Everything here may change inside; the texts of `config` and the files that `files` writes whole are relied on by all
commands. It imports no other folder, and no torch where settings are read.

State of the process: `progress` owns the displays of a terminal, `trace` the listeners, `signals` the handlers while
a run lasts, `host` whether freed memory is kept.
"""
