"""What a run did: records, its page, and what held it up.

`writer` appends JSON lines and a Chrome trace while a run lasts. `page` makes report.html of them, with `charts`,
`colours` and `format`; `settings` tells changed settings from defaults; `bottleneck` says why an epoch takes as long
as it does. Keys of the records are read by other programs: add, do not rename. It stands on `tables` and below.
"""
