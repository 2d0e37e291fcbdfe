"""Tools that every other folder may use: settings, files, host, progress, signals, spans and counters.

| module | purpose |
|---|---|
| `config` | Settings to and from `key=value` and JSON. Read it first: its messages are what users see. |
| `own_code` | Imports of the user's functions and classes that a setting names. |
| `lazy` | Names of a package that are imported on first use. |
| `files` | Files that are written whole or not at all, and space reserved for mapped files. |
| `file_lock` | One writer per folder. |
| `host` | The identity and the cores of the host, and memory that glibc keeps when it is freed. |
| `progress`, `log` | Progress bars, and messages. |
| `output` | Standard output and error that may go away while a run continues. |
| `signals` | Ctrl-C, SIGTERM and a closed terminal as a request to write a checkpoint. |
| `trace` | Spans and counters, which cost nothing unless there is a listener. |
| `errors` | Errors that end a run. |

The folder imports no other folder. Only `trace` imports torch, so that settings are read without it.

State of the process: `progress` owns the displays of a terminal, `trace` the listeners, `signals` the
handlers during a run, `output` the standard streams during a run, `host` the settings of the heap and the
process that has torch's threads, `file_lock` the locks that it holds, `log` the logger's handler while the
command line runs.
"""
